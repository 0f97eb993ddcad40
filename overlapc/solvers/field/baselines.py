"""Baselines: what others would run, written as plans and judged by the same simulator.

What eager PyTorch does with this code:

none        save everything that the backward reads; with sequence parallelism that includes
            gathered values
full        torch.utils.checkpoint around each layer: layers' inputs are kept, and what lies
            outside of layers. Like checkpoint, it stops where the last needed tensor is made
whole       the same, but each layer runs again to its end, as checkpoint without such a stop
lancet      save everything; weight gradients into windows by best fit (Lancet's backward)

What Megatron does. Its column-parallel layers keep a rank's part of a sequence, and gather the
other parts again for the weight gradient, while the input gradient is computed:

megatron-none, megatron-selective, megatron-full
            recompute nothing, the core of attention, or each layer from its first op to its last,
            as Megatron does: also what nobody needs. A weight gradient runs under the collective
            before it. `megatron-selective:mlp+moe` recomputes other modules (`modules.py`)
selective   recompute the core of attention
uniform     recompute groups of layers, as small as fit: only the groups' inputs are kept
block       recompute the first layers, as few as fit; the rest keep what Megatron keeps
megatron    the fastest that fits of all layers, none, and any of its recompute_modules (core of
            attention, layer norm, activation), each weight gradient hidden under the collective
            that follows

What other papers choose:

checkmate   the least recompute that fits, blind to communication (Checkmate's optimum)
lynx        the repeated block's choice, recompute into windows, weight gradients left in place

Recompute runs where its value is needed, but in `lynx`. PyTorch's own choice (`torch`) needs its
partitioner and lives in `overlapc.passes.emit.torch_choice`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from itertools import product

from overlapc.core.errors import Infeasible
from overlapc.core.ir import Op, Plan, Problem, Slowdown, Trace, issue, parse_issue
from overlapc.core.simulate import memory_curve, peak_bytes, simulate
from overlapc.solvers.bound.program import IntegerProgram
from overlapc.solvers.choose.blocks import layers, made_inside
from overlapc.solvers.choose.choice import Choice, Needs, plan_on_demand
from overlapc.solvers.choose.heu import heu_plans
from overlapc.solvers.choose.overlap import steady_plans
from overlapc.solvers.constants import GAP, OVERSHOOT
from overlapc.solvers.order.listing import Style, list_schedule
from overlapc.solvers.order.work import NEVER, backward_work

_GATHER = "all_gather_into_tensor"
_MOVES = ("cat", "clone", "_to_copy", "copy")  # ops that make a tensor of gathered parts


def none(problem: Problem) -> Plan:
    """Save everything that the backward reads."""
    needs = Needs(problem.trace)
    return plan_on_demand(problem, needs.storages, "none", needs)


def full(problem: Problem) -> Plan:
    """Recompute every layer, as `torch.utils.checkpoint` around it does."""
    trace = problem.trace
    kept = {value.storage for value in trace.values} - made_inside(trace, layers(trace))
    return plan_on_demand(problem, kept, "full")


def whole(problem: Problem) -> Plan:
    """Recompute every layer from its first op to its last, also what nobody needs."""
    plan = replace(full(problem), solver="whole")
    return _layers_whole(problem.trace, layers(problem.trace), plan)


def selective(problem: Problem) -> Plan:
    """Recompute scores, softmax and dropout of attention."""
    return megatron_without(problem, core_attention(problem), "selective")


def megatron_without(problem: Problem, dropped: set[str], solver: str) -> Plan:
    """Megatron's plan that recomputes these storages. It keeps the parts that it gathers, unless
    they are recomputed, too."""
    gathered, parts = _gathered(problem.trace)
    kept = (set(Needs(problem.trace).storages) | parts) - dropped - gathered
    return _gather_early(problem, plan_on_demand(problem, kept, solver))


def core_attention(problem: Problem) -> set[str]:
    """What the core of attention makes, with what it gets from context-parallel ranks for it."""
    trace = problem.trace
    dropped: set[str] = set()
    for op in trace.ops:
        if op.is_forward and is_core_attention(op):
            dropped |= {trace.value[name].storage for name in op.outputs}
            dropped |= _received(trace, op)
            if "_softmax" in op.signature:
                dropped |= _around_softmax(problem, op)
    return dropped


def _received(trace: Trace, core: Op) -> set[str]:
    """Storages of what the core of attention reads that comes from other ranks, and of what is made
    of it for the core by moving alone."""
    found: set[str] = set()

    def comes(name: str) -> bool:
        maker = trace.op.get(trace.value[name].producer)
        if maker is None or not maker.is_forward:
            return False
        there, made = storages_of(trace, maker.inputs), storages_of(trace, maker.outputs)
        moves = target(maker) in _MOVES or made <= there
        is_mine = maker.role in ("start", "wait") or (moves and any(map(comes, maker.inputs)))
        found.update(made if is_mine else ())
        return is_mine

    for name in core.inputs:
        comes(name)
    return found


def _outputs_of(problem: Problem, *targets: str) -> set[str]:
    """Storages that forward ops of these names make."""
    trace = problem.trace
    return {
        trace.value[name].storage
        for op in trace.ops
        if op.is_forward and target(op) in targets
        for name in op.outputs
    }


def _gathered(trace: Trace) -> tuple[set[str], set[str]]:
    """The inputs of matrix products that were gathered from all ranks, and the parts that the ranks
    had before."""
    gathered: set[str] = set()
    parts: set[str] = set()
    for gather in trace.ops:
        if not (gather.is_forward and _is_gather(gather)):
            continue
        there = storages_of(trace, gather.outputs)
        front = [op for name in gather.outputs for op in trace.users[name]]
        is_factor = False
        while front:
            op = front.pop()
            if not op.is_forward:
                continue
            made, kind = storages_of(trace, op.outputs), target(op)
            if kind.endswith("mm"):  # its last input is the weight, the one before is weighed
                is_factor |= trace.value[op.inputs[-2]].storage in there
            elif made <= there or (
                kind in _MOVES and storages_of(trace, op.inputs) <= there | trace.resident
            ):
                there |= made
                front += [user for name in op.outputs for user in trace.users[name]]
        if is_factor:
            gathered |= there
            parts |= storages_of(trace, gather.inputs)
    return gathered, parts - trace.resident


def _is_gather(op: Op) -> bool:
    return op.signature.startswith(f"_c10d_functional.{_GATHER}.")


def storages_of(trace: Trace, names: Iterable[str]) -> set[str]:
    return {trace.value[name].storage for name in names}


def target(op: Op) -> str:
    """`mm` of `aten.mm.default bfloat16[8,8] > ...`."""
    return op.signature.split(" ", 1)[0].partition(".")[2].split(".")[0]


def is_core_attention(op: Op) -> bool:
    called = op.signature.split(" ", 1)[0]
    cores = "aten._softmax.", "overlapc.ring_"
    return "scaled_dot_product" in called or called.startswith(cores)


def _around_softmax(problem: Problem, softmax: Op) -> set[str]:
    """The ops between the two batched matrix products around a softmax."""
    trace = problem.trace
    found: set[str] = set()

    def walk(op: Op, downwards: bool) -> None:
        front = [op]
        while front:
            here = front.pop()
            if downwards:
                near = [u for name in here.outputs for u in trace.users[name] if u.is_forward]
            else:
                makers = [trace.value[name].producer for name in here.inputs]
                near = [trace.op[m] for m in makers if m]
            for other in near:
                product = "bmm" in other.signature.split(" ", 1)[0]
                if product and downwards:
                    continue
                if "mm" in other.signature.split(" ", 1)[0] and not product:
                    continue
                storages = {trace.value[name].storage for name in other.outputs}
                if storages <= found:
                    continue
                found.update(storages)
                if not product:
                    front.append(other)

    walk(softmax, downwards=True)
    walk(softmax, downwards=False)
    return found


def megatron_none(problem: Problem) -> Plan:
    """Megatron's plan without recompute."""
    return hide_weights(problem, megatron_without(problem, set(), "megatron-none"), at_most=1)


