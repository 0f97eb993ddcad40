from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from mamba_ssm.kernels import Kernel


class RMSNorm(torch.nn.Module):
    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        group_size: int | None = None,
        norm_before_gate: bool = True,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps, self.group_size = eps, group_size or hidden_size
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        self.norm_before_gate = norm_before_gate

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        norm = partial(_norm, self.eps, self.group_size, self.norm_before_gate)
        out: Tensor = Kernel.apply(norm, x, z, self.weight)
        return out


def _norm(
    eps: float, size: int, before_gate: bool, x: Tensor, z: Tensor | None, weight: Tensor
) -> Tensor:
    if z is not None and not before_gate:
        x = x * F.silu(z)
    groups = x.float().unflatten(-1, (-1, size))
    scaled = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + eps)
    out = (scaled.flatten(-2) * weight.float()).to(x.dtype)
    return out * F.silu(z) if z is not None and before_gate else out
