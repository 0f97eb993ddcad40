"""What a layout takes: the best plan of each stage, all stages in rows as `Pipeline` places them,
and what is left.

A stage of many blocks is planned by a few of them: its time is as many times theirs, and as many
times more microbatches are in flight. That is exact in memory where every few blocks are treated
alike, and leaves out what the borders between them could still hide.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from fractions import Fraction
from typing import Any

from overlapc.errors import Infeasible
from overlapc.ir import Plan, Problem, Timeline
from overlapc.merge import merge
from overlapc.pipeline import PipelineTimeline, StageCost, reduced, simulate_pipeline
from overlapc.profiler.hardware import Hardware, load_hardware
from overlapc.schedule import Schedule, format_schedule, parse_schedule
from overlapc.search.layouts import (
    Cluster,
    Layout,
    microbatches,
    stage_layers,
    static_bytes,
)
from overlapc.search.models import Model
from overlapc.search.replicas import Update
from overlapc.search.rows import Rows, least_ns, placed
from overlapc.search.units import Unit
from overlapc.simulate import simulate
from overlapc.solvers import FIELD, bound_ns, solve
from overlapc.solvers.merging import solve_step
from overlapc.solvers.schedules import merged as merged_rows
from overlapc.stages import in_parts, stage_cost

_SHOWN = 8  # microbatches that are drawn of a step that has no pipeline


@dataclass(frozen=True)
class Found:
    """What a layout takes with the plans of one solver; all of it predicted."""

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
    gap: float = 0.0  # of the plans, above their bounds
    peak_bytes: tuple[int, ...] = ()
    layers: tuple[int, ...] = ()
    microbatches: int = 0
    smallest_bytes: int = 0  # of a GPU's memory with which this would fit, where it does not
    blocking_stage: int = -1
    least_ns: int = 0  # of a step with rows placed, where they are not yet; else the step
    rows: str = ""  # as they were placed, a schedule's text
    merged: bool = False  # each forward with the backward of the microbatch before

    @property
    def fits(self) -> bool:
        return self.smallest_bytes == 0

    @property
    def is_final(self) -> bool:
        """Has all been done to make the step short?"""
        return self.least_ns >= self.step_ns

    @property
    def schedule(self) -> Schedule:
        """What each rank of the pipeline does."""
        if self.rows:
            return parse_schedule(self.rows)
        return self.layout.rows(self.microbatches)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def parse(found: Mapping[str, Any]) -> Found:
        """Raises ValueError, TypeError or KeyError where it is no such thing."""
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
        return parsed


@dataclass(frozen=True)
class Stage:
    """What a rank of the pipeline holds, planned: a few of its blocks, and what all of them take,
    in each of the rank's stages."""

    problem: Problem
    plan: Plan
    timeline: Timeline
    costs: tuple[StageCost, ...]
    bound_ns: int
    times: float  # how many times the captured blocks
    peak_bytes: int
    merged: Timeline | None = None  # of a forward and the backward of the microbatch before

    @property
    def microbatch_ns(self) -> int:
        """Forward and backward of one."""
        return sum(cost.forward_ns + cost.takes("B") for cost in self.costs)

    @property
    def merged_ns(self) -> int:
        """The same of two microbatches that are merged. The head is merged with nothing."""
        if self.merged is None:
            return self.microbatch_ns
        saved_ns = self.timeline.step_ns - self.merged.step_ns
        return self.microbatch_ns - round(saved_ns * self.times)

    def ran(self, count: int) -> list[tuple[Timeline, float]]:
        """What runs in a step of so many microbatches, and how often."""
        if self.merged is None:
            return [(self.timeline, self.times * count)]
        return [(self.timeline, self.times), (self.merged, self.times * (count - 1))]


@dataclass(frozen=True)
class Outcome:
    """What was found, and how it came about; without stages where nothing fits."""

    found: Found
    timeline: PipelineTimeline | None = None  # of few microbatches
    stages: tuple[Stage, ...] = ()
    costs: tuple[StageCost, ...] = ()  # by stage of the pipeline

    @property
    def slowest(self) -> Stage:
        return max(self.stages, key=lambda stage: stage.microbatch_ns)


