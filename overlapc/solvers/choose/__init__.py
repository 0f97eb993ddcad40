"""What is kept and what is recomputed."""
