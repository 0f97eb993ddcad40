"""`evaluate` predicts the step of a layout: it plans each stage, places all stages in rows as
`Pipeline` does, and adds the update of the weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from overlapc.core.errors import Infeasible
from overlapc.core.ir import Problem, Timeline
from overlapc.core.pipeline import PipelineTimeline, StageCost, reduced, simulate_pipeline
from overlapc.core.schedule import Schedule, format_schedule, parse_schedule
from overlapc.profiler.hardware import load_hardware
from overlapc.search.frameworks.framework import slowest_of
from overlapc.search.frameworks.known import find_framework
from overlapc.search.layouts import (
    CP_COMM_TYPES,
    Cluster,
    Layout,
    dense_layers,
    microbatches,
    stage_layers,
)
from overlapc.search.memory import run_bytes, tensor_bytes
from overlapc.search.models.transformer import Model
from overlapc.search.place import Place, PlacedStage, merging, planned, sent_between
from overlapc.search.replicas import Update
from overlapc.search.rows import Rows, least_ns, placed, waited
from overlapc.search.units import Part, Unit
from overlapc.search.weights import held_bytes
from overlapc.solvers import SOLVERS, is_of_field
from overlapc.solvers.pipeline.schedules import merged as merged_rows

_SHOWN = 8  # microbatches that are drawn of a step without a pipeline
_MOST = 1_000_000  # of ranks and of microbatches in a file that `Found.parse` believes


@dataclass(frozen=True)
class Found:
    """The predicted step of a layout with the plans of one solver."""

    layout: Layout
    solver: str
    step_ns: int = 0
    bound_ns: int = 0
    tokens_per_s: float = 0.0
    mfu: float = 0.0
    exposed_ns: Mapping[str, int] = field(default_factory=dict)  # by kind, on the slowest rank
    bubble: float = 0.0  # of the step, on the slowest rank
    recompute_ns: int = 0
    recompute_hidden_ns: int = 0
    gap: float = 0.0  # how far plans are above their bounds
    peak_bytes: tuple[int, ...] = ()
    layers: tuple[int, ...] = ()
    microbatches: int = 0
    smallest_bytes: int = 0  # if this does not fit: a GPU's memory with which it would
    blocking_stage: int = -1
    # a bound on the step with placed rows, if they are not placed yet; else the step
    least_ns: int = 0
    rows: str = ""  # placed rows, as a schedule's text
    merged: bool = False  # each forward with the backward of the microbatch before
    gradients_ns: int = 0  # until all gradients are summed: the part that `Pipeline` predicts
    whole: bool = False  # planned whole, by the calls of `Pipeline`, not by a few blocks
    launching: float = 0.0  # of a microbatch's time, that the host takes to launch it
    slices: int = 1  # of each microbatch, as in `Pipeline(slices=)`

    @property
    def fits(self) -> bool:
        return self.smallest_bytes == 0

    @property
    def is_final(self) -> bool:
        """Has everything been tried to make the step short?"""
        return self.least_ns >= self.step_ns

    @property
    def schedule(self) -> Schedule:
        """The rows of the pipeline."""
        if self.rows:
            return parse_schedule(self.rows)
        return self.layout.rows(self.microbatches)

    @property
    def asked(self) -> Schedule:
        """The schedule to give to `Pipeline`. If the layout was planned whole, that is the plain
        schedule, whose rows `Pipeline` then places as the search did."""
        if self.whole and self.merged:
            return merged_rows(1, self.microbatches)
        return self.layout.rows(self.microbatches) if self.whole else self.schedule

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def parse(found: Mapping[str, Any]) -> Found:
        """Read the result of `as_json`; ValueError, TypeError or KeyError for anything else."""
        layout = Layout(**found["layout"])
        lists = {key: tuple(found[key]) for key in ("peak_bytes", "layers")}
        parsed = Found(**{**found, **lists, "layout": layout})
        for each in fields(Found):
            default, value = each.default, getattr(parsed, each.name)
            if isinstance(default, (int, float)) and not isinstance(value, (int, type(default))):
                raise ValueError(f"{each.name} is {value!r}, expected a number")
        sizes = *lists["peak_bytes"], *lists["layers"], *dict(parsed.exposed_ns).values()
        if not all(isinstance(size, int) for size in sizes):
            raise ValueError(f"found {sizes}, expected whole numbers")
        ranks = layout.tp, layout.pp, layout.dp, layout.cp, layout.chunks
        planned = parsed.microbatches or 1  # none, if nothing fits
        counts = *ranks, layout.microbatch, planned, parsed.slices, layout.ep or 1
        if not all(isinstance(count, int) and 1 <= count <= _MOST for count in counts):
            raise ValueError(f"found {counts}, expected whole numbers from 1 to {_MOST:,}")
        if layout.cp_comm_type not in CP_COMM_TYPES:
            kinds = ", ".join(CP_COMM_TYPES)
            raise ValueError(f"cp_comm_type is {layout.cp_comm_type!r}, expected one of {kinds}")
        if parsed.solver not in SOLVERS and not is_of_field(parsed.solver):
            raise ValueError(f"found solver {parsed.solver!r}, expected one of {SOLVERS}")
        return parsed


@dataclass(frozen=True)
class Outcome:
    """A layout with its stages' plans and its timeline; without stages if nothing fits."""

    found: Found
    timeline: PipelineTimeline | None = None  # of few microbatches
    stages: tuple[PlacedStage, ...] = ()
    costs: tuple[StageCost, ...] = ()  # by stage of the pipeline

    @property
    def slowest(self) -> PlacedStage:
        return max(self.stages, key=lambda stage: stage.microbatch_ns)


