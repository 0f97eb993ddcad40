"""Modules with raw collectives: the planned step is eager's, bit by bit, on real ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from overlapc import TrainStep, optimize
from overlapc.passes.capture.front import capture
from tests.multiprocess.spawn import run_ranks
from tests.torch.exact import bits, randn
from tests.torch.raw_models import Experts, TensorParallel, eager_step, planned_step

pytestmark = pytest.mark.multiprocess

# Name -> the model, and how many collectives it starts.
MODELS: dict[str, tuple[Any, int]] = {
    "tensor parallel": (TensorParallel, 4),
    "sequence parallel": (partial(TensorParallel, sequence=True), 10),
    "experts": (Experts, 3),
    "dropless": (partial(Experts, dropless=True), 4),
}
SOLVERS = ("overlap", "full")


def on_rank(rank: int, ranks: int) -> list[Any]:
    dist.init_process_group("gloo")
    found = [(name, *compared(name, rank)) for name in MODELS]
    dist.barrier()
    dist.destroy_process_group()
    return found


def compared(name: str, rank: int) -> tuple[int, list[str]]:
    """How many collectives are captured, and the solvers whose steps are eager's."""
    kind, _ = MODELS[name]

    def make() -> torch.nn.Module:
        torch.manual_seed(rank)
        model: torch.nn.Module = kind()
        return model

    x = randn(8, 16, seed=rank if name != "tensor parallel" else 0)
    expected = bits_of(eager_step(make(), (x,)))
    equal = [s for s in SOLVERS if equal_bits(expected, bits_of(planned_step(make(), (x,), s)))]
    if name == "dropless":  # through Dynamo; the others are so in one process
        optimized = optimize(make(), profile="estimate")
        same = equal_bits(expected, bits_of(eager_step(optimized, (x,))))
        equal += optimized.fallbacks if same else ["optimize differs"]
        step = TrainStep(make(), profile="estimate")
        (loss,) = step([(x,)])
        gradients = [parameter.grad for parameter in step.model.parameters()]
        equal += [] if equal_bits(expected, bits_of((loss, gradients))) else ["TrainStep differs"]
        equal += step.fallbacks
    return sum(op.role == "start" for op in capture(make(), x).trace.ops), equal


def bits_of(step: Any) -> list[Any]:
    loss, gradients = step
    return [bits(t) for t in (loss, *gradients)]


def equal_bits(expected: list[Any], found: list[Any]) -> bool:
    return all(
        one[:2] == other[:2] and torch.equal(one[2], other[2])
        for one, other in zip(expected, found, strict=True)
    )


@pytest.mark.timeout(150)
def test_gradients_are_eagers() -> None:
    for found in run_ranks(on_rank, 2, timeout_s=120):
        assert found == [(name, starts, [*SOLVERS]) for name, (_, starts) in MODELS.items()]
