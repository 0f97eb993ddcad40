"""Layers for people's models: tensor and expert parallelism, slices, context parallelism."""
