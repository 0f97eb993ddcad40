"""What a plan, a schedule and their files are, and what makes them right. Without torch."""

__version__ = "0.1.0"
