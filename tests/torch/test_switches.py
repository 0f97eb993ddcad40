"""A switch of PyTorch's that is set around the forward alone: recompute is the forward's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import overlapc
from overlapc.passes.switches import switched, switches
from tests.torch.exact import Batch, differences, randn, train


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.sin(layer(torch.tanh(x)))
        return x


def made() -> nn.Module:
    torch.manual_seed(1)
    return Convolutions()


@contextlib.contextmanager
def without_mkldnn() -> Iterator[None]:
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(True)


def test_the_switch_makes_a_difference() -> None:
    batches = [Batch((randn(2, 8, 16, 16),))]
    assert differences(train(made(), batches), train(made(), batches, around=without_mkldnn))


@pytest.mark.parametrize("around", [without_mkldnn, contextlib.nullcontext])
@pytest.mark.parametrize("budget", [None, 0.8])
def test_recompute_is_the_forwards(around: Callable[[], Any], budget: float | None) -> None:
    batches = [Batch((randn(2, 8, 16, 16, seed=seed),)) for seed in range(3)]
    expected = train(made(), batches, around=around)
    model = overlapc.optimize(made(), memory_budget=budget)
    found = train(model, batches, around=around)
    assert differences(expected, found) == []
    assert model.unchanged == []
    assert bool(model.plan.recomputed) == (budget is not None)


def test_a_forward_with_another_switch_is_another_graph() -> None:
    batch = [Batch((randn(2, 8, 16, 16),))]
    model = overlapc.optimize(made(), memory_budget=0.8)
    for around in (without_mkldnn, contextlib.nullcontext, without_mkldnn):
        expected = train(made(), batch, around=around)
        model.load_state_dict(made().state_dict())
        assert differences(expected, train(model, batch, around=around)) == []
    assert len(model.reports) == 2


def test_switches_are_set_and_set_back() -> None:
    before = switches()
    with without_mkldnn(), switched(before):
        assert switches() == before
    with torch.backends.cudnn.flags(benchmark=True, allow_tf32=False):
        wanted = switches()
    assert switches() == before != wanted
    with switched(wanted):
        assert switches() == wanted
        assert torch.backends.cudnn.benchmark
    assert switches() == before


def test_switches_of_which_only_the_newer_can_be_read() -> None:
    before = switches()
    try:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        with without_mkldnn():
            mixed = switches()
        assert "cublas_allow_tf32" not in mixed
        with switched(before):
            assert switches() == before
        with switched(mixed):
            assert switches() == mixed
    finally:
        torch.backends.cuda.matmul.fp32_precision = "none"
        torch.set_float32_matmul_precision("highest")
