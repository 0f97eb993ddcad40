"""`make_units` makes problems of a few captured blocks and of the head, once for all layouts that
share them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, TypeVar

from overlapc.core.ir import COMPUTE, Cost, Op, Piece, Problem, Profile, Timeline, Trace
from overlapc.core.merge import merge
from overlapc.core.record import Record
from overlapc.core.simulate import simulate
from overlapc.core.stages import in_parts
from overlapc.core.valid import validated
from overlapc.planning.problem import TrainingStep
from overlapc.profiler.hardware import Hardware, load_hardware
from overlapc.search.captures import Captures, Module, UnitKey, captures
from overlapc.search.frameworks.beside import beside_products
from overlapc.search.frameworks.dispatch import ordered_as_sent, sent_once
from overlapc.search.frameworks.experts import host_ns_of, of_experts, with_biases
from overlapc.search.frameworks.fp8 import in_fp8, kept_in_fp8
from overlapc.search.frameworks.framework import Framework
from overlapc.search.frameworks.known import find_framework
from overlapc.search.frameworks.scores import kept_by_callers
from overlapc.search.models.transformer import Transformer
from overlapc.solvers import bound_ns, has_one_plan, solve
from overlapc.solvers.bound.bounds import phase_bounds_ns
from overlapc.solvers.bound.program import IntegerProgram

_T = TypeVar("_T")
Part = Literal["whole", "forward", "inputs", "merged"]
_HEAD = "head"
BLOCKS = 4  # so many are captured, or one period; a longer stage is a multiple


@dataclass(frozen=True)
class LeastTimes:
    """The least nanoseconds of the blocks, under any plan and memory: of a microbatch, of its
    forward, and of its backward without weight gradients."""

    whole: int
    forward: int
    inputs: int
    merged: int  # a backward merged with the forward of another microbatch

    @staticmethod
    def of(problem: Problem) -> LeastTimes:
        forward, inputs, _ = phase_bounds_ns(replace(problem, phases=("F", "I", "W")))
        whole = bound_ns(problem)
        merged = bound_ns(merge(problem)) if problem.trace.lanes else whole
        return LeastTimes(whole, forward, inputs, merged)


@dataclass(frozen=True)
class Unit(Record):
    """A few blocks as a problem, the head as another, and the transfers between stages."""

    blocks: int
    problem: Problem
    received: tuple[str, ...]  # inputs that another stage makes
    head: Problem
    boundary_bytes: int
    table_bytes: int  # bytes of a rank's part of the embedding
    least: LeastTimes
    head_ran: Timeline
    launching: float = 0.0  # of the blocks' time, that their host takes to launch them
    first: Unit | None = None  # of the model's first layers, if they alone have no experts

    @cached_property
    def _found(self) -> dict[Hashable, Any]:
        return {}

    def once(self, what: Hashable, find: Callable[[], _T]) -> _T:
        """What `find` finds: it is asked once, and must depend on the unit and on `what` alone."""
        if what not in self._found:
            self._found[what] = find()
        return self._found[what]  # type: ignore[no-any-return]

    def planned_by(self, solver: str) -> Unit:
        """The unit for a solver. If the solver has one plan for any memory, its least times are
        those of that plan."""
        if not has_one_plan(solver):
            return self
        plan = solve(replace(self.problem, budget_bytes=None), solver)
        orders = plan, in_parts(self.problem.trace, plan)  # whole or in parts, as schedules need it
        took = min(simulate(self.problem, order).step_ns for order in orders)
        first = self.first and self.first.planned_by(solver)
        least = replace(self.least, whole=max(took, self.least.whole))
        return replace(self, least=least, first=first)

    def least_ns(self, which: Part, layers: int, dense: int = 0) -> float:
        """The least time of so many layers, `dense` of them first ones without experts."""
        least: int = getattr(self.least, which)
        first = self.first.least_ns(which, dense) if self.first is not None and dense else 0.0
        return (layers - dense) * least / self.blocks + first

    def bound_ns(self, problem: Problem, silent: bool = False) -> int:
        """A bound on one of the unit's problems, in its memory and with so many microbatches in
        flight as it has. If `silent`, all its collectives take no time."""
        which = _HEAD in problem.trace.op, silent
        program = self.once(("program", *which), lambda: IntegerProgram(problem))
        where = problem.in_flight, problem.budget_bytes
        return self.once(("bound", which, where), lambda: bound_ns(problem, program))

    @cached_property
    def cut(self) -> Unit:
        """The unit with the least times of microbatches in slices. (Slices compute no less than
        the microbatch, and communicate no less.)"""
        forward, inputs, _ = phase_bounds_ns(
            replace(self.problem, phases=("F", "I", "W")), cut=True
        )
        whole, head = (sum(phase_bounds_ns(each, cut=True)) for each in (self.problem, self.head))
        ran = replace(self.head_ran, step_ns=min(head, self.head_ran.step_ns))
        first = self.first and self.first.cut
        return replace(
            self, least=LeastTimes(whole, forward, inputs, whole), head_ran=ran, first=first
        )

    @cached_property
    def with_head(self) -> Problem:
        """The problem of the blocks with an op between forward and backward that takes the head's
        memory, and no time."""
        trace = self.problem.trace
        maker = {name: trace.op.get(trace.value[name].producer) for name in trace.outputs}
        made = tuple(name for name, op in maker.items() if op is not None and op.is_forward)
        head = Op(_HEAD, "forward", COMPUTE, Piece(0, "F", 0), made, (), _HEAD, recomputable=False)
        behind = max((i for i, op in enumerate(trace.ops, 1) if op.is_forward), default=0)
        ops = (*trace.ops[:behind], head, *trace.ops[behind:])
        costs = {**self.problem.profile.costs, _HEAD: Cost(0, 0, self.head_ran.peak_bytes)}
        profile = replace(self.problem.profile, costs=costs)
        return validated(replace(self.problem, trace=replace(trace, ops=ops), profile=profile))


def make_unit(key: UnitKey, bounded: bool = True, most: int = BLOCKS) -> Unit:
    """Capture the key's blocks, at `most` so many or one period, and its head on fake tensors and
    ranks, with estimated costs. The process has no process groups before and after. Unless it is to
    be `bounded`, the least times of the blocks are not computed, which takes longer than all the
    rest."""
    (unit,) = make_units([key], bounded, most)
    return unit


def make_units(
    keys: Sequence[UnitKey], bounded: bool = True, most: int = BLOCKS
) -> tuple[Unit, ...]:
    """The units of keys that differ in their microbatches alone: most are captured together."""
    of_first = getattr(keys[0].model, "of_first", None)
    first: tuple[Unit | None, ...] = (None,) * len(keys)
    if of_first:
        first = make_units([replace(key, model=of_first) for key in keys], bounded, most)
    every = captures(keys, most)
    parts = zip(keys, every, first, strict=True)
    return tuple(_unit(key, of, bounded, behind) for key, of, behind in parts)


def _unit(key: UnitKey, of: Captures, bounded: bool, first: Unit | None) -> Unit:
    model = key.model
    framework = find_framework(key.framework)
    by_products = "attention" in framework.unfused
    blocks = kept_by_callers(of.blocks) if by_products else of.blocks
    problem, received, launching = _problem(key, blocks)
    module = in_place(of.head) if "replaced" in framework.unfused else of.head
    head, *_ = _problem(replace(key, fp8=False), module)
    head_ran = simulate(head, solve(head, "none"))
    at_loss = framework.loss_bytes * key.microbatch * model.seq * model.vocab
    head_ran = replace(head_ran, peak_bytes=max(at_loss, head_ran.peak_bytes))
    least = LeastTimes.of(problem) if bounded else LeastTimes(0, 0, 0, 0)
    table = model.vocab * model.width // key.tp * of.element_bytes
    return Unit(
        of.count,
        problem,
        received,
        head,
        of.boundary_bytes,
        table,
        least,
        head_ran,
        launching,
        first,
    )


def in_place(head: Module) -> Module:
    """The head of `modules.LossInPlace`, whose multiples of the scores are in their place."""
    trace = head.described.trace
    moved: dict[str, str] = {}
    for op in trace.ops:
        if op.signature.startswith("aten.mul."):
            given, made = trace.value[op.inputs[0]], trace.value[op.outputs[0]]
            if given.bytes == made.bytes and given.storage not in trace.resident:
                moved[made.storage] = moved.get(given.storage, given.storage)
    if not moved:
        return head
    values = tuple(replace(v, storage=moved.get(v.storage, v.storage)) for v in trace.values)
    return replace(head, described=replace(head.described, trace=replace(trace, values=values)))


def _problem(key: UnitKey, module: Module) -> tuple[Problem, tuple[str, ...], float]:
    """A module as a problem, the inputs that another stage makes, and the part of its time that its
    host takes to launch it."""
    from overlapc.profiler.cache import Cache
    from overlapc.profiler.estimate import priced

    described = module.described
    if key.fp8:
        described = kept_in_fp8(described, getattr(key.model, "experts", 0))
    machine = load_hardware(key.hardware)
    known = Cache(key.costs) if key.costs else None
    framework = find_framework(key.framework)
    if framework.of_2023 and machine.kernels is not None:
        machine = replace(machine, kernels=machine.kernels.of_2023)
    add_ns = machine.add_ns_per_kib
    if not key.model.whole:
        add_ns = machine.memory_ns(framework.added_moves * 512)  # elements of two bytes
    step = TrainingStep(gradients=module.gradients, add_ns_per_kib=add_ns)
    own = framework.pytorch == "eager"
    profile = priced(described, machine, known, framework.attention, own)
    if key.fp8:
        experts = getattr(key.model, "experts", 0)
        profile = in_fp8(described, profile, machine, experts, framework.delayed)
    elif framework.uncovered:
        profile = of_experts(profile, described, machine, framework)
    width = key.model.width
    if isinstance(key.model, Transformer) and key.model.expert_bias > width:  # one of each number
        profile = with_biases(profile, described, machine, framework.bias_moves, width)
    sends_once = framework.dispatcher != "alltoall"
    if sends_once and isinstance(key.model, Transformer) and key.model.experts:
        asked = key.model.experts, key.model.top_k
        groups = described.groups(machine)
        profile = sent_once(described.trace, profile, described.works, groups, machine, asked)
        if framework.dispatcher == "hybridep":
            profile = ordered_as_sent(described.trace, profile, groups)
    if framework.beside and key.sequence:
        profile = beside_products(described.trace, profile, described.works, machine, key.tp)
    problem = step.microbatch(described.trace, profile)
    received = problem.trace.of_kind("batch", "gradient")
    launched, launching = _launched(problem, framework, machine, key)
    return Problem(problem.trace, launched), received, launching


def _is_of_loss(trace: Trace, op: Op) -> bool:
    """Is it one of a fused loss's kernels, that reads scores or writes in their place?"""
    storages = ({trace.value[name].storage for name in names} for names in (op.inputs, op.outputs))
    writes = op.signature.startswith("aten.mul.") and not set.isdisjoint(*storages)
    return writes or op.signature.startswith("aten.amax.")


