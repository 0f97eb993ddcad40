"""What a layout takes: the best plan of each stage, all stages in their schedule, and what is left.

A stage of many blocks is planned by a few of them: its time is as many times theirs, and as many
times more microbatches are in flight. That is exact in memory where every few blocks are treated
alike, and leaves out what the borders between them could still hide.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from overlapc.errors import Infeasible
from overlapc.ir import Plan, Problem, Timeline
from overlapc.pipeline import PipelineTimeline, StageCost, pipeline_bound, simulate_pipeline
from overlapc.profiler.hardware import Hardware, load_hardware
from overlapc.schedule import Schedule
from overlapc.search.layouts import (
    Cluster,
    Layout,
    expert_ranks,
    microbatches,
    stage_layers,
    stage_parameters,
    static_bytes,
)
from overlapc.search.models import Model
from overlapc.search.units import Unit
from overlapc.simulate import saved_bytes, simulate
from overlapc.solvers import bound_ns, solve
from overlapc.solvers.schedules import make_schedule
from overlapc.stages import in_parts, stage_cost

# float32 weight and moments read and written, gradient read, bf16 weight written
_OPTIMIZER_MOVES = 2 * 12 + 4 + 2
_SPARE = 0.05  # of what is in flight: rounded up by more than this, a stage is planned once more


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

    @property
    def fits(self) -> bool:
        return self.smallest_bytes == 0

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def parse(found: Mapping[str, Any]) -> Found:
        layout = Layout(**found["layout"])
        lists = {key: tuple(found[key]) for key in ("peak_bytes", "layers")}
        return Found(**{**found, **lists, "layout": layout})


@dataclass(frozen=True)
class Stage:
    """A planned stage: a few of its blocks, and what all of them take."""

    problem: Problem
    plan: Plan
    timeline: Timeline
    cost: StageCost
    bound_ns: int
    times: float  # how many times the captured blocks
    peak_bytes: int

    @property
    def microbatch_ns(self) -> int:
        """Forward and backward of one."""
        return self.cost.forward_ns + self.cost.takes("B")


@dataclass(frozen=True)
class Outcome:
    """What was found, and how it came about; without stages where nothing fits."""

    found: Found
    timeline: PipelineTimeline | None = None  # of few microbatches
    stages: tuple[Stage, ...] = ()

    @property
    def slowest(self) -> Stage:
        return max(self.stages, key=lambda stage: stage.microbatch_ns)


def lower_bound(model: Model, cluster: Cluster, layout: Layout, unit: Unit) -> int:
    """No plan, schedule or division of the layers over the stages can take less: the slowest stage
    does each microbatch, its compute and its collectives each take their time, and the pipeline
    fills and drains."""
    block, head = least_ns(unit.problem) / unit.blocks, least_ns(unit.head)
    most = -(-(model.layers // model.period) // layout.pp) * model.period
    whole = model.layers * block + head
    count = microbatches(cluster, layout)
    slowest = count * max(most * block, model.period * block + head, whole / layout.pp)
    if layout.schedule == "zero-bubble":  # weight gradients wait till the pipeline drains
        forward, inputs = _compute_ns(unit.problem, "F"), _compute_ns(unit.problem, "I")
        both = (forward + inputs) / unit.blocks * model.layers
        ramped = max(
            pipeline_bound(whole, layout.pp, count, forward / unit.blocks / block),
            pipeline_bound(both, layout.pp, count),
        )
    else:
        ramped = pipeline_bound(whole, layout.pp, count)
    machine = load_hardware(cluster.hardware)
    parameters = sum(map(sum, stage_parameters(model, layout))) / layout.pp
    return round(max(slowest, ramped)) + _optimizer_ns(parameters, layout, machine)


def _compute_ns(problem: Problem, letter: str) -> int:
    """Of one kind of piece."""
    ops = (op for op in problem.trace.ops if op.piece.letter == letter)
    return sum(problem.cost(op.name).compute_ns for op in ops)


def first_bound(model: Model, cluster: Cluster, layout: Layout) -> int:
    """The same before anything is captured: flops at the full rate."""
    peak = max(load_hardware(cluster.hardware).peak_flops.values())
    tokens = cluster.global_batch * model.seq
    return round(model.flops_per_token() / 2 * tokens / (cluster.gpus * peak) * 1e9)


def least_ns(problem: Problem) -> int:
    costs = [(op, problem.cost(op.name)) for op in problem.trace.ops]
    lanes: dict[str, int] = {}
    for op, cost in costs:
        lanes[op.lane] = lanes.get(op.lane, 0) + cost.comm_ns
    return max(sum(cost.compute_ns for _, cost in costs), *lanes.values())


def _optimizer_ns(parameters: float, layout: Layout, machine: Hardware) -> int:
    return round(machine.memory_ns(parameters * _OPTIMIZER_MOVES / layout.dp))


def evaluate(
    model: Model,
    cluster: Cluster,
    layout: Layout,
    unit: Unit,
    solver: str = "heu",
    time_limit_s: float = 10.0,
    layers: Sequence[int] | None = None,
) -> Outcome:
    """The layout's step under the solver's plans, and what its pipeline does in a few microbatches;
    or what memory it lacks. `layers` are those of each stage, by default an even split."""
    machine = load_hardware(cluster.hardware)
    count = microbatches(cluster, layout)
    few = min(count, 4 * layout.pp)
    schedule = make_schedule(layout.schedule, layout.pp, few)
    layers = layers or stage_layers(model, layout.pp)
    stages = []
    for stage in range(layout.pp):
        place = Place.of(model, cluster, layout, unit, schedule, stage, layers)
        try:
            stages.append(planned(place, unit, solver, time_limit_s))
        except Infeasible as error:
            smallest = place.static_bytes + error.smallest_bytes
            found = Found(layout, solver, smallest_bytes=smallest, blocking_stage=stage)
            return Outcome(replace(found, layers=tuple(layers), microbatches=count))
    costs = [stage.cost for stage in stages]
    timeline = simulate_pipeline(schedule, costs, trusted=True)
    step_ns = timeline.step_ns
    if count > few:  # the steady state goes on
        fewer = make_schedule(layout.schedule, layout.pp, few - layout.pp)
        before = simulate_pipeline(fewer, costs, trusted=True).step_ns
        step_ns += round((step_ns - before) / layout.pp * (count - few))
    outcome = Outcome(Found(layout, solver), timeline, tuple(stages))
    busy = count * outcome.slowest.microbatch_ns
    reduction = _reduction_ns(model, layout, machine, layers)
    exposed_dp = max(0, reduction - min(cost.takes("B") for cost in costs))
    most = max(map(sum, stage_parameters(model, layout, layers)))
    optimizer = _optimizer_ns(most, layout, machine)
    pipeline_ns = step_ns
    step_ns += exposed_dp + optimizer
    plan = outcome.slowest.timeline
    times = outcome.slowest.times * count
    exposed: dict[str, int] = {"dp": exposed_dp}
    for exposure in plan.exposures:
        kind = "all-to-all" if "all_to_all" in exposure.issue else "tp"
        exposed[kind] = exposed.get(kind, 0) + round(exposure.exposed_ns * times)
    tokens = cluster.global_batch * model.seq
    peak = machine.peak_flops.get("bfloat16") or machine.peak_flops.get("float16", math.inf)
    per_s = tokens / step_ns * 1e9
    least = sum(stage.bound_ns for stage in stages)
    found = Found(
        layout,
        solver,
        step_ns,
        lower_bound(model, cluster, layout, unit),
        per_s,
        per_s * model.flops_per_token() / (cluster.gpus * peak),
        exposed,
        max(0.0, (pipeline_ns - busy) / step_ns),
        round(plan.recompute_ns * times),
        round(_hidden_ns(plan) * times),
        sum(stage.timeline.step_ns for stage in stages) / max(1, least) - 1,
        tuple(stage.peak_bytes for stage in stages),
        tuple(layers),
        count,
    )
    return replace(outcome, found=found)


@dataclass(frozen=True)
class Place:
    """A stage before it is planned: how many layers where, and what they leave of the memory."""

    cluster: Cluster
    layout: Layout
    stage: int
    layers: int
    in_flight: int
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
        stage: int,
        layers: Sequence[int],
    ) -> Place:
        """With so many layers in each stage."""
        in_flight = schedule.in_flight(stage)
        return Place(
            cluster,
            layout,
            stage,
            layers[stage],
            in_flight,
            static_bytes(model, layout, layers)[stage],
            unit.boundary_bytes * (in_flight + 1),
            any(action.kind == "I" for action in schedule.actions),
        )

    @property
    def room(self) -> int:
        """Scores are there when a microbatch's last block is done and its backward begins: instead
        of what the plan's own worst moment has."""
        return self.cluster.memory_bytes - self.static_bytes - self.boundary_bytes

    @property
    def last(self) -> bool:
        return self.stage == self.layout.pp - 1

    def held(self, unit: Unit) -> float:
        """How many times the captured blocks are in flight."""
        return self.in_flight * self.layers / unit.blocks

    def problem(self, unit: Unit) -> Problem:
        """As many blocks as were captured stand for all."""
        copies = max(1, math.ceil(self.held(unit)))
        return replace(unit.problem, in_flight=copies, budget_bytes=max(1, self.room))

    def loose(self, unit: Unit) -> Problem:
        """The same with no more in flight than there is: its bounds hold here."""
        copies = math.floor(self.held(unit))
        budget = max(1, self.room) if copies else None
        return replace(unit.problem, in_flight=max(1, copies), budget_bytes=budget)


