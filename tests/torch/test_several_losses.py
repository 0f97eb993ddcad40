"""Several backwards of one forward: several losses, kept graphs, a loss that is only looked at."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch.nn import functional as F

import overlapc

Loop = Callable[[Tensor, Tensor, nn.Module], None]


class TwoHeads(nn.Module):
    """A trunk with dropout, and two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)
        self.one, self.other = nn.Linear(8, 4), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.down(F.dropout(F.gelu(self.up(x)), 0.1, self.training))
        return self.one(h), self.other(h)


def one_by_one(one: Tensor, other: Tensor, _model: nn.Module) -> None:
    one.square().mean().backward(retain_graph=True)
    other.exp().mean().backward()


def together(one: Tensor, other: Tensor, _model: nn.Module) -> None:
    torch.autograd.backward([one.square().mean(), other.exp().mean()])


def twice(one: Tensor, _other: Tensor, _model: nn.Module) -> None:
    loss = one.square().mean()
    loss.backward(retain_graph=True)
    loss.backward()


def by_its_share(one: Tensor, other: Tensor, model: Any) -> None:
    """The second loss counts as much as the first by their gradients of a last shared weight, as a
    VQGAN weighs its discriminator."""
    first, second = one.square().mean(), other.exp().mean()
    norms = [
        torch.autograd.grad(loss, model.down.weight, retain_graph=True)[0].norm()
        for loss in (first, second)
    ]
    (first + second * (norms[0] / norms[1]).detach()).backward()


def looked_at(one: Tensor, other: Tensor, _model: nn.Module) -> None:
    """The graph of the second loss is kept until all is printed."""
    watched = other.exp().mean()
    one.square().mean().backward(retain_graph=True)
    assert watched.item() > 0


LOOPS = [one_by_one, twice, by_its_share, looked_at]


def trained(model: nn.Module, loop: Loop) -> list[Tensor]:
    """The first step has one backward, as PyTorch then expects of all."""
    torch.manual_seed(0)
    found = []
    for step in (together, loop, together):
        model.zero_grad()
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(len(found)))
        step(*model(x), model)
        # An output that no loss takes gives zeros here, as in any torch.compile.
        found += [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return found


@pytest.mark.parametrize("budget", [None, 0.7])
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_losses_of_one_forward(loop: Loop, budget: float | None) -> None:
    torch.manual_seed(0)
    model = TwoHeads()
    expected = trained(model, loop)
    twin: Any = overlapc.optimize(model, memory_budget=budget, profile="estimate")
    found = trained(twin, loop)
    assert twin.fallbacks == []
    assert all(map(torch.equal, found, expected))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler on CPU")
def test_inductor_is_told_beforehand() -> None:
    """Inductor writes into what a backward has saved, unless it is told not to."""
    torch.manual_seed(0)
    model = TwoHeads().eval()
    options = {"backend": "inductor", "profile": "estimate"}
    with pytest.raises(RuntimeError, match=r"_functorch\.config\.donated_buffer=False"):
        trained(overlapc.optimize(model, **options), one_by_one)
    with functorch_config.patch(donated_buffer=False):
        found = trained(overlapc.optimize(copy.deepcopy(model), **options), one_by_one)
    torch.testing.assert_close(found, trained(model, one_by_one))
