from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from mamba_ssm.kernels import Kernel


def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    state_dtype: torch.dtype | None = None,
) -> Tensor:
    raise NotImplementedError("Megatron's training does not call it")


def mamba_split_conv1d_scan_combined(
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor,
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor,
    chunk_size: int,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    activation: str = "silu",
    rmsnorm_weight: Tensor | None = None,
    rmsnorm_eps: float = 1e-6,
    outproj_weight: Tensor | None = None,
    outproj_bias: Tensor | None = None,
    headdim: int | None = None,
    ngroups: int = 1,
    norm_before_gate: bool = True,
    state_dtype: torch.dtype | None = None,
) -> Tensor:
    assert initial_states is None
    assert rmsnorm_weight is None
    assert outproj_weight is None
    assert not return_final_states
    assert activation == "silu"
    assert headdim is not None
    scan = partial(_scanned, headdim, ngroups)
    out: Tensor = Kernel.apply(scan, zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D, seq_idx)
    return out


def _scanned(
    headdim: int,
    groups: int,
    zxbcdt: Tensor,
    weight: Tensor,
    bias: Tensor,
    dt_bias: Tensor,
    decay: Tensor,
    skip: Tensor,
    seq_idx: Tensor | None,
) -> Tensor:
    heads, (batch, length, _) = len(decay), zxbcdt.shape
    width = heads * headdim
    z, mixed, dt = zxbcdt.split((width, len(bias), heads), -1)
    taps = weight.shape[1]
    convolved = bias.expand_as(mixed)
    for tap in range(taps):
        back = taps - 1 - tap
        shifted = F.pad(mixed, (0, 0, back, 0))[:, :length]
        if seq_idx is not None:  # what lies in another sequence is not seen
            earlier = F.pad(seq_idx, (back, 0), value=-1)[:, :length]
            shifted = shifted * (earlier == seq_idx)[..., None]
        convolved = convolved + shifted * weight[:, tap]
    x, b, c = F.silu(convolved).split((width, *2 * [(len(bias) - width) // 2]), -1)
    x = x.view(batch, length, heads, headdim)
    b, c = (
        each.view(batch, length, groups, -1).repeat_interleave(heads // groups, 2)
        for each in (b, c)
    )
    dt = F.softplus(dt.float() + dt_bias)
    state = x.new_zeros(batch, heads, headdim, b.shape[-1], dtype=torch.float32)
    made = []
    for t in range(length):
        keep = torch.exp(dt[:, t] * decay)
        if seq_idx is not None and t:
            keep = keep * (seq_idx[:, t] == seq_idx[:, t - 1])[:, None]
        step = (dt[:, t, :, None] * x[:, t])[..., None] * b[:, t, :, None]
        state = state * keep[..., None, None] + step
        made.append((state * c[:, t, :, None]).sum(-1) + skip[:, None] * x[:, t])
    return torch.stack(made, 1).flatten(2).to(z.dtype) * F.silu(z)
