from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..kernels import kernel


def _turned(x: Tensor) -> Tensor:
    one, other = x.chunk(2, -1)
    return torch.cat((-other, one), -1)


class FusedRoPEFunc(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: Tensor, freqs: Tensor) -> Tensor:
        kernel(t, freqs)
        angles = freqs[: t.shape[0]]
        cos, sin = angles.cos().to(t.dtype), angles.sin().to(t.dtype)
        ctx.save_for_backward(cos, sin)
        return t * cos + _turned(t) * sin

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        kernel(grad)
        one, other = (grad * sin).chunk(2, -1)
        return grad * cos + torch.cat((other, -one), -1), None


def apply_rotary_pos_emb(
    t: Tensor,
    freqs: Tensor,
    tensor_format: str = "sbhd",
    start_positions: Tensor | None = None,
    interleaved: bool = False,
    fused: bool = False,
    cu_seqlens: Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> Tensor:
    if tensor_format == "thd":
        assert cu_seqlens is not None
        lengths = [b - a for a, b in pairwise(cu_seqlens.tolist())]
        freqs = torch.cat([freqs[:length, 0] for length in lengths])
    out: Tensor = FusedRoPEFunc.apply(t, freqs)
    return out
