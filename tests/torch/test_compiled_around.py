"""`torch.compile` around our front doors: it calls them and does not trace them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from overlapc import TrainStep, optimize
from tests.torch.exact import DYNAMO_WARNINGS, randn
from tests.torch.test_slices import gradients
from tests.torch.zoo import MLP

pytestmark = DYNAMO_WARNINGS
Way = Callable[[nn.Module], Callable[[Tensor], Tensor]]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _itself(twin: nn.Module) -> Callable[[Tensor], Tensor]:
    return torch.compile(twin, backend="aot_eager")


def _within(twin: nn.Module) -> Callable[[Tensor], Tensor]:
    return torch.compile(lambda x: twin(x * 2).relu(), backend="aot_eager")


def _with_its_backward(twin: nn.Module) -> Callable[[Tensor], Tensor]:
    def step(x: Tensor) -> Tensor:
        out = twin(x)
        out.square().sum().backward()
        return out.detach()

    return torch.compile(step, backend="aot_eager")


def _without_gradients(twin: nn.Module) -> Callable[[Tensor], Tensor]:
    def evaluate(x: Tensor) -> Tensor:
        with torch.no_grad():
            return twin(x) + 1

    return torch.compile(evaluate, backend="aot_eager")


PLAIN: dict[Way, Way] = {
    _itself: lambda twin: twin,
    _within: lambda twin: lambda x: twin(x * 2).relu(),
    _with_its_backward: lambda twin: twin,
    _without_gradients: lambda twin: torch.no_grad()(lambda x: twin(x) + 1),
}


@pytest.mark.parametrize("slices", [1, 2, "auto"])
@pytest.mark.parametrize("way", PLAIN)
def test_an_outer_compile_changes_no_bit(way: Way, slices: Any) -> None:
    torch.manual_seed(1)
    model, x = MLP(), randn(8, 16)
    twin, alone = (optimize(model, slices=slices, profile="estimate") for _ in range(2))
    outer, plain = way(twin), PLAIN[way](alone)
    for i in range(3):
        found: list[Any] = []
        for call in (outer, plain):
            out = call(x + i)
            if out.requires_grad:
                out.square().sum().backward()
            found.append([out.detach(), *gradients(model).values()])
            model.zero_grad()
        assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    assert twin.fallbacks == alone.fallbacks == []  # nothing of ours was traced
    assert [report.name for report in twin.graphs] == [report.name for report in alone.graphs]


def test_a_step_within_an_outer_compile_changes_no_bit():
    torch.manual_seed(1)
    model, x = MLP(), randn(8, 16)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().mean()

    found = []
    for compiled in (True, False):
        step = TrainStep(model, loss, slices=2, profile="estimate")

        def outer(x: Tensor, step: TrainStep = step) -> Tensor:
            (result,) = step([(x * 2,)])
            return result + 1

        outer = torch.compile(outer, backend="aot_eager") if compiled else outer
        found.append([outer(x), outer(x + 1), *gradients(model).values()])
        model.zero_grad()
        assert step.fallbacks == []
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_an_outer_compile_of_the_full_graph_says_why_it_cannot():
    twin = optimize(MLP(), slices=2, profile="estimate")
    with pytest.raises(Exception, match=r"overlapc plans and runs it itself; expected .*fullgraph"):
        torch.compile(twin, backend="aot_eager", fullgraph=True)(randn(8, 16))
    with torch.no_grad():  # uncut, without gradients, it is the model itself
        plain = optimize(MLP(), profile="estimate")
        torch.compile(plain, backend="aot_eager", fullgraph=True)(randn(8, 16))
