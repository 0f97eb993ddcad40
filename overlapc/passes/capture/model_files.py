"""`is_models` tells the files of a model's code from those that call it: a line that a user is told
is one of the former."""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch

_AROUND = tuple(str(Path(m.__file__).parent) for m in (torch, contextlib) if m.__file__)
_AROUND += (str(Path(__file__).parents[2]), "<")


def is_models(file: str) -> bool:
    """Is this a file of the model's code, not of PyTorch, Python or overlapc?"""
    return not file.startswith(_AROUND) or "site-packages" in file.removeprefix(_AROUND[0])
