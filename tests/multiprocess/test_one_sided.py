"""What one rank cannot capture all run as plain PyTorch, at once; then they plan what follows."""

from __future__ import annotations

import time
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist

import overlapc
from tests.multiprocess.spawn import run_ranks
from tests.torch.exact import randn
from tests.torch.raw_models import TensorParallel, eager_step

pytestmark = pytest.mark.multiprocess

PROMISED_S = 60.0  # a rank that is waited for in vain takes half an hour
X = randn(8, 16)


class Writes(TensorParallel):
    """One rank writes to a parameter: `TrainStep` refuses it before it plans."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if dist.get_rank() == 1:
            with torch.no_grad():
                self.ups[0].mul_(1.0)
        return super().forward(x)


class Left(TensorParallel):
    """One rank never waits for a collective: tracing it fails, of `optimize`'s graph, too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if dist.get_rank() == 1:
            dist.all_reduce(torch.ones(1), async_op=True)
        else:
            dist.all_reduce(torch.ones(1))
        return super().forward(x)


def model_of(kind: type[TensorParallel]) -> TensorParallel:
    torch.manual_seed(0)
    return kind(layers=1)


def stepped(kind: type[TensorParallel], options: dict[str, Any]) -> tuple[Any, list[str]]:
    step = overlapc.TrainStep(model_of(kind), **options)
    (loss,) = step([(X,)])
    return (loss, [p.grad for p in step.model.parameters()]), step.fallbacks


def optimized(kind: type[TensorParallel], options: dict[str, Any]) -> tuple[Any, list[str]]:
    twin = overlapc.optimize(model_of(kind), **options)
    return eager_step(twin, (X,)), twin.fallbacks


def on_rank(rank: int, ranks: int) -> list[Any]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    options = {"profile": "estimate", "solver": "heu"}
    expected = eager_step(model_of(TensorParallel), (X,))
    found = []
    for door, kind in ((stepped, Writes), (optimized, Left)):
        dist.barrier()
        begin = time.monotonic()
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            plain, unchanged = door(kind, options)
        took_s = time.monotonic() - begin
        said = [str(w.message) for w in warned if "as plain PyTorch" in str(w.message)]
        planned, still = door(TensorParallel, options)
        found.append((same(expected, plain), unchanged, said, took_s))
        found.append((same(expected, planned), still, [], 0.0))
    dist.barrier()
    dist.destroy_process_group()
    return found


def same(one: Any, other: Any) -> bool:
    (loss, gradients), (found, others) = one, other
    pairs = zip(gradients, others, strict=True)
    return torch.equal(loss, found) and all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.timeout(120)
def test_all_ranks_fall_back_together() -> None:
    reasons = {0: "changes 1 parameters or inputs in its forward", 2: "is never waited for"}
    for rank, found in enumerate(run_ranks(on_rank, 2, timeout_s=100)):
        for i, (exact, unchanged, said, took_s) in enumerate(found):
            assert exact
            assert len(unchanged) == len(said) == (i in reasons)
            if i in reasons:
                assert reasons[i] in unchanged[0]
                assert ("on rank 1" in unchanged[0]) == (rank == 0)
                assert took_s < PROMISED_S
