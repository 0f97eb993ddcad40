from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..kernels import NormFunction


class RMSNorm(nn.Module):
    def __init__(
        self,
        normalized_shape: Any = None,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        normalized_shape = hidden_size if normalized_shape is None else normalized_shape
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        self.weight = nn.Parameter(torch.ones(normalized_shape, dtype=params_dtype))
        self.weight.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]

    def forward(self, input: Tensor) -> Tensor:
        out: Tensor = NormFunction.apply(input, self.weight, None, self.eps)
        return out


class LayerNorm(nn.Module):
    def __init__(
        self,
        normalized_shape: Any = None,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        normalized_shape = hidden_size if normalized_shape is None else normalized_shape
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        self.weight = nn.Parameter(torch.ones(normalized_shape, dtype=params_dtype))
        self.bias = nn.Parameter(torch.zeros(normalized_shape, dtype=params_dtype))
        for each in (self.weight, self.bias):
            each.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]

    def forward(self, input: Tensor) -> Tensor:
        out: Tensor = NormFunction.apply(input, self.weight, self.bias, self.eps)
        return out
