"""What no plan can be better than."""