def _dropped_and_added(
    problem: Problem, costs: Mapping[str, Cost], machine: Hardware
) -> dict[str, Cost]:
    """The costs of dropout and of the sum behind it where both are one kernel, counted with the
    sum: what is dropped is neither written nor read between them."""
    trace, found = problem.trace, {}
    for op in trace.ops:
        users = (
            trace.users[op.outputs[0]] if op.signature.startswith("aten.native_dropout.") else ()
        )
        behind = [user for user in users if user.is_forward]
        if len(behind) != 1 or not behind[0].signature.startswith("aten.add."):
            continue
        dropped, added = costs[op.name], costs[behind[0].name]
        between = round(machine.memory_ns(2 * trace.value[op.outputs[0]].bytes))
        both = dropped.compute_ns + added.compute_ns - between - machine.launch_ns
        found[op.name] = replace(dropped, compute_ns=0)
        found[behind[0].name] = replace(added, compute_ns=max(0, both))
    return found


def _launched(
    problem: Problem, framework: Framework, machine: Hardware, key: UnitKey
) -> tuple[Profile, float]:
    """The costs as a framework runs the ops. Its host launches them one by one: a forward or a
    backward takes no less time than the host needs for it. The device's waits are spread evenly
    over the kernels. Also return the host's part of the time of a forward or a backward, the
    larger: 1 if the device waits."""
    profile = problem.profile
    slower = dict.fromkeys(profile.costs, framework.slower)
    if "attention" in framework.unfused:
        scores = f",{key.model.seq},{key.model.seq}]"
        for op in problem.trace.ops:
            slower[op.name] *= framework.attention if scores in op.signature else 1.0
    if "replaced" in framework.unfused:
        for op in problem.trace.ops:
            slower[op.name] *= framework.loss if _is_of_loss(problem.trace, op) else 1.0
    costs = {
        name: replace(cost, compute_ns=round(cost.compute_ns * slower[name]))
        for name, cost in profile.costs.items()
    }
    costs |= _dropped_and_added(problem, costs, machine)
    launching = 0.0
    for is_forward in (True, False):
        ops = [op for op in problem.trace.ops if op.is_forward == is_forward]
        kernels = [op.name for op in ops if costs[op.name].compute_ns > 0]
        starts = sum(op.role == "start" for op in ops)
        host_ns = len(kernels) * framework.host_ns + starts * framework.host_collective_ns
        host_ns += host_ns_of(problem.trace, framework, key, is_forward)
        device_ns = sum(costs[op.name].compute_ns + costs[op.name].comm_ns for op in ops)
        launching = max(launching, host_ns / max(1, host_ns, device_ns))
        for name in kernels:
            late_ns = max(0, host_ns - device_ns) // len(kernels)
            late_ns = framework.host_ns if framework.blocking else late_ns
            costs[name] = replace(costs[name], compute_ns=costs[name].compute_ns + late_ns)
    return replace(profile, costs=costs), launching
