"""Merged microbatches on several ranks: gradients are those of plain accumulation there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

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
        step = TrainStep(model(), memory_budget=budget, solver="heu", timeout_s=30)
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
    step = TrainStep(gpt(), timeout_s=5)
    return caught(lambda: step([(tokens(0), tokens(1))] * (2 + rank)))


def test_ranks_must_have_as_many_microbatches() -> None:
    for kind, said, _, _ in run_ranks(other_counts, 2, timeout_s=120):
        assert kind == "RankError"
        assert "disagree on options" in said
