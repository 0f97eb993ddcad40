"""What all folders use, and what knows nothing of plans."""