def lower_bound(
    model: Model,
    cluster: Cluster,
    layout: Layout,
    unit: Unit,
    layers: Sequence[int] | None = None,
    placed: bool = True,
    forced_ns: Sequence[float] = (),
) -> int:
    """Bound the step from below: the slowest rank runs every microbatch in at least its blocks'
    least time, the pipeline fills and drains, and the weights are updated. `layers` are those of
    each stage, by default an even split. `placed`: rows may be placed and microbatches merged.
    `forced_ns` is what each rank's memory adds to a microbatch."""
    layers = layers or stage_layers(model, layout.stages, layout.ends)
    count = microbatches(cluster, layout)
    head = unit.head_ran.step_ns
    dense = dense_layers(model, layers)

    def slowest(parts: Sequence[Part], head: float, share: float = 1.0) -> float:
        """Bound the slowest rank. Stages before its first run the given share of a microbatch
        before it begins, or after it ends."""
        times = [
            sum(unit.least_ns(part, n, first) for part in parts)
            for n, first in zip(layers, dense, strict=True)
        ]
        times[-1] += head
        alone = [sum(times[stage] for stage in layout.stages_of(r)) for r in range(layout.pp)]
        if forced_ns and parts != ["forward", "inputs"]:
            alone = [time + more for time, more in zip(alone, forced_ns, strict=True)]
        return max(count * time + share * sum(times[:r]) for r, time in enumerate(alone))

    if placed and layout.pp == 1 and count > 1:
        least = slowest(["merged"], head)
    elif placed or layout.schedule.startswith("zero-bubble"):
        # Weight gradients may wait until a rank drains.
        kinds = [unit] if unit.first is None else [unit, unit.first]
        share = min(one.least.forward / max(1, one.least.whole) for one in kinds)
        least = max(
            slowest(["whole"], head, share),
            slowest(["forward", "inputs"], 0.0),
        )
    else:
        least = slowest(["whole"], head)
    rounded = 2 * (count + layout.pp)  # ns that rounding may take from parts of a stage
    return max(0, int(least) - rounded) + Update.of(model, cluster, layout, layers).least_ns


def memory_bound(
    model: Model, cluster: Cluster, layout: Layout, unit: Unit, placed: bool = True
) -> int:
    """`lower_bound` of an even split, with the recompute that the memory of each rank forces."""
    layers, count = stage_layers(model, layout.stages, layout.ends), microbatches(cluster, layout)
    merged = placed and layout.pp == 1 and count > 1
    schedule = Rows.of(layout, count).few
    ranks = [
        Place.of(model, cluster, layout, unit, schedule, rank, layers) for rank in range(layout.pp)
    ]
    forced = [sum(part.forced_ns(of, merged) for part, of in place.parts(unit)) for place in ranks]
    return lower_bound(model, cluster, layout, unit, layers, placed, forced)