def lower_bound(
    model: Model,
    cluster: Cluster,
    layout: Layout,
    unit: Unit,
    layers: Sequence[int] | None = None,
    placed: bool = True,
) -> int:
    """No plan can take less: the slowest rank does each microbatch, its blocks take what they take
    at least, the pipeline fills and drains, and the weights are brought up to date. `layers`
    are those of each stage, by default an even split; `placed`: rows may be, and microbatches
    merged."""
    layers = layers or stage_layers(model, layout.stages)
    count = microbatches(cluster, layout)
    block, head = unit.least.whole / unit.blocks, unit.head_ran.step_ns

    def slowest(block: float, head: float, share: float = 1.0) -> float:
        """A rank begins when the stages before its first have done this share of a microbatch, or
        they end by doing it."""
        times = [n * block for n in layers]
        times[-1] += head
        return max(
            count * sum(times[stage] for stage in layout.stages_of(rank))
            + share * sum(times[:rank])
            for rank in range(layout.pp)
        )

    if placed and layout.pp == 1 and count > 1:
        least = slowest(unit.least.merged / unit.blocks, head)
    elif placed or layout.schedule.startswith("zero-bubble"):
        # Weight gradients wait till a rank drains.
        forward, inputs = unit.least.forward, unit.least.inputs
        least = max(
            slowest(block, head, forward / max(1, unit.least.whole)),
            slowest((forward + inputs) / unit.blocks, 0.0),
        )
    else:
        least = slowest(block, head)
    rounded = 2 * (count + layout.pp)  # ns that parts of a stage lose at most
    return max(0, int(least) - rounded) + Update.of(model, cluster, layout, layers).least_ns


def first_bound(model: Model, cluster: Cluster, layout: Layout) -> int:
    """The same before anything is captured: flops at the full rate, layers split evenly."""
    peak = max(load_hardware(cluster.hardware).peak_flops.values())
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
) -> Outcome:
    """The layout's step under the solver's plans, and what its pipeline does; or what memory it
    lacks. `layers` are those of each stage, by default an even split.

    Rows are placed as `Pipeline` places them, in the memory that the plans leave; `known` are those
    that were found before. Where that leads to no step `below_ns`, and for a baseline, whose
    authors' rows are its schedule's, a few microbatches are simulated, and the others go on as
    these."""
    machine = load_hardware(cluster.hardware)
    count = microbatches(cluster, layout)
    rows = Rows.of(layout, count)
    schedule = rows.few
    layers = layers or stage_layers(model, layout.stages)
    ranks: list[Stage] = []
    costs = [StageCost(0, 0, 0)] * layout.stages
    for rank in range(layout.pp):
        here = Place.of(model, cluster, layout, unit, schedule, rank, layers)
        try:
            ranks.append(planned(here, unit, solver, time_limit_s))
        except Infeasible as error:
            smallest = here.static_bytes + error.smallest_bytes
            found = Found(layout, solver, smallest_bytes=smallest, blocking_stage=rank)
            return Outcome(replace(found, layers=tuple(layers), microbatches=count))
        for stage, cost in zip(layout.stages_of(rank), ranks[-1].costs, strict=True):
            costs[stage] = cost
    static = static_bytes(model, layout, layers)
    given = simulate_pipeline(schedule, costs, trusted=True)
    limits = [
        peak + cluster.memory_bytes - rank.peak_bytes
        for peak, rank in zip(given.peak_bytes, ranks, strict=True)
    ]
    update = Update.of(model, cluster, layout, layers)
    bound = lower_bound(model, cluster, layout, unit, layers, solver not in FIELD)
    may_take = 0  # at least, if rows are placed or microbatches merged
    if layout.pp > 1 and solver not in FIELD:
        may_take = least_ns(layout, costs, count) + update.least_ns
    elif count > 1 and unit.problem.trace.lanes and solver not in FIELD:
        may_take = bound
    finish = 0 < may_take < below_ns
    place = finish and layout.pp > 1
    if finish and not place:
        ranks[0] = merging(here, unit, ranks[0], count)
        costs[0] = ranks[0].costs[0]
    slowest_ns = max(rank.microbatch_ns for rank in ranks)
    if known:
        rows = Rows(parse_schedule(known))
    else:
        rows = Rows(layout.rows(count)) if place else rows
        rows = rows.through_time(costs, (given.peak_bytes, limits), count, slowest_ns)
        random = any(op.random for op in unit.problem.trace.ops)
        rows = Rows(placed(rows.few, costs, limits, random)) if place else rows
    timeline = simulate_pipeline(rows.few, costs, resident=static, trusted=True)
    peaks = tuple(
        rank.peak_bytes + new - bytes - old
        for rank, new, bytes, old in zip(
            ranks, timeline.peak_bytes, static, given.peak_bytes, strict=True
        )
    )
    pipeline_ns = rows.last(costs, count, slowest_ns)
    busy = count * slowest_ns
    if ranks[0].merged is not None:
        timeline, peaks = _merged(ranks[0], min(count, _SHOWN), static[0]), (ranks[0].peak_bytes,)
        pipeline_ns = busy = slowest_ns + (count - 1) * ranks[0].merged_ns
    silent = [replace(cost, sent_ns=0) for cost in costs]
    exposed_p2p = pipeline_ns - rows.last(silent, count, slowest_ns) if layout.pp > 1 else 0
    whole = reduced(timeline, update.reduce_ns)
    exposed_dp = whole.step_ns - timeline.step_ns + update.gather_ns
    outcome = Outcome(Found(layout, solver), whole, tuple(ranks), tuple(costs))
    step_ns = pipeline_ns + exposed_dp + update.optimizer_ns
    ran = outcome.slowest.ran(count)
    exposed: dict[str, int] = {"dp": exposed_dp, "p2p": max(0, exposed_p2p)}
    for plan, times in ran:
        for exposure in plan.exposures:
            kind = "all-to-all" if "all_to_all" in exposure.issue else "tp"
            exposed[kind] = exposed.get(kind, 0) + round(exposure.exposed_ns * times)
    tokens = cluster.global_batch * model.seq
    peak = machine.peak_flops.get("bfloat16") or machine.peak_flops.get("float16", math.inf)
    per_s = tokens / step_ns * 1e9
    least = sum(rank.bound_ns for rank in ranks)
    found = Found(
        layout,
        solver,
        step_ns,
        bound,
        per_s,
        per_s * model.flops_per_token() / (cluster.gpus * peak),
        exposed,
        max(0.0, (pipeline_ns - busy - exposed["p2p"]) / step_ns),
        sum(round(plan.recompute_ns * times) for plan, times in ran),
        sum(round(_hidden_ns(plan) * times) for plan, times in ran),
        sum(rank.timeline.step_ns for rank in ranks) / max(1, least) - 1,
        peaks,
        tuple(layers),
        count,
        least_ns=step_ns,
    )
    if place or known:
        found = replace(found, rows=format_schedule(rows.few))
    elif finish:
        found = replace(found, merged=ranks[0].merged is not None)
    elif may_take:
        found = replace(found, least_ns=min(step_ns, may_take))
    return replace(outcome, found=found)


