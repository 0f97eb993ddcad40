"""From a plan to graphs that run."""
