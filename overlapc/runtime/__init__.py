"""The runtime runs planned graphs, on one rank or many. Begin with `backend.py`."""
