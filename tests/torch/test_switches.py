"""A switch of PyTorch's that is set around the forward alone: recompute is the forward's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import overlapc
from overlapc.passes.exact.switches import switched, switches
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


FULL: dict[str, Any] = {"solver": "full", "profile": "estimate"}


@pytest.mark.parametrize("around", [without_mkldnn, contextlib.nullcontext])
@pytest.mark.parametrize("solver", ["none", "full"])
def test_recompute_is_the_forwards(around: Callable[[], Any], solver: str) -> None:
    batches = [Batch((randn(2, 8, 16, 16, seed=seed),)) for seed in range(3)]
    expected = train(made(), batches, around=around)
    model = overlapc.optimize(made(), **FULL | {"solver": solver})
    found = train(model, batches, around=around)
    assert differences(expected, found) == []
    assert model.fallbacks == []
    again = [name for name in model.plan.recomputed if "convolution" in name]
    assert bool(again) == (solver == "full")


def test_so_it_is_where_nothing_guards_switches() -> None:
    """`torch.compile` traces once for all of them."""
    expected, found = [], []
    for results, compiled in ((expected, False), (found, True)):
        model = made()
        run = torch.compile(model, backend="overlapc", options=FULL) if compiled else model
        for forward, backward in ((True, True), (False, False), (False, True), (True, False)):
            model.zero_grad()
            torch._C._set_mkldnn_enabled(forward)
            loss = run(randn(2, 8, 16, 16)).square().mean()
            torch._C._set_mkldnn_enabled(backward)
            loss.backward()
            torch._C._set_mkldnn_enabled(True)
            results.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
    for one, other in zip(expected, found, strict=True):
        assert all(map(torch.equal, one, other))


def test_random_ops_are_recomputed_as_in_the_forward() -> None:
    seen: list[bool] = []

    class Noisy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(3):
                x = torch.sin(nn.functional.dropout(x * 1.5, 0.3))
            return x

    batches = [Batch((randn(4, 8),))]
    x = randn(4, 8).requires_grad_()
    expected = train(Noisy(), batches, around=without_mkldnn)
    model = overlapc.optimize(Noisy(), **FULL)
    assert differences(expected, train(model, batches, around=without_mkldnn)) == []
    with without_mkldnn():
        loss = model(x).sum()

    class Watch(TorchDispatchMode):
        supports_higher_order_operators = True

        def __torch_dispatch__(
            self, op: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if "rng_state" in str(op):
                seen.append(torch._C._get_mkldnn_enabled())
            return op(*args, **kwargs or {})

    with Watch():
        loss.backward()
    assert seen
    assert not any(seen)


def test_slices_say_that_a_switch_has_changed() -> None:
    model = overlapc.optimize(made(), slices=2, **FULL)
    x = randn(4, 8, 16, 16)
    model(x).square().mean().backward()
    with without_mkldnn():
        loss = model(x).square().mean()
    with pytest.raises(RuntimeError, match="mkldnn_enabled was False and is True"):
        loss.backward()


def test_a_forward_with_another_switch_is_another_graph() -> None:
    batch = [Batch((randn(2, 8, 16, 16),))]
    model = overlapc.optimize(made(), **FULL)
    for around in (without_mkldnn, contextlib.nullcontext, without_mkldnn):
        expected = train(made(), batch, around=around)
        model.load_state_dict(made().state_dict())
        assert differences(expected, train(model, batch, around=around)) == []
    assert len(model.graphs) == 2


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


def test_a_precision_that_two_switches_say_stays_readable() -> None:
    """The older of them makes "high" of "medium"."""
    highest = switches()
    try:
        torch.set_float32_matmul_precision("medium")
        medium = switches()
        with switched(highest):
            assert torch.get_float32_matmul_precision() == "highest"
        assert torch.get_float32_matmul_precision() == "medium"
        torch.set_float32_matmul_precision("highest")
        with switched(medium):
            assert torch.get_float32_matmul_precision() == "medium"
        assert switches() == highest
    finally:
        torch.set_float32_matmul_precision("highest")


def test_what_follows_another_switch_still_follows_it() -> None:
    before = switches()
    try:
        torch.backends.fp32_precision = "tf32"
        with switched(before):
            pass
        torch.backends.fp32_precision = "ieee"
        assert torch.backends.mkldnn.matmul.fp32_precision == "ieee"
    finally:
        torch.backends.fp32_precision = "none"
