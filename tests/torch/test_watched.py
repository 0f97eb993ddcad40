"""Gradients that somebody waits for at autograd's own nodes, or keeps in another type."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import overlapc
from overlapc.passes.capture.watched import watched
from overlapc.runtime.train_step import TrainStep
from tests.torch.exact import randn
from tests.torch.zoo import MLP

BATCHES = [(randn(4, 16, seed=i),) for i in range(3)]


def loss(model: nn.Module, *args: Any) -> Tensor:
    return model(*args).square().mean()


def node_of(parameter: Tensor) -> Any:
    return parameter.expand_as(parameter).grad_fn.next_functions[0][0]


def test_only_what_others_keep_is_watched() -> None:
    one, other, frozen = nn.Parameter(randn(3)), nn.Parameter(randn(3)), randn(3)
    node = node_of(one)
    assert watched([one, other, frozen, 3]) == {id(one)}
    assert watched([one, other]) == {id(one)}
    del node
    assert watched([one, other]) == set()
    with pytest.warns(UserWarning, match="Anomaly"), torch.autograd.detect_anomaly(check_nan=False):
        assert watched([one, other]) == set()


@pytest.mark.parametrize("slices", [1, 2])
def test_hooks_of_autograds_nodes_run(slices: int) -> None:
    """As data parallelism hangs its own there."""
    mine, twin = MLP(), MLP()
    twin.load_state_dict(mine.state_dict())
    kept, calls = [], {mine: 0, twin: 0}

    def count(model: nn.Module) -> Callable[..., None]:
        def called(*_: Any) -> None:
            calls[model] += 1

        return called

    for model in (mine, twin):
        first, *_, last = (node_of(parameter) for parameter in model.parameters())
        first.register_prehook(lambda gradients: (gradients[0] * 2,))
        last.register_hook(count(model))
        kept += [first, last]
    step = TrainStep(twin, loss, profile="estimate", slices=slices)
    batches = BATCHES if slices == 1 else BATCHES[:1]
    for _ in range(2):
        for batch in batches:
            for part in batch[0].chunk(slices):
                (loss(mine, part) / slices).backward()
        before = calls[twin]
        step(batches)
        assert calls[twin] - before >= len(batches) * slices
    for (name, one), other in zip(mine.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad), name
    assert step.report is not None
    assert step.fallbacks == []
    if slices == 1:
        assert calls[mine] == calls[twin]


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="newer releases have it")
def test_a_gradient_of_another_type() -> None:
    mine = MLP().bfloat16()
    twin, other = copy.deepcopy(mine), copy.deepcopy(mine)
    for model in (mine, twin, other):
        for parameter in model.parameters():
            parameter.grad_dtype = torch.float32
    batches = [(x.bfloat16(),) for (x,) in BATCHES]
    step = TrainStep(twin, loss, profile="estimate")
    with pytest.warns(RuntimeWarning, match=r"keeps its gradient as torch\.float32"):
        step(batches)
    for batch in batches:
        loss(mine, *batch).backward()
    for one, found in zip(mine.parameters(), twin.parameters(), strict=True):
        assert found.grad.dtype == torch.float32
        assert torch.equal(one.grad, found.grad)
    planned = overlapc.optimize(other, profile="estimate")
    loss(planned, *batches[0]).backward()
    assert any("grad_dtype" in line for line in planned.differences)
