"""Merged microbatches on several ranks: gradients are those of plain accumulation there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from overlapc import TrainStep
from overlapc.emulate import Link, init_link
from tests.multiprocess.mortal import caught
from tests.multiprocess.spawn import run_ranks
from tests.multiprocess.test_exactness_ranks import gpt, moe, tokens
from tests.torch.exact import Batch
from tests.torch.test_train_step import differences, eagerly, left_behind

pytestmark = pytest.mark.multiprocess

MODELS = {"gpt": gpt, "moe": moe}
SLOW_LINK = Link(alpha_s=2e-3, bytes_per_s=1e8)  # so that merging pays


def on_rank(rank: int, ranks: int, name: str, budgets: list[Any]) -> list[dict[str, Any]]:
    init_link(SLOW_LINK)
    own = rank if name == "moe" else 0  # tensor parallel ranks read the same

    def model() -> Any:
        torch.manual_seed(1)
        return MODELS[name]()

    batches = [(tokens(10 * i + own), tokens(i + 100 * own)) for i in range(4)]
    whole = lambda model, *args: model(*args)  # noqa: E731
    expected = eagerly(model(), [Batch(batch) for batch in batches], whole)
    found = []
    for budget in budgets:
        # Measured times follow the machine's load, and with them whether merging pays.
        costs = {"profile": "estimate", "hardware": "cpu-gloo"}
        step = TrainStep(model(), memory_budget=budget, solver="heu", **costs)
        torch.manual_seed(7)
        results = step(batches)
        after = left_behind(step.model, [Batch(batch) for batch in batches], results)
        report = step.report
        found.append(
            {
                "budget": budget,
                "differences": differences(expected, after),
                "merged": report is not None and report.merged is not None,
                "order": report.merged.plan.order if report and report.merged else None,
                "explained": step.explain()[:60],
            }
        )
    dist.barrier()
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize(
    ("name", "budget"),
    [
        ("gpt", 0.6),
        pytest.param("moe", None, marks=pytest.mark.slow),
        pytest.param("gpt", None, marks=pytest.mark.slow),
        pytest.param("moe", 0.6, marks=pytest.mark.slow),
    ],
)
def test_two_ranks(name: str, budget: float | None) -> None:
    everyone = run_ranks(on_rank, 2, name, [budget], timeout_s=280)
    for found in everyone:
        for case, first in zip(found, everyone[0], strict=True):
            assert case["differences"] == [], case
            assert case["order"] == first["order"]
    assert all(case["merged"] for case in everyone[0]), everyone[0]


def other_counts(rank: int, ranks: int) -> Any:
    dist.init_process_group("gloo")
    step = TrainStep(gpt())
    return caught(lambda: step([(tokens(0), tokens(1))] * (2 + rank)))


def test_ranks_must_have_as_many_microbatches() -> None:
    for kind, said, _, _ in run_ranks(other_counts, 2, timeout_s=120):
        assert kind == "RankError"
        assert "disagree on options" in said


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.wide = nn.Linear(16, 32)
        self.narrow = nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(self.wide(self.norm(x)).relu())


def dtensors(rank: int, ranks: int) -> Any:
    dist.init_process_group("gloo")
    mesh = dist.device_mesh.init_device_mesh("cpu", (ranks,))
    shares = {
        "norm": SequenceParallel(),
        "wide": ColwiseParallel(input_layouts=Shard(1)),
        "narrow": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }

    def made() -> nn.Module:
        torch.manual_seed(3)
        return parallelize_module(Mlp(), mesh, shares)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        found: Tensor = model(x).full_tensor().square().mean()
        return found

    given = [torch.randn(2, 4, 16, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    model, step = made(), TrainStep(made(), loss, profile="estimate", solver="heu")
    for _ in range(2):  # the second adds to what the first left
        for x in given:
            loss(model, x).backward()
        step(given)
    wrong = []
    for (name, one), other in zip(model.named_parameters(), step.model.parameters(), strict=True):
        a, b = one.grad, other.grad
        if a.placements != b.placements or not torch.equal(a.to_local(), b.to_local()):
            wrong.append((name, a.placements, b.placements))
    dist.barrier()
    dist.destroy_process_group()
    return wrong, step.fallbacks


def test_tensor_parallel_by_dtensor() -> None:
    for wrong, unchanged in run_ranks(dtensors, 2, timeout_s=200):
        assert wrong == []
        assert unchanged == []