def megatron_selective(problem: Problem) -> Plan:
    """Megatron's plan that recomputes the core of attention."""
    plan = megatron_without(problem, core_attention(problem), "megatron-selective")
    return hide_weights(problem, plan, at_most=1)


def megatron_full(problem: Problem) -> Plan:
    """Megatron's plan that recomputes every layer whole."""
    trace = problem.trace
    spans = layers(trace)
    plan = megatron_without(problem, made_inside(trace, spans), "megatron-full")
    return hide_weights(problem, _layers_whole(trace, spans, plan), at_most=1)


def _layers_whole(trace: Trace, spans: Sequence[range], plan: Plan) -> Plan:
    """The plan in which each layer that recomputes anything recomputes all of its ops, before its
    backward; but for ops that read what cannot be made again, such as a changed buffer."""
    forward = [op for op in trace.ops if op.is_forward]
    span_of = {forward[i].name: span for span in spans for i in span}
    saved = set(plan.saved)
    order: list[str] = []
    done: set[str] = set()

    def is_there(name: str) -> bool:
        producer = trace.value[name].producer
        return not producer or name in saved or issue(producer, True) in done

    for text in plan.order:
        name, again = parse_issue(text)
        if text in done:
            continue
        for op in [forward[i] for i in span_of[name]] if again and name in span_of else ():
            one = issue(op.name, True)
            if one not in done and reruns(trace, op, saved) and all(map(is_there, op.inputs)):
                order.append(one)
                done.add(one)
        if text not in done:
            order.append(text)
            done.add(text)
    return replace(plan, order=tuple(order))


