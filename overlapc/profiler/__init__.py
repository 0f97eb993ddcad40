"""The profiler measures or estimates ops and links. Begin with `measure.py`."""
