"""`planned` plans the stages of one rank of a layout's pipeline, in the memory of that rank.

A few captured blocks stand for a stage of many: the stage's time is a multiple of theirs, and the
few blocks are planned with that many times more microbatches in flight. The memory is exact if all
blocks are treated alike. What the borders between blocks could still hide is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from typing import Literal

from overlapc.core.errors import Infeasible
from overlapc.core.ir import Problem, Slowdown, Timeline
from overlapc.core.pipeline import StageCost
from overlapc.core.schedule import Schedule, Step, is_pair
from overlapc.core.simulate import copies_bytes, simulate
from overlapc.core.stages import in_parts, stage_cost
from overlapc.planning.problem import TrainingStep
from overlapc.planning.report import Report
from overlapc.planning.road import judged, reports
from overlapc.profiler.hardware import Hardware, load_hardware
from overlapc.search.frameworks.known import find_framework
from overlapc.search.frameworks.sharded import Shards, Times
from overlapc.search.layouts import Cluster, Layout, dense_layers
from overlapc.search.memory import tensor_bytes
from overlapc.search.models.transformer import Model
from overlapc.search.units import Unit
from overlapc.search.weights import held_bytes
from overlapc.solvers import has_one_plan, solve
from overlapc.solvers.step import solve_step

_NAME = "a few blocks of the slowest stage"


@dataclass(frozen=True)
class Place:
    """A rank of the pipeline before it is planned: its stages, their layers, and the memory that is
    left for activations."""

    cluster: Cluster
    layout: Layout
    rank: int
    counts: tuple[int, ...]  # layers of each of its stages
    dense: tuple[int, ...]  # of them, first layers without experts where others have them
    in_flight: int  # the most layers times microbatches that it holds, without those
    dense_in_flight: int  # of those
    static_bytes: int
    boundary_bytes: int  # inputs received from earlier stages
    in_pieces: bool  # does the schedule separate I and W?
    within: int | None = None  # of the memory that is left, what other kinds of blocks leave
    has_head: bool = True  # may one of its stages have the head?
    shards: Shards | None = None  # of weights that are divided over replicas

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
        """Make the place of a rank, given the layers of each stage of the pipeline."""
        mine = layout.stages_of(rank)
        inputs = schedule.held(rank, dict.fromkeys(mine, 1)) + len(mine)
        every = dense_layers(model, layers)
        dense = {stage: every[stage] for stage in mine}
        gathers = find_framework(cluster.framework).gathers
        return Place(
            cluster,
            layout,
            rank,
            tuple(layers[stage] for stage in mine),
            tuple(dense.values()),
            schedule.held(rank, {stage: layers[stage] - dense[stage] for stage in mine}),
            schedule.held(rank, dense),
            held_bytes(model, cluster, layout, layers)[rank],
            unit.boundary_bytes * inputs,
            any(action.kind == "I" for action in schedule.actions),
            shards=Shards.of(model, cluster, layout) if gathers else None,
        )

    @property
    def layers(self) -> int:
        return sum(self.counts)

    @property
    def room(self) -> int:
        """The memory left for what blocks save and work with, and for the head's scores between."""
        if self.within is not None:
            return self.within
        most = tensor_bytes(self.cluster, self.layout, self.static_bytes)
        return most - self.static_bytes - self.boundary_bytes

    @property
    def head(self) -> int | None:
        """The number of the rank's stage that has the head."""
        mine = self.layout.stages_of(self.rank)
        last = self.layout.stages - 1
        return mine.index(last) if self.has_head and last in mine else None

    def parts(self, unit: Unit) -> list[tuple[Place, Unit]]:
        """The rank's kinds of blocks, each with the unit that stands for them: those of the model's
        first layers, where they alone have no experts, and all others."""
        if unit.first is None or not any(self.dense):
            return [(self, unit)]
        none = tuple(0 for _ in self.counts)
        rest = tuple(n - dense for n, dense in zip(self.counts, self.dense, strict=True))
        first = replace(self, counts=self.dense, dense=none, in_flight=self.dense_in_flight)
        if not any(rest):
            return [(first, unit.first)]
        others = replace(self, counts=rest, dense=none)
        return [(replace(first, has_head=False), unit.first), (others, unit)]

    def merges(self, unit: Unit) -> bool:
        """Can microbatches be merged? FSDP asks for weights in the order of plain ones."""
        return bool(unit.problem.trace.lanes) and self.shards is None

    def problem(self, unit: Unit) -> Problem:
        """The problem in which the captured blocks stand for all blocks of the rank."""
        times = Fraction(self.in_flight, unit.blocks)
        whole = times.numerator if times.denominator == 1 else times
        blocks = unit.problem if self.head is None else unit.with_head
        return replace(blocks, in_flight=whole, budget_bytes=max(1, self.room))

    def forced_ns(self, unit: Unit, merged: bool) -> float:
        """How much more a microbatch takes at least because of the memory, under any plan; 0 if
        nothing fits. A merged one is bounded by the compute of all that memory makes it run: its
        collectives may be hidden."""
        problem, least = self.problem(unit), unit.least.whole
        try:
            solve(problem, "none")
        except Infeasible:
            if merged:
                problem, least = _silent(problem), unit.least.merged
            bound = unit.bound_ns(problem, silent=merged)
            return max(0, bound - least) * self.layers / unit.blocks
        return 0.0


