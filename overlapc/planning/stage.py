"""`plan_stage` plans a stage of a pipeline; the rank that runs it and `search` both call it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from overlapc.core.pipeline import AHEAD
from overlapc.core.schedule import Schedule
from overlapc.core.stages import stage_cost
from overlapc.planning.options import Options
from overlapc.planning.problem import TrainingStep
from overlapc.planning.report import Report
from overlapc.planning.road import plan
from overlapc.planning.rows import StageFigures

if TYPE_CHECKING:
    from overlapc.passes.trace import Captured
    from overlapc.ranks.exchange import Exchange

_FURTHER = 2  # more microbatches in flight for which stages are planned


def plan_stage(
    captured: Captured,
    options: Options,
    schedule: Schedule,
    stage: int,
    *,
    place: bool = True,
    beside_bytes: int = 0,
    gradients: tuple[str, ...],
    add_ns_per_kib: float,
    primals: Sequence[Any] | None = None,
    others: Sequence[Sequence[Any]] = (),
    exchange: Exchange | None = None,
    slices: int = 1,
    draws: Collection[str] = (),
    pairs: bool = False,
) -> list[Report]:
    """Plan a stage for the schedule's number of microbatches in flight and, where rows are placed,
    for a few more: more recompute makes room for rows that wait less. If microbatches are cut in
    slices, the captured graph is of one; nothing is merged then, and `draws` are drawn together.
    `primals` are the graph's inputs, `others` those of other microbatches and slices.
    `pairs`: `TrainStep` runs the stage, and may run it in pairs."""
    lag, held = schedule.lag(stage) if slices == 1 else 0, schedule.in_flight(stage)
    further = min(_FURTHER, schedule.microbatches - held) if place else 0
    step = TrainingStep(
        "one microbatch" if slices == 1 else f"one microbatch in {slices} slices",
        schedule.microbatches,
        lag,
        pairs,
        in_flight=lag or held,
        further=0 if lag or slices > 1 else further,
        beside_bytes=beside_bytes,
        gradients=gradients,
        add_ns_per_kib=add_ns_per_kib,
        slices=slices,
        draws=tuple(draws),
        loss=stage == schedule.stages - 1,
    )
    planned = plan(captured, options, step, primals=primals, others=others, exchange=exchange)
    return [planned.report, *planned.roomier]


def beside_bytes(
    schedule: Schedule, stage: int, coming: int, going: int, is_cut: bool = False
) -> int:
    """Count the bytes that a stage holds under any plan: inputs of the microbatches in flight, and
    transfers in and out. A microbatch receives `coming` bytes and sends `going`. What is put
    together of slices is there twice for a moment."""
    twice = max(coming, going) if is_cut else 0
    return schedule.in_flight(stage) * coming + (AHEAD - 1) * (coming + going) + twice


def stage_figures(
    reports: Sequence[Report],
    received: Collection[str],
    sent_ns: int,
    beside: int,
    reduce_ns: int,
) -> list[StageFigures]:
    """Turn each plan of a stage into figures for the rows of all ranks. `received` are inputs that
    other ranks send; `sent_ns` is how long the stage's transfers take."""
    return [
        StageFigures.of(
            stage_cost(report.problem, report.plan, received, sent_ns),
            report,
            beside,
            reduce_ns,
        )
        for report in reports
    ]