def reruns(trace: Trace, op: Op, saved: set[str]) -> bool:
    """The issues that recompute an op. A start and its wait run again together: their result is the
    wait's."""
    start, wait = trace.start_of.get(op.name, op.name), trace.wait_of.get(op.name, op.name)
    may = trace.op[start].recomputable and trace.op[wait].recomputable
    return may and not saved.issuperset(trace.op[wait].outputs)


def uniform(problem: Problem) -> Plan:
    """Recompute groups of one, two, four... layers: the first that fits, or else the last."""
    spans = layers(problem.trace)
    for size in (1 << n for n in range(len(spans).bit_length())):
        groups = [range(group[0].start, group[-1].stop) for group in _split(spans, size)]
        plan = megatron_without(problem, made_inside(problem.trace, groups), "uniform")
        if fits(problem, plan):
            break
    return plan


def _split(spans: Sequence[range], size: int) -> list[Sequence[range]]:
    return [spans[at : at + size] for at in range(0, len(spans), size)]


def block(problem: Problem) -> Plan:
    """Recompute as few layers as fit, the first ones; found by halves, as each takes memory."""
    spans = layers(problem.trace)

    @cache
    def of_first(count: int) -> Plan:
        again = made_inside(problem.trace, spans[:count])
        return megatron_without(problem, again, "block")

    counts = range(len(spans))
    return of_first(bisect_left(counts, True, key=lambda n: fits(problem, of_first(n))))


def checkmate(problem: Problem) -> Plan:
    """The least recompute time that fits, recomputed on demand: a program without windows.

    The program counts a little less memory than an order takes. If none of its plans fits, the
    plan of least memory is taken, which is the same for every budget.
    """
    needs = Needs(problem.trace)
    everything = plan_on_demand(problem, needs.storages, "checkmate", needs)
    if fits(problem, everything):
        return everything
    costs = {
        name: replace(cost, compute_ns=cost.compute_ns + cost.comm_ns, comm_ns=0)
        for name, cost in problem.profile.costs.items()
    }
    silent = replace(problem, profile=replace(problem.profile, costs=costs, slowdown=Slowdown()))
    program = IntegerProgram(silent, needs)
    budget = problem.budget_bytes
    for percent in range(0, 60, 4) if budget is not None else (0,):
        limit = budget * (100 - percent) // 100 if budget is not None else 1 << 60
        try:
            found = program.solve(3.0, GAP, program.thrifty(limit))
        except Infeasible:
            break
        if found.kept is None:
            continue
        plan = plan_on_demand(problem, found.kept, "checkmate", needs)
        if fits(problem, plan):
            return plan
    least = min(steady_plans(problem), key=lambda plan: peak_bytes(problem, plan))
    return replace(least, solver="checkmate", found_by="")


