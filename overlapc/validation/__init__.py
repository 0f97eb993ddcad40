"""Predictions beside published runs."""
