"""Declares torchvision's C++ operators where its binary does not load, so that it can be imported.

The wheel that ordinary indices serve is built for CUDA and finds no library beside a CPU build of
PyTorch. No model and no loop of these tests runs these operators.
"""

from __future__ import annotations

import contextlib
import importlib.util

import torch

_OPERATORS = (
    "nms",
    "qnms",
    "roi_align",
    "ps_roi_align",
    "roi_pool",
    "ps_roi_pool",
    "deform_conv2d",
)
_kept: list[torch.library.Library] = []


def declare() -> None:
    if _kept or importlib.util.find_spec("torchvision") is None or _loads():
        return
    library = torch.library.Library("torchvision", "DEF")
    for name in _OPERATORS:
        for each in (name, f"_{name}_backward"):
            library.define(f"{each}(Tensor given) -> Tensor")
    _kept.append(library)


def _loads() -> bool:
    folder = importlib.util.find_spec("torchvision").submodule_search_locations[0]  # type: ignore[union-attr, index]
    for binary in ("_C.so", "_C_stable.so"):  # releases have one or both
        with contextlib.suppress(OSError):
            torch.ops.load_library(f"{folder}/{binary}")
    return hasattr(torch.ops.torchvision, "nms")