@dataclass(frozen=True)
class PlacedStage:
    """A rank's planned stages: a few of its blocks stand for all of them."""

    report: Report  # of the captured blocks; merged where that pays
    timeline: Timeline  # of the captured blocks, with I and W apart if the schedule has them so
    costs: tuple[StageCost, ...]
    times: float  # the stage is so many times the captured blocks
    peak_bytes: int
    first: PlacedStage | None = None  # first layers without experts, if others have them
    sharding_ns: int = 0  # of a microbatch, that gathering weights and summing gradients adds

    @property
    def microbatch_ns(self) -> int:
        """The time of forward and backward of one microbatch."""
        return sum(cost.forward_ns + cost.takes("B") for cost in self.costs)

    @property
    def merged_ns(self) -> int:
        """The time of two merged microbatches. The head is never merged."""
        merged = self.report.merged
        if merged is None:
            return self.microbatch_ns
        saved_ns = self.timeline.step_ns - merged.timeline.step_ns
        return self.microbatch_ns - round(saved_ns * self.times)

    def ran(self, count: int) -> list[tuple[Timeline, float]]:
        """The timelines in a step of so many microbatches, and how often each runs."""
        report, times = self.report, self.times
        found = self.first.ran(count) if self.first is not None else []
        if report.merged is not None:
            found.append((report.merged.timeline, times * (count - report.lag)))
        if report.pair is not None:
            return [(report.pair.timeline, times), *found]
        return [(self.timeline, times * (report.lag if report.merged else count)), *found]

    def takes_ns(self, step: Step) -> int:
        """The time of a step of several actions: merged ones, or one end of a step in pairs."""
        pair = self.report.pair
        if pair is None or is_pair(step):
            return self.merged_ns
        forwards_ns = pair.timeline.phase_ns[0]
        return forwards_ns if step[0].kind == "F" else pair.timeline.step_ns - forwards_ns


def planned(place: Place, unit: Unit, solver: str, time_limit_s: float) -> PlacedStage:
    """Plan a rank's stages: their blocks in the memory that is left, and embedding and head."""

    def stage(part: Place, of: Unit) -> PlacedStage:
        problem = part.problem(of)
        if has_one_plan(solver):
            return _blocks(part, of, _planned_once(problem, of, solver, part.head is not None))
        plan = solve(problem, solver, time_limit_s=time_limit_s)
        return _blocks(part, of, judged(_NAME, problem, plan))

    parts = place.parts(unit)
    try:
        if len(parts) == 1:
            return _with_ends(place, unit, stage(*parts[0]))
        first, last = _both(place, parts, stage)
    except Infeasible as error:
        smallest = error.smallest_bytes + place.boundary_bytes
        raise Infeasible(place.cluster.memory_bytes, smallest) from None
    return _with_ends(place, unit, _joined(first, last))


def _both(
    place: Place, parts: list[tuple[Place, Unit]], stage: Callable[[Place, Unit], PlacedStage]
) -> tuple[PlacedStage, PlacedStage]:
    """Plan two kinds of blocks in the memory of their rank. The first gets a part of it as large as
    its part of all that they would keep, and the second what the first leaves; unless that is too
    little for one of them."""
    room, beside = place.room, place.static_bytes + place.boundary_bytes
    first, second = (part.in_flight * _kept(of) for part, of in parts)

    def within(at: int, room: int) -> PlacedStage:
        part, of = parts[at]
        return stage(replace(part, within=max(1, room)), of)

    try:
        left = within(0, round(room * first / max(1, first + second)))
    except Infeasible as error:
        left = within(0, error.smallest_bytes)
    try:
        return left, within(1, room - (left.peak_bytes - beside))
    except Infeasible as error:
        right = within(1, error.smallest_bytes)
    try:
        return within(0, room - (right.peak_bytes - beside)), right
    except Infeasible as error:
        smallest = error.smallest_bytes + right.peak_bytes - beside
        raise Infeasible(room, smallest) from None


