"""Pipelines drawn at random, for what must hold of any.

All stages of a pipeline take about the same times, and recompute none, a third or nine tenths
of their forward. Transfers take nothing, 2% or 20% of a forward. A rank's memory is 0.7, 1 or
1.3 times what the named schedule holds.
"""

from __future__ import annotations

from random import Random

from overlapc.core.pipeline import StageCost, simulate_pipeline
from overlapc.core.schedule import Schedule
from overlapc.solvers.pipeline.schedules import make_schedule

NAMES = ("gpipe", "1f1b", "interleaved", "zero-bubble", "zero-bubble-v")


def drawn(seed: int) -> tuple[Schedule, list[StageCost], list[int]]:
    """A schedule, what its stages take, and how much memory each rank may hold."""
    random = Random(seed)
    name, ranks = random.choice(NAMES), random.choice((2, 3, 4))
    schedule = make_schedule(name, ranks, ranks * random.choice((1, 2)))
    forward_ns = random.randint(5_000_000, 40_000_000)
    remade, sent = random.choice((0.0, 0.3, 0.9)), random.choice((0.0, 0.02, 0.2))

    def about(share: float) -> int:
        return int(forward_ns * share * random.uniform(0.95, 1.1))

    costs = [
        StageCost(
            about(1.0), about(1.05), about(0.9), about(remade),
            saved=random.randint(1, 10) * 10**8, remade=random.randint(0, 5) * 10**8,
            for_weights=10**8, sent_ns=int(forward_ns * sent), coming=10**7, returning=10**7,
            working=(("F", 10**7), ("I", 2 * 10**7)),
        )
        for _ in range(schedule.stages)
    ]  # fmt: skip
    most = max(simulate_pipeline(schedule, costs).peak_bytes)
    return schedule, costs, [int(most * random.choice((0.7, 1.0, 1.3)))] * ranks
