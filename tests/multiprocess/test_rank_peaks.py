"""Ranks, slices and microbatches whose experts get unlike loads: peaks are predicted by what each
holds."""

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


def on_rank(rank: int, ranks: int, slices: int, microbatches: int = 1) -> dict[str, Any]:
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    model = MoEGPT(CONFIG, dist.group.WORLD)
    # The second half is one token again and again, so its experts have loads of their own.
    tokens = torch.randint(0, 32, (8, 64), generator=torch.Generator().manual_seed(rank))
    tokens[4:] = rank

    if slices == microbatches == 1:
        planned = overlapc.optimize(model, timeout_s=30)
        sums = []

        def step() -> None:
            planned.zero_grad()
            planned(tokens, tokens).backward()

    else:  # whose plans count sums of gradients as there from the start
        train = overlapc.TrainStep(model, slices=slices, timeout_s=30)
        sums = [parameter.nbytes for parameter in model.parameters()]
        each = [(part, part) for part in tokens.chunk(microbatches)]

        def step() -> None:
            train(each)

    step()
    peak = min(measure_peak(step) for _ in range(3)) + sum(sums)
    report = planned.reports[0] if not sums else train.report
    assert report is not None
    dist.barrier()
    dist.destroy_process_group()
    return {
        "measured": peak,
        "by rank": report.rank_peaks,
        "room": report.timeline.peak_bytes,
        "most": report.peak_bytes,
        "told": "the fullest rank holds" in report.explain(),
    }


@pytest.mark.parametrize(
    ("slices", "microbatches"),
    [*(pytest.param(n, 1, marks=pytest.mark.slow) for n in (1, 2)), (1, 4), (2, 2)],
)
def test_the_peak_of_each_rank_is_that_of_its_own_sizes(slices: int, microbatches: int) -> None:
    found = run_ranks(on_rank, 2, slices, microbatches)
    for rank, mine in enumerate(found):
        assert mine["by rank"] == found[0]["by rank"]
        assert mine["by rank"][rank] == pytest.approx(mine["measured"], rel=0.03)
        assert mine["most"] == max(mine["by rank"]) < mine["room"]
        assert mine["told"]
