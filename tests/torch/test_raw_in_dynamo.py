"""Through Dynamo, too, raw collectives are in the graph: the same ops, bitwise the same steps."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from overlapc import TrainStep, optimize
from overlapc.core.errors import CaptureError
from overlapc.emulate import Link, init_fabric
from overlapc.passes.capture import joint
from overlapc.passes.capture.front import capture
from tests.torch.exact import randn
from tests.torch.raw_models import Experts, TensorParallel, eager_step
from tests.torch.test_raw_collectives import (
    RANKS,
    REFUSED,
    Calls,
    Sequence,
    asked,
    barred,
    by_the_group,
    coalesced,
    each,
    received,
    scaled,
    scattered_unevenly,
    sent,
)

MODELS: dict[str, Callable[[], nn.Module]] = {
    "sequence parallel": partial(TensorParallel, sequence=True, layers=1),
    "experts": Experts,
}
ESTIMATE = {"profile": "estimate"}


@pytest.fixture(autouse=True)
def fabric() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        init_fabric(Link(alpha_s=0.0, bytes_per_s=1e13), world_size=RANKS, rank=1)
    yield
    dist.destroy_process_group()


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def names(captured: Any) -> list[str]:
    return [op.name for op in captured.trace.ops]


@each
@pytest.mark.parametrize("later", [False, True])
def test_the_graph_is_that_of_the_direct_tracer(call: Any, later: bool) -> None:
    def model(y: Tensor) -> Tensor:
        out, work = call(y, async_op=later)
        if later:
            work.wait()
        made: Tensor = out.sum()
        return made

    given = Calls(model), randn(4, 4)
    assert names(joint.capture(*given).captured) == names(capture(*given))


@pytest.mark.parametrize("name", MODELS)
def test_optimize_and_train_step_take_one_graph_and_are_exact(name: str) -> None:
    x = randn(8, 16)
    loss, gradients = eager_step(seeded(MODELS[name]), (x,))
    model = seeded(MODELS[name])
    optimized = optimize(model, **ESTIMATE)
    found = optimized(x)
    found.backward()
    assert len(optimized.graphs) == 1
    assert optimized.fallbacks == []
    assert torch.equal(found, loss)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert gradient is not None
        assert torch.equal(parameter.grad, gradient)

    model = seeded(MODELS[name])
    step = TrainStep(model, **ESTIMATE)
    assert all(torch.equal(found, loss) for found in step([(x,), (x,)]))
    assert step.fallbacks == []
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert torch.equal(parameter.grad, gradient + gradient)


def check_scale_is_seen(model: nn.Module, step: TrainStep, made: Callable[[float], Any]) -> None:
    """Half of the model's scale gives half of its gradients."""
    x = randn(8, 16)
    found = []
    for scale in (1.0, 0.5):
        model.scale = made(scale)
        model.zero_grad()
        step([(x,)])
        found.append([parameter.grad.clone() for parameter in model.parameters()])
    assert step.fallbacks == []
    for one, half in zip(*found, strict=True):
        assert torch.equal(one * 0.5, half)


def test_python_state_beside_asynchronous_collectives_is_guarded() -> None:
    model = seeded(partial(TensorParallel, layers=1))
    step = TrainStep(model, loss=lambda model, x: model(x) * model.scale, **ESTIMATE)
    check_scale_is_seen(model, step, lambda scale: scale)


# What Dynamo says of what it cannot trace, where the direct tracer says something else.
IN_DYNAMO = {
    asked: "has no attribute 'is_completed'",
    # Before torch 2.13 Dynamo goes into these, and ends at the process group.
    sent: r"isend|ProcessGroupVariable\(\) send",
    received: r"irecv|ProcessGroupVariable\(\) recv",
    barred: "dist.barrier cannot be captured",
    by_the_group: "allreduce",
    coalesced: "dist._coalescing_manager cannot be captured",
    scaled: "_make_nccl_premul_sum",
    scattered_unevenly: "RuntimeError when making fake tensor call: .* .at File .*test_raw_coll",
}


def test_a_tensor_that_is_a_plain_attribute_is_an_input() -> None:
    class Scaled(TensorParallel):
        scale: Tensor

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.scale

    model = seeded(partial(Scaled, layers=1))
    step = TrainStep(model, **ESTIMATE)
    check_scale_is_seen(model, step, torch.tensor)


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace:UserWarning")
@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_what_cannot_be_captured_is_named(call: Any, message: str) -> None:
    with pytest.raises(CaptureError, match=IN_DYNAMO.get(call, message)):
        joint.capture(Calls(call), randn(4, 4))


# Said by Dynamo before torch 2.13, of a class that is made in a test.
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin")
def test_what_runs_as_plain_pytorch_is_exact_all_the_same() -> None:
    calls = [("all_reduce", "rows", True, True), ("listed", "all", True, False)]

    class Kept(Sequence):
        """Also keeps a result that requires a gradient, which a TrainStep refuses."""

        def forward(self, x: Tensor) -> Tensor:
            self.kept = x @ self.weight
            return super().forward(x)

    x = randn(8, 8)
    loss, gradients = eager_step(Kept(calls), (x,))
    model = Kept(calls)
    step = TrainStep(model, **ESTIMATE)
    with pytest.warns(RuntimeWarning, match="as plain PyTorch"):
        (found,) = step([(x,)])
    assert torch.equal(found, loss)
    assert torch.equal(model.weight.grad, gradients[0])