@dataclass(frozen=True)
class Place:
    """A rank of the pipeline before it is planned: which stages of how many layers it has, and what
    they leave of the memory."""

    cluster: Cluster
    layout: Layout
    rank: int
    counts: tuple[int, ...]  # layers of each of its stages
    in_flight: int  # layers times microbatches that it holds at most
    static_bytes: int
    boundary_bytes: int  # of inputs that stages before have sent
    in_pieces: bool  # the schedule has input and weight gradients apart

    @staticmethod
    def of(
        model: Model,
        cluster: Cluster,
        layout: Layout,
        unit: Unit,
        schedule: Schedule,
        rank: int,
        layers: Sequence[int],
    ) -> Place:
        """With so many layers in each stage of the pipeline."""
        mine = layout.stages_of(rank)
        inputs = schedule.held(rank, dict.fromkeys(mine, 1)) + len(mine)
        return Place(
            cluster,
            layout,
            rank,
            tuple(layers[stage] for stage in mine),
            schedule.held(rank, {stage: layers[stage] for stage in mine}),
            static_bytes(model, layout, layers)[rank],
            unit.boundary_bytes * inputs,
            any(action.kind == "I" for action in schedule.actions),
        )

    @property
    def layers(self) -> int:
        return sum(self.counts)

    @property
    def room(self) -> int:
        """What is left for what blocks save and work with, and the head's scores between."""
        return self.cluster.memory_bytes - self.static_bytes - self.boundary_bytes

    @property
    def head(self) -> int | None:
        """Which of its stages has the head."""
        mine = self.layout.stages_of(self.rank)
        last = self.layout.stages - 1
        return mine.index(last) if last in mine else None

    def problem(self, unit: Unit) -> Problem:
        """The captured blocks stand for all that the rank holds."""
        times = Fraction(self.in_flight, unit.blocks)
        whole = times.numerator if times.denominator == 1 else times
        blocks = unit.problem if self.head is None else unit.with_head
        return replace(blocks, in_flight=whole, budget_bytes=max(1, self.room))