def first_bound(model: Model, cluster: Cluster, layout: Layout) -> int:
    """Bound the step before anything is captured: flops at the full rate, layers split evenly."""
    machine = load_hardware(cluster.hardware)
    peak = max(machine.peak_flops.values()) if cluster.fp8 else machine.half_flops
    tokens = cluster.global_batch * model.seq
    flops_ns = round(model.flops_per_token() / 2 * tokens / (cluster.gpus * peak) * 1e9)
    return flops_ns + Update.of(model, cluster, layout).least_ns


def evaluate(
    model: Model,
    cluster: Cluster,
    layout: Layout,
    unit: Unit,
    solver: str = "heu",
    time_limit_s: float = 10.0,
    layers: Sequence[int] | None = None,
    *,
    below_ns: float = math.inf,
    known: str = "",
    bounded: bool = True,
    pinned: bool = False,
) -> Outcome:
    """Plan the layout's stages; return its step and its pipeline's timeline, or the memory that it
    lacks. `layers` are those of each stage, by default an even split.

    Rows are placed as in `Pipeline`, in the memory that the plans leave; `known` are rows placed
    before. A baseline keeps its schedule's rows, as its authors run it, and so does a layout that
    placing could not bring below `below_ns`: then a few microbatches are simulated, and the others
    repeat them. Only if `bounded` the gap of plans to their bounds is computed, which takes long.
    Rows that are `pinned` take no more memory than the schedule's plain ones."""
    count = microbatches(cluster, layout)
    layers = tuple(layers or stage_layers(model, layout.stages, layout.ends))
    few = Rows.of(layout, count).few
    places = [
        Place.of(model, cluster, layout, unit, few, rank, layers) for rank in range(layout.pp)
    ]
    ranks: list[PlacedStage] = []
    for place in places:
        try:
            ranks.append(planned(place, unit, solver, time_limit_s))
        except Infeasible as error:
            peak = place.static_bytes + error.smallest_bytes
            smallest = run_bytes(cluster, layout, place.static_bytes, peak)
            refused = Found(layout, solver, smallest_bytes=smallest, blocking_stage=place.rank)
            return Outcome(replace(refused, layers=layers, microbatches=count))
    update = Update.of(model, cluster, layout, layers)
    bound = lower_bound(model, cluster, layout, unit, layers, not is_of_field(solver))
    may_take = 0  # least time if rows are placed or microbatches merged
    if layout.pp > 1 and not is_of_field(solver):
        may_take = least_ns(layout, _by_stage(layout, ranks), count) + update.least_ns
    elif count > 1 and places[0].merges(unit) and not is_of_field(solver):
        may_take = bound
    finish = 0 < may_take < below_ns
    if finish and layout.pp == 1:
        ranks[0] = merging(places[0], unit, ranks[0], solver, count)
    static = held_bytes(model, cluster, layout, layers)
    placing = finish and layout.pp > 1
    ran = RanPipeline.of(
        cluster, layout, unit, ranks, count, static, placing, known, pinned, is_of_field(solver)
    )
    found = figures_of(model, cluster, layout, solver, [[r] for r in ranks], count, ran, update)
    gap = gap_of(ranks, [p.parts(unit)[-1][1].bound_ns for p in places]) if bounded else 0.0
    found = replace(found, bound_ns=bound, layers=layers, gap=gap, launching=unit.launching)
    if placing or known:
        found = replace(found, rows=format_schedule(ran.rows.few))
    elif finish:
        found = replace(found, merged=ranks[0].report.merged is not None)
    elif may_take:
        found = replace(found, least_ns=min(found.step_ns, may_take))
    return Outcome(found, reduced(ran.timeline, update.reduce_ns), tuple(ranks), ran.costs)