def megatron(problem: Problem) -> Plan:
    """Delay every weight gradient to the next collective and no further."""
    modules = (
        core_attention(problem),
        _outputs_of(problem, "native_layer_norm", "_fused_rms_norm"),
        _outputs_of(problem, "gelu", "silu", "glu", "relu"),
    )
    there = [storages for storages in modules if storages]
    plans = [megatron_without(problem, made_inside(problem.trace, layers(problem.trace)), "full")]
    for chosen in product((False, True), repeat=len(there)):
        dropped = set().union(*(m for m, is_in in zip(there, chosen, strict=True) if is_in))
        plans.append(megatron_without(problem, dropped, "megatron"))
    ordered = [hide_weights(problem, plan, at_most=1) for plan in plans]
    return _fastest_fitting(problem, [*plans, *ordered], "megatron")


def lancet(problem: Problem) -> Plan:
    """Save what eager saves; put weight gradients anywhere after their inputs."""
    plan = none(problem)
    work = backward_work(problem, Choice(plan.saved, plan.recomputed))
    forward = tuple(op.name for op in problem.trace.ops if op.is_forward)
    found = [plan]
    if len(problem.phases) > 1:
        for style in (Style(OVERSHOOT, True, "W"), Style(OVERSHOOT, False, "W")):
            found.append(replace(plan, order=forward + list_schedule(work, NEVER, style)))
    return _fastest_fitting(problem, found, "lancet")


def lynx(problem: Problem) -> Plan:
    """HEU's choices, scheduled with weight gradients in their places."""
    return _fastest_fitting(problem, [none(problem), *heu_plans(problem, defer=False)], "lynx")


def fits(problem: Problem, plan: Plan) -> bool:
    """Is the plan within the problem's budget?"""
    budget = problem.budget_bytes
    return budget is None or max(memory_curve(problem, plan), default=0) <= budget


def _fastest_fitting(problem: Problem, plans: Sequence[Plan], solver: str) -> Plan:
    """The fastest that fits, else the smallest."""

    def key(plan: Plan) -> tuple[int, int]:
        timeline = simulate(problem, plan)
        over = max(0, timeline.peak_bytes - (problem.budget_bytes or timeline.peak_bytes))
        return over, timeline.step_ns

    return replace(min(plans, key=key), solver=solver, status="baseline")


def hide_weights(problem: Problem, plan: Plan, at_most: int) -> Plan:
    """The plan in which at most so many weight gradients before each collective's start move behind
    it."""
    trace = problem.trace
    order: list[str] = []
    held: list[str] = []

    def release(count: int) -> None:
        """Issue the held weight gradients, the first first, until only `count` that take time are
        left."""
        while sum(problem.cost(text).compute_ns > 0 for text in held) > count:
            order.append(held.pop(0))

    for text in plan.order:
        op = trace.op.get(text)
        if op is not None and op.role == "weight_grad" and not op.random:
            held.append(text)
            release(at_most)
            continue
        if op is not None and _reads_from(trace, op, held):
            order += held
            held.clear()
        order.append(text)
        if op is not None and op.role == "start" and not op.is_forward:
            order += held
            held.clear()
    return replace(plan, order=(*order, *held))


def _gather_early(problem: Problem, plan: Plan) -> Plan:
    """The plan in which each recomputed gather starts one computation earlier, unless it reads the
    result of that computation."""
    trace = problem.trace
    order: list[str] = []
    names: list[str] = []  # of the ops in this order
    for text in plan.order:
        name, again = parse_issue(text)
        at = len(order)
        if again and _is_gather(trace.op[name]):
            needed = {trace.value[given].producer for given in trace.op[name].inputs}
            timed = (i for i in range(at - 1, -1, -1) if problem.cost(names[i]).compute_ns)
            first = next(timed, at)
            at = first if needed.isdisjoint(names[first:]) else at
        order.insert(at, text)
        names.insert(at, name)
    return replace(plan, order=tuple(order))


def _reads_from(trace: Trace, op: Op, held: list[str]) -> bool:
    return any(trace.value[name].producer in held for name in op.inputs)
