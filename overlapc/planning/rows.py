"""`plan_rows` chooses each stage's plan and the order of actions on each rank of a pipeline."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from overlapc.core.pipeline import PipelineTimeline, StageCost, reduced, simulate_pipeline
from overlapc.core.schedule import Schedule, Step, is_pair
from overlapc.planning.report import Report
from overlapc.solvers.pipeline.rows import placed

_CHOICES = 9  # combinations of plans for all stages that are tried one by one


@dataclass(frozen=True)
class StageFigures:
    """The figures of a planned stage that ranks exchange: the cost of a microbatch, the time of a
    merged step (0: nothing is merged), the memory that all microbatches may hold, whether the
    forward draws random numbers, and how long replicas take to sum the gradients."""

    cost: StageCost
    merged_ns: int
    limit: int
    random: bool = False
    reduce_ns: int = 0

    @staticmethod
    def of(cost: StageCost, report: Report, beside_bytes: int, reduce_ns: int = 0) -> StageFigures:
        """Make the figures of a stage; its limit leaves out the gradients, which are held beside
        it."""
        problem = report.problem
        return StageFigures(
            cost,
            0 if report.merged is None else report.merged.timeline.step_ns,
            (problem.budget_bytes or 0) - problem.resident_bytes + beside_bytes,
            any(op.random for op in problem.trace.ops),
            reduce_ns,
        )

    @staticmethod
    def parse(found: Mapping[str, Any]) -> StageFigures:
        working = tuple((kind, size) for kind, size in found["cost"]["working"])
        cost = StageCost(**{**found["cost"], "working": working})
        return StageFigures(**{**found, "cost": cost})


def plan_rows(
    schedule: Schedule, figures: Sequence[Sequence[StageFigures]], place: bool = True
) -> tuple[tuple[int, ...], Schedule, PipelineTimeline]:
    """Find the fastest step: a plan for each stage, the rows, and the predicted timeline of all
    ranks. The `figures` of a stage are of plans that leave more and more room."""
    best: tuple[tuple[int, ...], Schedule, PipelineTimeline] | None = None
    for chosen in _choices([len(plans) for plans in figures]):
        each = [plans[which] for plans, which in zip(figures, chosen, strict=True)]
        rows, timeline = _placed(schedule, each, place)
        if best is None or timeline.step_ns < best[2].step_ns:
            best = chosen, rows, timeline
    assert best is not None
    return best


def _choices(counts: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """The number of a plan for each stage: all combinations if they are few, else the same number
    for all."""
    if math.prod(counts) <= _CHOICES:
        yield from product(*map(range, counts))
        return
    for which in range(max(counts)):
        yield tuple(min(which, count - 1) for count in counts)


def _placed(
    schedule: Schedule, figures: Sequence[StageFigures], place: bool
) -> tuple[Schedule, PipelineTimeline]:
    """Place recompute and weight gradients in the rows, and predict the timeline of all ranks, with
    the replicas' sums of gradients. A rank may hold what its stages' budgets allow, or what it
    holds without placing. If several stages of a rank draw random numbers, they keep the order of
    their draws."""
    costs = [stage.cost for stage in figures]
    remade = {(a.stage, a.microbatch) for a in schedule.actions if a.kind == "R"}

    def merged_ns(step: Step) -> int:
        figure = figures[step[0].stage]
        if is_pair(step) and figure.merged_ns:
            return figure.merged_ns
        return sum(costs[a.stage].takes(a.kind, (a.stage, a.microbatch) in remade) for a in step)

    if place:
        limits = list(simulate_pipeline(schedule, costs).peak_bytes)
        for rank in range(len(limits)):
            mine = [f.limit for s, f in enumerate(figures) if schedule.rank_of[s] == rank]
            limits[rank] = max(limits[rank], sum(mine))
        shared = schedule.stages > len(schedule.rows) and any(f.random for f in figures)
        schedule = placed(schedule, costs, limits, keep_order=shared)
    timeline = simulate_pipeline(schedule, costs, merged_ns)
    return schedule, reduced(timeline, [figure.reduce_ns for figure in figures])