def _by_stage(layout: Layout, ranks: Sequence[PlacedStage]) -> tuple[StageCost, ...]:
    """The costs of all stages of the pipeline, in their order."""
    costs = {
        stage: cost
        for rank, planned_rank in enumerate(ranks)
        for stage, cost in zip(layout.stages_of(rank), planned_rank.costs, strict=True)
    }
    return tuple(costs[stage] for stage in range(layout.stages))


@dataclass(frozen=True)
class RanPipeline:
    """The pipeline of planned ranks in a step, up to its last gradient."""

    costs: tuple[StageCost, ...]  # by stage
    rows: Rows
    timeline: PipelineTimeline  # of a few microbatches, or of all if rows are placed
    peaks: tuple[int, ...]
    pipeline_ns: int
    busy_ns: int  # of the slowest rank
    exposed_p2p_ns: int

    @staticmethod
    def of(
        cluster: Cluster,
        layout: Layout,
        unit: Unit,
        ranks: Sequence[PlacedStage],
        count: int,
        static: Sequence[int],
        place: bool,
        known: str,
        pinned: bool = False,
        waits: bool = False,
    ) -> RanPipeline:
        """Simulate the pipeline. `place`: place its rows; `known` are rows placed before; `pinned`
        ones take no more memory than plain ones. `waits`: ranks wait for transfers as those of the
        framework do."""
        silent = [replace(cost, sent_ns=0) for cost in _by_stage(layout, ranks)]
        costs = _by_stage(layout, ranks)
        times = waits and find_framework(cluster.framework).waits_in(layout.schedule)
        if times and layout.pp > 1:
            costs = waited(costs, [times * ns for ns in sent_between(cluster, layout, unit)])
        slowest_ns, busy_ns = (_slowest_ns(layout, each) for each in (costs, silent))
        few = Rows.of(layout, count)
        given = simulate_pipeline(few.few, costs, trusted=True).peak_bytes
        most = [tensor_bytes(cluster, layout, size) for size in static]
        room = [size - rank.peak_bytes for size, rank in zip(most, ranks, strict=True)]
        limits = [peak + (0 if pinned else more) for peak, more in zip(given, room, strict=True)]
        if known:
            rows = Rows(parse_schedule(known))
        else:
            rows = Rows(layout.rows(count)) if place else few
            rows = rows.through_time(costs, (given, limits), count, slowest_ns)
            random = any(op.random for op in unit.problem.trace.ops)
            rows = Rows(placed(rows.few, costs, limits, random)) if place else rows
        timeline = simulate_pipeline(rows.few, costs, resident=static, trusted=True)
        if ranks[0].report.merged is not None:
            timeline = _merged(ranks[0], min(count, _SHOWN), static[0])
            took_ns = slowest_ns + (count - 1) * ranks[0].merged_ns
            return RanPipeline(costs, rows, timeline, (ranks[0].peak_bytes,), took_ns, took_ns, 0)
        peaks = tuple(
            rank.peak_bytes + new - bytes - old
            for rank, new, bytes, old in zip(ranks, timeline.peak_bytes, static, given, strict=True)
        )
        took_ns = rows.last(costs, count, slowest_ns)
        p2p_ns = took_ns - rows.last(silent, count, busy_ns) if layout.pp > 1 else 0
        return RanPipeline(costs, rows, timeline, peaks, took_ns, count * busy_ns, max(0, p2p_ns))


def _slowest_ns(layout: Layout, costs: Sequence[StageCost]) -> int:
    """The time of a microbatch on the slowest rank."""
    each = [cost.forward_ns + cost.takes("B") for cost in costs]
    return max(sum(each[stage] for stage in layout.stages_of(r)) for r in range(layout.pp))


def _attention_lanes(stages: Sequence[PlacedStage]) -> set[str]:
    """The process groups that communicate within attention."""
    every = [*stages, *(stage.first for stage in stages if stage.first is not None)]
    return {
        op.lane
        for trace in (stage.report.problem.trace for stage in every)
        for op in trace.ops
        if op.role == "start" and ".attn" in trace.modules.get(op.name, "")
    }


