"""Modules with raw collectives: the planned step is eager's, bit by bit, on real ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from overlapc.passes.capture import capture
from tests.multiprocess.spawn import run_ranks
from tests.torch.exact import bits, randn
from tests.torch.raw_models import Experts, TensorParallel, eager_step, planned_step

pytestmark = pytest.mark.multiprocess

MODELS: dict[str, Any] = {
    "tensor parallel": TensorParallel,
    "sequence parallel": partial(TensorParallel, sequence=True),
    "experts": Experts,
    "dropless": partial(Experts, dropless=True),
}


def on_rank(rank: int, ranks: int, name: str, solvers: list[str]) -> list[Any]:
    dist.init_process_group("gloo")

    def make() -> torch.nn.Module:
        torch.manual_seed(rank)
        return MODELS[name]()

    x = randn(8, 16, seed=rank if name != "tensor parallel" else 0)
    expected = bits_of(eager_step(make(), (x,)))
    found = []
    for solver in solvers:
        equal = equal_bits(expected, bits_of(planned_step(make(), (x,), solver)))
        found.append((solver, equal))
    starts = sum(op.role == "start" for op in capture(make(), x).trace.ops)
    dist.barrier()
    dist.destroy_process_group()
    return [found, starts]


def bits_of(step: Any) -> list[Any]:
    loss, gradients = step
    return [bits(t) for t in (loss, *gradients)]


def equal_bits(expected: list[Any], found: list[Any]) -> bool:
    return all(
        one[:2] == other[:2] and torch.equal(one[2], other[2])
        for one, other in zip(expected, found, strict=True)
    )


@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    ("name", "starts"),
    [("tensor parallel", 4), ("sequence parallel", 10), ("experts", 3), ("dropless", 4)],
)
def test_gradients_are_eagers(name: str, starts: int) -> None:
    for found, count in run_ranks(on_rank, 2, name, ["overlap", "full"], timeout_s=120):
        assert found == [("overlap", True), ("full", True)]
        assert count == starts
