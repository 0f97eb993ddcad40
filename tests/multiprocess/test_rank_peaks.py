"""Ranks whose experts get unlike loads: each peak is predicted by the sizes of that rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import overlapc
from examples.moe.model import MoEConfig, MoEGPT
from overlapc.profiler.memory import measure_peak
from tests.multiprocess.spawn import run_ranks

pytestmark = pytest.mark.multiprocess

CONFIG = MoEConfig(vocab=32, width=64, heads=4, experts=4, expert_width=256, max_seq=64)


def on_rank(rank: int, ranks: int) -> dict[str, Any]:
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    model = MoEGPT(CONFIG, dist.group.WORLD)
    tokens = torch.randint(0, 32, (8, 64), generator=torch.Generator().manual_seed(rank))
    planned = overlapc.optimize(model, timeout_s=30)

    def step() -> None:
        planned.zero_grad()
        planned(tokens, tokens).backward()

    step()
    peak = min(measure_peak(step) for _ in range(3))
    (report,) = planned.reports
    dist.barrier()
    dist.destroy_process_group()
    return {
        "measured": peak,
        "by rank": report.rank_peaks,
        "room": report.timeline.peak_bytes,
        "most": report.peak_bytes,
        "told": "the fullest rank holds" in report.explain(),
    }


def test_the_peak_of_each_rank_is_that_of_its_own_sizes() -> None:
    found = run_ranks(on_rank, 2)
    for rank, mine in enumerate(found):
        assert mine["by rank"] == found[0]["by rank"]
        assert mine["by rank"][rank] == pytest.approx(mine["measured"], rel=0.02)
        assert mine["most"] == max(mine["by rank"]) < mine["room"]
        assert mine["told"]
