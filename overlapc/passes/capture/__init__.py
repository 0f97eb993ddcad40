"""From a model to its joint graph."""
