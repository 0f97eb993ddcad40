"""What Python objects hold: found, described, kept and put back."""
