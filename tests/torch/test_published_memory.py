"""Activation memory against published arithmetic: Korthikanti et al. 2022, with t = 1.

A layer of theirs keeps sbh (34 + 5 a s / h) bytes in 16 bits: layer norms, unfused attention and
dropout as Megatron had them. Selective recompute drops the attention's 5 a s / h; full recompute
keeps a layer's input, 2 sbh.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import overlapc
from overlapc.ir import Problem
from overlapc.planning import formulate
from overlapc.profiler.estimate import estimate
from overlapc.profiler.hardware import load_hardware
from overlapc.simulate import saved_bytes
from overlapc.solvers import solve

SHAPES = {"7B": (4096, 32), "23B": (6144, 48), "175B": (12288, 96)}
SEQ, BATCH, LAYERS = 2048, 1, 4


class Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, width = x.shape
        q, k, v = self.qkv(self.norms[0](x)).chunk(3, -1)
        q, k, v = (t.view(batch, seq, self.heads, -1).transpose(1, 2) for t in (q, k, v))
        weights = F.dropout(torch.softmax(q @ k.transpose(-1, -2), -1), 0.1)
        mixed = (weights @ v).transpose(1, 2).reshape(batch, seq, width)
        x = x + F.dropout(self.proj(mixed), 0.1)
        return x + F.dropout(self.down(F.gelu(self.up(self.norms[1](x)))), 0.1)


def problem_of(width: int, heads: int) -> Problem:
    with FakeTensorMode():
        torch.set_default_dtype(torch.bfloat16)
        try:
            layers = (Layer(width, heads) for _ in range(LAYERS))
            model = nn.Sequential(nn.Dropout(0.1), *layers)  # behind the embedding
            x = torch.zeros(BATCH, SEQ, width, requires_grad=True)
            captured = overlapc.capture(model, x)
        finally:
            torch.set_default_dtype(torch.float32)
    return formulate(captured.trace, estimate(captured, load_hardware("a100-sxm-80")))


@pytest.mark.parametrize("name", SHAPES)
def test_what_a_layer_keeps(name):
    width, heads = SHAPES[name]
    problem = problem_of(width, heads)
    sbh = SEQ * BATCH * width
    attention = 5 * heads * SEQ / width
    published = {"none": 34 + attention, "selective": 34.0, "full": 2.0}
    for solver, each in published.items():
        plan = solve(problem, solver)
        kept = saved_bytes(problem, plan.saved) - sbh  # the mask behind the embedding
        assert kept / sbh / LAYERS == pytest.approx(each, rel=0.02), solver
