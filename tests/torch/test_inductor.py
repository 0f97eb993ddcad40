"""`backend="inductor"` stays as close to eager as torch.compile's own inductor does."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import overlapc

pytestmark = pytest.mark.skipif(
    shutil.which("c++") is None and shutil.which("g++") is None,
    reason="inductor needs a C++ compiler on CPU",
)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def gradients(model: Any, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


def distance(found: list[Tensor], reference: list[Tensor]) -> float:
    return max(
        float((a - b).abs().max() / b.abs().max().clamp_min(1e-12))
        for a, b in zip(found, reference, strict=True)
    )


@pytest.mark.parametrize("budget", [pytest.param(None, marks=pytest.mark.slow), 0.6])
def test_as_close_to_eager_as_torch_compile(budget: float | None) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(32) for _ in range(3)))
    x = torch.randn(8, 16, 32)
    reference = gradients(model, x)
    torch._dynamo.reset()
    theirs = distance(gradients(torch.compile(model), x), reference)
    torch._dynamo.reset()
    twin: Any = overlapc.optimize(
        model, memory_budget=budget, backend="inductor", profile="estimate"
    )
    ours = distance(gradients(twin, x), reference)
    assert twin.fallbacks == []
    assert len(twin.graphs) == 1
    assert bool(twin.plan.recomputed) == (budget is not None)
    assert ours <= max(2 * theirs, 1e-6)
    torch._dynamo.reset()