def _silent(problem: Problem) -> Problem:
    """The problem with collectives that take no time."""
    profile = problem.profile
    costs = {name: replace(cost, comm_ns=0) for name, cost in profile.costs.items()}
    return replace(problem, profile=replace(profile, costs=costs, slowdown=Slowdown()))


def _kept(unit: Unit) -> float:
    """The bytes of a block that keeps all."""
    alone = replace(unit.problem, budget_bytes=None)
    peak = unit.once("kept", lambda: simulate(alone, solve(alone, "none")).peak_bytes)
    return float(peak) / unit.blocks


def _planned_once(problem: Problem, unit: Unit, solver: str, has_head: bool) -> Report:
    """Report as `judged` does, for a solver with one plan: what is in flight besides the traced
    microbatch adds the same bytes throughout."""
    once = unit.once(("report", solver, has_head), lambda: _judged_alone(problem, solver))
    ran = once.timeline
    more = copies_bytes(problem, once.plan) - copies_bytes(once.problem, once.plan)
    ran = replace(
        ran,
        memory=tuple(size + more for size in ran.memory),
        peak_bytes=ran.peak_bytes + more,
    )
    if problem.budget_bytes is not None and ran.peak_bytes > problem.budget_bytes:
        raise Infeasible(problem.budget_bytes, ran.peak_bytes)
    return replace(once, problem=problem, timeline=ran)


def _judged_alone(problem: Problem, solver: str) -> Report:
    alone = replace(problem, in_flight=1, budget_bytes=None)
    return judged(_NAME, alone, solve(alone, solver))


def merging(place: Place, unit: Unit, stage: PlacedStage, solver: str, count: int) -> PlacedStage:
    """Merge each forward with the backward of the microbatch before, where `TrainStep` would."""
    problem = stage.report.problem
    known = stage.report.plan
    plans = solve_step(problem, solver, lambda: known, count)
    if len(plans) == 1:
        return stage
    (report,) = reports(problem, TrainingStep(_NAME, count, lag=1), plans)
    *_, (last, of) = place.parts(unit)
    made = _blocks(last, of, report)
    return _with_ends(place, unit, made if stage.first is None else _joined(stage.first, made))


def _blocks(place: Place, unit: Unit, report: Report) -> PlacedStage:
    """The stages of blocks of one kind."""
    cluster, layout = place.cluster, place.layout
    machine = load_hardware(cluster.hardware)
    problem, plan, ran = report.problem, report.plan, report.timeline
    if place.in_pieces:
        ran = simulate(problem, in_parts(problem.trace, plan))
    received = unit.received if layout.pp > 1 else ()
    if has_one_plan(plan.solver):
        which = "costs", plan.solver, place.head is not None, received
        cost = unit.once(which, lambda: stage_cost(problem, plan, received))
    else:
        cost = stage_cost(problem, plan, received)
    if layout.pp > 1:
        across = layout.tp * layout.replicas >= cluster.gpus_per_node
        cost = replace(cost, sent_ns=_sent_ns(cluster, layout, unit, machine, across))
    costs = [_of_layers(cost, count / unit.blocks) for count in place.counts]
    peak = place.static_bytes + place.boundary_bytes + report.peak_bytes
    return PlacedStage(report, ran, tuple(costs), place.layers / unit.blocks, peak)


def _joined(first: PlacedStage, last: PlacedStage) -> PlacedStage:
    """The stages of one rank, with blocks of two kinds."""
    both = zip(first.costs, last.costs, strict=True)
    costs = tuple(_one_behind(one, other) for one, other in both)
    peak = last.peak_bytes + first.report.peak_bytes
    return replace(last, costs=costs, peak_bytes=peak, first=first)


def _one_behind(first: StageCost, last: StageCost) -> StageCost:
    """The cost of blocks of two kinds in one stage."""
    saved = first.saved + last.saved
    working = {
        kind: max(one.works.get(kind, 0) - (kind == "F") * one.saved for one in (first, last))
        for kind in (*first.works, *last.works)
    }
    return replace(
        last,
        forward_ns=first.forward_ns + last.forward_ns,
        input_ns=first.input_ns + last.input_ns,
        weight_ns=first.weight_ns + last.weight_ns,
        recompute_ns=first.recompute_ns + last.recompute_ns,
        whole_ns=first.takes("B") + last.takes("B"),
        saved=saved,
        remade=first.remade + last.remade,
        for_weights=first.for_weights + last.for_weights,
        working=tuple((kind, size + saved * (kind == "F")) for kind, size in working.items()),
    )


