from __future__ import annotations

from . import cross_entropy, distributed, fp8, ops, permutation, router, tensor
from .fp8 import fp8_autocast, fp8_model_init
from .module import release
from .module.norms import LayerNorm, RMSNorm

Linear = release.Linear
LayerNormLinear = release.LayerNormLinear
LayerNormMLP = release.LayerNormMLP
GroupedLinear = release.GroupedLinear
DotProductAttention = release.DotProductAttention

__all__ = [
    "DotProductAttention",
    "GroupedLinear",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "RMSNorm",
    "cross_entropy",
    "distributed",
    "fp8",
    "fp8_autocast",
    "fp8_model_init",
    "ops",
    "permutation",
    "router",
    "tensor",
]