def planned(place: Place, unit: Unit, solver: str, time_limit_s: float) -> Stage:
    """A rank's stages: their blocks under their best plan in the memory that is left, and what is
    at their ends."""
    problem = place.problem(unit)
    try:
        plan = solve(problem, solver, time_limit_s=time_limit_s)
    except Infeasible as error:
        smallest = error.smallest_bytes + place.boundary_bytes
        raise Infeasible(place.cluster.memory_bytes, smallest) from None
    return _stage(place, unit, problem, plan)


def merging(place: Place, unit: Unit, stage: Stage, count: int) -> Stage:
    """The stage with each forward merged with the backward of the microbatch before, where
    `TrainStep` would merge them."""
    lone, merged = solve_step(stage.problem, stage.plan, count)
    if merged is None:
        return stage
    alone = _stage(place, unit, stage.problem, lone)
    timeline = simulate(merge(stage.problem), merged)
    more = max(0, timeline.peak_bytes - alone.timeline.peak_bytes)
    return replace(alone, merged=timeline, peak_bytes=alone.peak_bytes + more)


def _stage(place: Place, unit: Unit, problem: Problem, plan: Plan) -> Stage:
    cluster, layout = place.cluster, place.layout
    machine = load_hardware(cluster.hardware)
    timeline = simulate(problem, plan)
    ran = simulate(problem, in_parts(problem.trace, plan)) if place.in_pieces else timeline
    received = unit.received if layout.pp > 1 else ()
    cost = stage_cost(problem, plan, received, _sent_ns(cluster, layout, unit, machine))
    costs = [_of_layers(cost, count / unit.blocks) for count in place.counts]
    if place.head is not None:
        costs[place.head] = _with_head(costs[place.head], unit.head_ran)
    proven = plan.bound_ns or bound_ns(problem)
    times = place.layers / unit.blocks
    peak = place.static_bytes + place.boundary_bytes + timeline.peak_bytes
    return Stage(problem, plan, ran, tuple(costs), proven, times, peak)


def _merged(stage: Stage, count: int, static: int) -> PipelineTimeline:
    """So many microbatches, merged. Forward and backward fill and empty the same memory."""
    ran = simulate_pipeline(
        merged_rows(1, count), stage.costs, lambda step: stage.merged_ns, [static], trusted=True
    )
    most = tuple(min(level, stage.peak_bytes) for level in ran.memory[0])
    held = tuple(min(level, stage.peak_bytes) for level in ran.held[0])
    return replace(ran, memory=(most,), held=(held,))


def _of_layers(cost: StageCost, times: float) -> StageCost:
    """Of so many times the blocks."""
    saved = round(cost.saved * times)
    return replace(
        cost,
        forward_ns=round(cost.forward_ns * times),
        input_ns=round(cost.input_ns * times),
        weight_ns=round(cost.weight_ns * times),
        recompute_ns=round(cost.recompute_ns * times),
        whole_ns=round(cost.whole_ns * times),
        saved=saved,
        for_weights=round(cost.for_weights * times),
        working=tuple((k, size + (saved - cost.saved) * (k == "F")) for k, size in cost.working),
    )


def _with_head(cost: StageCost, head: Timeline) -> StageCost:
    forward, backward = head.phase_ns
    # It is at work where F ends, with all of F's kept, and where the backward begins.
    works = {"F": cost.saved + head.peak_bytes, "I": head.peak_bytes, "B": head.peak_bytes}
    return replace(
        cost,
        working=tuple((kind, max(size, works.get(kind, 0))) for kind, size in cost.working),
        forward_ns=cost.forward_ns + forward,
        input_ns=cost.input_ns + backward // 2,
        weight_ns=cost.weight_ns + backward - backward // 2,
        whole_ns=cost.whole_ns + backward,
    )


def _sent_ns(cluster: Cluster, layout: Layout, unit: Unit, machine: Hardware) -> int:
    if layout.pp == 1:
        return 0
    across = layout.tp * layout.dp >= cluster.gpus_per_node
    # Ranks of a node send at the same time, each its part of the width.
    apart = across and not layout.sequence
    size = unit.boundary_bytes // layout.tp if apart else unit.boundary_bytes
    return machine.collective_ns("p2p", size, 2, 1 if across else 2)


def _hidden_ns(timeline: Timeline) -> int:
    """Recompute that ran while a collective was on its way."""
    windows = sorted(
        (span.start_ns, span.end_ns) for span in timeline.spans if span.lane != "compute"
    )
    hidden = 0
    for span in timeline.spans:
        if span.lane == "compute" and span.issue.startswith("R:"):
            covered = 0
            for start, end in windows:
                covered += max(0, min(end, span.end_ns) - max(start, span.start_ns))
            hidden += min(covered, span.end_ns - span.start_ns)
    return hidden
