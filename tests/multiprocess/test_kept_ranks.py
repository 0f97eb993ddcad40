"""Ranks that start again have the plans of an earlier run, which their leader keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import overlapc
from overlapc.core.text import format_plan
from overlapc.planning import road
from tests.multiprocess.sharded import Case, batches, built
from tests.multiprocess.spawn import run_ranks

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(300)]


def _started(rank: int, _ranks: int, folder: str) -> tuple[list[str], int]:
    """The plans of a job that starts twice, and how often one was searched for."""
    searched = 0
    real = road.solve

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal searched
        searched += 1
        return real(*args, **kwargs)

    road.solve = counted
    dist.init_process_group("gloo")
    case, plans = Case(layers=1), []
    for _ in range(2):
        model, _ = built(case)
        cache = None if rank else Path(folder) / "costs.json"  # the leader's counts
        twin: Any = overlapc.optimize(model, profile="estimate", cache=cache)
        twin(batches(case, 0)[0]).backward()
        plans.append(format_plan(twin.plan))
    return plans, searched


def test_the_leaders_plans_are_those_of_all_ranks(tmp_path: Path) -> None:
    (plans, searched), (same, none) = run_ranks(_started, 2, str(tmp_path), timeout_s=200)
    assert plans == same
    assert plans[0] == plans[1]
    assert (searched, none) == (1, 0)
    assert len(list((tmp_path / "costs.plans").iterdir())) == 1
