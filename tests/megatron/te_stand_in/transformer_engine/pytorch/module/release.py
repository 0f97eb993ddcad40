"""The classes of the release that the stand-in stands for."""

from __future__ import annotations

import transformer_engine

from ..attention.dot_product_attention import DotProductAttention
from . import later
from .linears import GroupedLinear, LayerNormLinear, LayerNormMLP, Linear

if transformer_engine.__version__ != "2.9.0":
    Linear = later.Linear  # type: ignore[misc]
    LayerNormLinear = later.LayerNormLinear  # type: ignore[misc]
    LayerNormMLP = later.LayerNormMLP  # type: ignore[misc]
    GroupedLinear = later.GroupedLinear  # type: ignore[misc]
    DotProductAttention = later.DotProductAttention  # type: ignore[misc]

__all__ = ["DotProductAttention", "GroupedLinear", "LayerNormLinear", "LayerNormMLP", "Linear"]
