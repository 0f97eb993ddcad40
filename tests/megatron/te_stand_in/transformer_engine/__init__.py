"""A stand-in for Transformer Engine on CPU, for tests alone: its classes have the names, signatures
and attributes of TE's, and behave in Python as these do. Its numbers are those of torch.

The environment variable OVERLAPC_TE says which release it stands in for: 2.9 or 2.18.
`tests/megatron/te_sources.py` compares it with the sources of both.
"""

from __future__ import annotations

import os

__version__ = {"2.9": "2.9.0", "2.18": "2.18.0"}[os.environ.get("OVERLAPC_TE", "2.9")]

from . import common, pytorch

__all__ = ["__version__", "common", "pytorch"]
