"""A model that a loop holds is planned in place, and is its own again afterwards."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from overlapc.core.errors import OptionError
from overlapc.integrations.accelerate import overlap
from overlapc.integrations.in_place import InPlace

OPTIONS = {"profile": "estimate", "solver": "heu"}


def made() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))


def gradients(model: nn.Module) -> list[Tensor]:
    torch.manual_seed(1)
    for _ in range(2):
        model(torch.rand(4, 8)).square().sum().backward()
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return found


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def test_calls_are_planned_until_restored() -> None:
    expected, model = gradients(made()), made()
    planned = overlap(model, **OPTIONS)
    assert same(gradients(model), expected)
    assert len(planned.graphs) == 1
    assert "step" in planned.explain()
    with torch.no_grad():
        assert torch.equal(model(torch.ones(1, 8)), made()(torch.ones(1, 8)))
    assert list(model.state_dict()) == list(made().state_dict())
    assert same(gradients(copy.deepcopy(model)), expected)
    planned.restore()
    assert same(gradients(model), expected)
    assert model._compiled_call_impl is None
    planned.begin()
    assert same(gradients(model), expected)
    assert len(planned.graphs) == 1  # the plan is still there


def test_the_same_options_give_what_is_there() -> None:
    model = made()
    first = overlap(model, **OPTIONS)
    assert overlap(model, **OPTIONS) is first
    second = overlap(model, **OPTIONS, memory_budget=0.9)
    assert second is not first
    assert model._compiled_call_impl is second


def test_an_error_of_the_model_leaves_it_planned() -> None:
    model = made()
    planned = overlap(model, **OPTIONS)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.rand(4, 7))
    assert model._compiled_call_impl is planned
    assert gradients(model)


def test_compiled_calls_are_named() -> None:
    model = made()
    model.compile(backend="eager")
    with pytest.raises(OptionError, match=r"model.compile\(\) compiles"):
        InPlace(model)


@pytest.fixture
def lone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("lone")
def test_the_model_within_replicas_is_planned() -> None:
    expected = gradients(made())
    model = DistributedDataParallel(made())
    planned = overlap(model, **OPTIONS)
    assert same(gradients(model), expected)
    assert planned.model is model.module
    assert len(planned.graphs) == 1