def _solved(
    place: Place, unit: Unit, solver: str, time_limit_s: float
) -> tuple[Problem, Plan, int]:
    """The best plan found in the room there is, and its peak. In flight is what the layers make,
    not a whole number of captured blocks: what the rounding took is given back."""
    problem = place.problem(unit)
    spare = problem.in_flight - place.held(unit)

    def peak(plan: Plan) -> int:
        kept = saved_bytes(problem, plan.saved)
        return simulate(problem, plan).peak_bytes - math.floor(spare * kept)

    def within(budget: int) -> tuple[Problem, Plan]:
        found = replace(problem, budget_bytes=budget)
        return found, solve(found, solver, time_limit_s=time_limit_s)

    room = max(1, place.room)
    try:
        found, plan = within(room)
    except Infeasible as error:
        found, plan = within(error.smallest_bytes)
        if peak(plan) > room:
            raise Infeasible(room, peak(plan)) from None
    if plan.recomputed and spare > _SPARE * place.held(unit):
        more = within(room + math.floor(spare * saved_bytes(problem, plan.saved)))
        if peak(more[1]) <= room:
            found, plan = more
    return found, plan, peak(plan)


def planned(place: Place, unit: Unit, solver: str, time_limit_s: float) -> Stage:
    """One stage: its blocks under their best plan in the memory that is left, and what is at its
    ends."""
    cluster, layout, in_flight = place.cluster, place.layout, place.in_flight
    machine = load_hardware(cluster.hardware)
    times = place.layers / unit.blocks
    static, boundary = place.static_bytes, place.boundary_bytes
    head = simulate(unit.head, solve(unit.head, "none")) if place.last else None
    try:
        problem, plan, peak = _solved(place, unit, solver, time_limit_s)
    except Infeasible as error:
        raise Infeasible(cluster.memory_bytes, error.smallest_bytes + boundary) from None
    timeline = simulate(problem, plan)
    ran = simulate(problem, in_parts(problem.trace, plan)) if place.in_pieces else timeline
    received = unit.received if layout.pp > 1 else ()
    cost = stage_cost(problem, plan, received, _sent_ns(cluster, layout, unit, machine))
    peak += boundary
    if head is not None:
        saved = round(cost.saved * times) * in_flight
        peak = max(peak, saved + boundary + head.peak_bytes)
        if peak > cluster.memory_bytes - static:
            raise Infeasible(cluster.memory_bytes, peak)
    saved = round(cost.saved * times)
    forward, backward = head.phase_ns if head is not None else (0, 0)
    scaled = replace(
        cost,
        forward_ns=round(cost.forward_ns * times) + forward,
        input_ns=round(cost.input_ns * times) + backward // 2,
        weight_ns=round(cost.weight_ns * times) + backward - backward // 2,
        recompute_ns=round(cost.recompute_ns * times),
        whole_ns=round(cost.whole_ns * times) + backward,
        saved=saved,
        for_weights=round(cost.for_weights * times),
        working=tuple((k, size + (saved - cost.saved) * (k == "F")) for k, size in cost.working),
    )
    exact = problem.in_flight == place.held(unit)
    proven = (plan.bound_ns if exact else 0) or bound_ns(place.loose(unit))
    return Stage(problem, plan, ran, scaled, proven, times, peak + static)


def _sent_ns(cluster: Cluster, layout: Layout, unit: Unit, machine: Hardware) -> int:
    if layout.pp == 1:
        return 0
    across = layout.tp * layout.dp >= cluster.gpus_per_node
    # Ranks of a node send at the same time, each its part of the width.
    size = unit.boundary_bytes // layout.tp if across else unit.boundary_bytes
    return machine.collective_ns("p2p", size, 2, 1 if across else 2)


def _reduction_ns(model: Model, layout: Layout, machine: Hardware, layers: Sequence[int]) -> int:
    """Gradients summed over the replicas and weights handed back: a reduce-scatter in float32 and
    an all-gather in bf16; experts only over the replicas that hold them."""
    replicas = layout.dp // expert_ranks(model, layout.dp)
    longest = 0
    for dense, experts in stage_parameters(model, layout, layers):
        took = 0
        for count, ranks in ((dense, layout.dp), (experts, replicas)):
            near = max(1, min(ranks, machine.gpus_per_node // layout.tp))
            took += machine.collective_ns("reduce_scatter", count * 4, ranks, near)
            took += machine.collective_ns("all_gather", count * 2, ranks, near)
        longest = max(longest, took)
    return longest


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