def _with_ends(place: Place, unit: Unit, stage: PlacedStage) -> PlacedStage:
    """The rank's stages with embedding and head, where it has them."""
    costs = list(stage.costs)
    if place.rank == 0:
        machine = load_hardware(place.cluster.hardware)
        forward_ns, backward_ns = embedding_ns(place.cluster, place.layout, unit, machine)
        costs[0] = replace(
            costs[0],
            forward_ns=costs[0].forward_ns + forward_ns,
            weight_ns=costs[0].weight_ns + backward_ns,
            whole_ns=costs[0].whole_ns + backward_ns,
        )
    if place.head is not None:
        costs[place.head] = _with_head(costs[place.head], unit.head_ran)
    if place.shards is None:
        return replace(stage, costs=tuple(costs))
    (alone,), (cost,), (forward, backward) = stage.costs, costs, unit.head_ran.phase_ns
    forward_of_one = alone.forward_ns / place.layers
    backward_of_one = alone.takes("B") / place.layers
    before = (
        cost.forward_ns - alone.forward_ns - forward,
        cost.takes("B") - alone.takes("B") - backward,
    )
    more = place.shards.more_ns(
        Times(place.layers, forward_of_one, backward_of_one, before, (forward, backward))
    )
    cost = replace(
        cost,
        forward_ns=cost.forward_ns + more[0],
        input_ns=cost.input_ns + more[1],
        whole_ns=cost.whole_ns + more[1],
    )
    return replace(stage, costs=(cost,), sharding_ns=sum(more))


def _of_layers(cost: StageCost, times: float) -> StageCost:
    """Multiply a cost of the captured blocks."""
    if not times:
        return StageCost(
            0, 0, 0, sent_ns=cost.sent_ns, coming=cost.coming, returning=cost.returning
        )
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
    # The head runs at the end of F, when all of F is held, and at the begin of the backward.
    works = {"F": cost.saved + head.peak_bytes, "I": head.peak_bytes, "B": head.peak_bytes}
    return replace(
        cost,
        working=tuple((kind, max(size, works.get(kind, 0))) for kind, size in cost.working),
        forward_ns=cost.forward_ns + forward,
        input_ns=cost.input_ns + backward // 2,
        weight_ns=cost.weight_ns + backward - backward // 2,
        whole_ns=cost.whole_ns + backward,
    )


def embedding_ns(
    cluster: Cluster, layout: Layout, unit: Unit, machine: Hardware
) -> tuple[int, int]:
    """(forward, backward) time of the embedding. The forward looks rows up and sums them over the
    ranks that divide the table; the backward fills a gradient as large as the table and adds it
    up."""
    framework = find_framework(cluster.framework)
    whole = unit.boundary_bytes * (layout.tp if layout.sequence else 1)
    kind: Literal["reduce_scatter", "all_reduce"] = (
        "reduce_scatter" if layout.sequence else "all_reduce"
    )
    summed_ns = machine.collective_ns(kind, whole, layout.tp, layout.tp)
    filled = unit.table_bytes // 2 * (2 + framework.added_moves)
    forward_ns = machine.memory_ns(2 * whole) + summed_ns
    return round(forward_ns), round(machine.memory_ns(3 * whole + filled))


def sent_between(cluster: Cluster, layout: Layout, unit: Unit) -> list[int]:
    """How long a transfer takes between each stage of the pipeline and the next. Ranks of a stage
    are next to each other, so that few stages of a node send out of it where it holds several."""
    machine, node = load_hardware(cluster.hardware), cluster.gpus_per_node
    each = layout.tp * layout.replicas
    ranks = [stage % layout.pp for stage in range(layout.stages)]
    if layout.schedule == "zero-bubble-v":
        ranks = [min(stage, layout.stages - 1 - stage) for stage in range(layout.stages)]
    firsts = [rank * each // node for rank in ranks]
    return [
        _sent_ns(cluster, layout, unit, machine, each >= node or one != other)
        for one, other in pairwise(firsts)
    ]


def _sent_ns(cluster: Cluster, layout: Layout, unit: Unit, machine: Hardware, across: bool) -> int:
    # Ranks of a node send at the same time, each its part of the width, which those that receive
    # gather (Narayanan et al. 2021, section 4.1); or all of it.
    apart = across and not layout.sequence and find_framework(cluster.framework).scatters
    whole = unit.boundary_bytes
    sent_ns = machine.collective_ns("p2p", whole // layout.tp if apart else whole, 2, 2 - across)
    return sent_ns + apart * machine.collective_ns("all_gather", whole, layout.tp, layout.tp)