def figures_of(
    model: Model,
    cluster: Cluster,
    layout: Layout,
    solver: str,
    ranks: Sequence[Sequence[PlacedStage]],
    count: int,
    ran: RanPipeline,
    update: Update,
) -> Found:
    """The figures of a step from its planned ranks."""
    machine = load_hardware(cluster.hardware)
    whole = reduced(ran.timeline, update.reduce_ns)
    stages = max(ranks, key=lambda rank: sum(stage.microbatch_ns for stage in rank))
    costs = [cost for stage in stages for cost in stage.costs]
    forward_ns = sum(cost.forward_ns for cost in costs)
    uncovered_ns = update.uncovered_ns(forward_ns, sum(cost.takes("B") for cost in costs))
    exposed_dp = whole.step_ns - ran.timeline.step_ns + update.late_ns + update.gather_ns
    exposed_dp += uncovered_ns + update.shared_ns
    exposed_dp += count * sum(stage.sharding_ns for stage in stages)
    gradients_ns = ran.pipeline_ns + whole.step_ns - ran.timeline.step_ns
    step_ns = gradients_ns + update.after_ns + uncovered_ns
    exposed: dict[str, int] = {"dp": exposed_dp, "p2p": ran.exposed_p2p_ns}
    waiting = min(layout.replicas, -(-cluster.gpus // cluster.gpus_per_node))
    if waiting > 1:
        spread = find_framework(cluster.framework).stragglers
        late_ns = round(step_ns * spread * slowest_of(waiting))
        exposed |= {"stragglers": late_ns} if late_ns else {}
        step_ns += late_ns
    slowest = [ran_of for stage in stages for ran_of in stage.ran(count)]
    inside = _attention_lanes(stages) if layout.cp > 1 else set()
    for plan, times in slowest:
        for exposure in plan.exposures:
            of_experts = "all_to_all" in exposure.issue and exposure.lane not in inside
            kind = "all-to-all" if of_experts else "tp"
            exposed[kind] = exposed.get(kind, 0) + round(exposure.exposed_ns * times)
    peak = machine.peak_flops.get("bfloat16") or machine.peak_flops.get("float16", math.inf)
    per_s = cluster.global_batch * model.seq / step_ns * 1e9
    return Found(
        layout,
        solver,
        step_ns,
        tokens_per_s=per_s,
        mfu=per_s * model.flops_per_token() / (cluster.gpus * peak),
        exposed_ns=exposed,
        bubble=max(0.0, (ran.pipeline_ns - ran.busy_ns - ran.exposed_p2p_ns) / step_ns),
        recompute_ns=sum(round(plan.recompute_ns * times) for plan, times in slowest),
        recompute_hidden_ns=sum(round(_hidden_ns(plan) * times) for plan, times in slowest),
        peak_bytes=ran.peaks,
        microbatches=count,
        least_ns=step_ns,
        gradients_ns=gradients_ns,
    )


def gap_of(stages: Sequence[PlacedStage], bounds: Sequence[Callable[[Problem], int]]) -> float:
    """How far the stages' plans are above their bounds."""
    planned_ns = sum(stage.timeline.step_ns for stage in stages)
    both = zip(stages, bounds, strict=True)
    return planned_ns / max(1, sum(stage.report.bounded_by(bound) for stage, bound in both)) - 1


def _merged(stage: PlacedStage, count: int, static: int) -> PipelineTimeline:
    """The timeline of so many merged microbatches. Forward and backward fill and free the same
    memory."""
    ran = simulate_pipeline(
        merged_rows(1, count), stage.costs, lambda step: stage.merged_ns, [static], trusted=True
    )
    most = tuple(min(level, stage.peak_bytes) for level in ran.memory[0])
    held = tuple(min(level, stage.peak_bytes) for level in ran.held[0])
    return replace(ran, memory=(most,), held=(held,))


def _hidden_ns(timeline: Timeline) -> int:
    """Nanoseconds of recompute that ran during collectives."""
    windows = sorted(
        (span.start_ns, span.end_ns) for span in timeline.spans if span.lane != "compute"
    )
    hidden = 0
    for span in timeline.spans:
        if span.lane == "compute" and span.is_recompute:
            covered = 0
            for start, end in windows:
                covered += max(0, min(end, span.end_ns) - max(start, span.start_ns))
            hidden += min(covered, span.end_ns - span.start_ns)
    return hidden
