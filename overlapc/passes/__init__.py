"""Passes between PyTorch's graphs and overlapc's traces and plans. Begin with `trace.py`."""
