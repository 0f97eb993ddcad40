"""The plans others would run, as plans of the same kind, judged by the same simulator.

none        save everything the backward reads (eager)
full        keep only the borders of the repeated blocks (torch.utils.checkpoint per block)
selective   recompute the core of attention (Megatron's selective recompute)
uniform     `full` for groups of blocks, as small as fit: only their inputs are kept
block       `full` for the first blocks, as few as fit; the rest keep all (Megatron's "block")
checkmate   the least recompute that fits, blind to communication (Checkmate's optimum)
megatron    the fastest that fits of none, full and any of Megatron's recompute_modules (core of
            attention, layer norm, activation), gathered parts of sequences kept or gathered again,
            its weight gradients hidden under the collective that follows and gathers under the
            input gradient before (Megatron's own overlap)
lancet      save everything; weight gradients into windows by best fit (Lancet's backward)
lynx        the repeated block's choice, recompute into windows, weight gradients left in place

The first three need nothing but the trace. Recompute runs where its value is needed, but in
`lynx`. PyTorch's own choice (`torch`) needs its partitioner and lives in
`overlapc.passes.torch_choice`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

from overlapc.errors import Infeasible
from overlapc.ir import Op, Plan, Problem, Slowdown, Trace, parse_issue
from overlapc.simulate import memory_curve, simulate
from overlapc.solvers.blocks import block_borders, repetition
from overlapc.solvers.choice import Choice, Needs, plan_on_demand
from overlapc.solvers.heu import heu_plans
from overlapc.solvers.listing import Style, list_schedule
from overlapc.solvers.program import Program
from overlapc.solvers.work import NEVER, backward_work

_GATHER = "all_gather_into_tensor"


def none(problem: Problem) -> Plan:
    needs = Needs(problem.trace)
    return plan_on_demand(problem, needs.storages, "none", needs)


def full(problem: Problem) -> Plan:
    """Everything inside a repeated block is recomputed; what lies outside blocks is kept."""
    trace = problem.trace
    needs = Needs(trace)
    first, last, borders = block_borders(trace)
    inside = {
        trace.value[name].storage for op in trace.ops[first:last] for name in op.outputs
    } - set(borders)
    return plan_on_demand(problem, (set(needs.storages) | set(borders)) - inside, "full", needs)


def selective(problem: Problem) -> Plan:
    """Scores, softmax and dropout of attention are recomputed, all else is kept."""
    return _without(problem, _core_attention(problem), "selective")


def _without(problem: Problem, dropped: set[str], solver: str) -> Plan:
    """The parts of what is gathered again are kept, unless they are dropped, too."""
    needs, trace = Needs(problem.trace), problem.trace
    parts = {
        trace.value[name].storage
        for op in trace.ops
        if _is_gather(op) and op.is_forward
        for name in op.inputs
        if trace.value[op.outputs[0]].storage in dropped
    }
    return plan_on_demand(problem, (set(needs.storages) | parts) - dropped, solver, needs)


def _core_attention(problem: Problem) -> set[str]:
    trace = problem.trace
    dropped: set[str] = set()
    for op in trace.ops:
        if op.is_forward and _is_core_attention(op):
            dropped |= {trace.value[name].storage for name in op.outputs}
            if "_softmax" in op.signature:
                dropped |= _around_softmax(problem, op)
    return dropped


def _outputs_of(problem: Problem, *targets: str) -> set[str]:
    """Storages that forward ops of these names make."""
    trace = problem.trace
    return {
        trace.value[name].storage
        for op in trace.ops
        if op.is_forward and op.signature.split(".")[1:2] and op.signature.split(".")[1] in targets
        for name in op.outputs
    }


def _is_gather(op: Op) -> bool:
    return op.signature.startswith(f"_c10d_functional.{_GATHER}.")


def _is_core_attention(op: Op) -> bool:
    target = op.signature.split(" ", 1)[0]
    return "scaled_dot_product" in target or target.startswith("aten._softmax.")


def _around_softmax(problem: Problem, softmax: Op) -> set[str]:
    """What lies between the two batched products around a softmax."""
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


def uniform(problem: Problem) -> Plan:
    """Groups of one, two, four... blocks, until it fits."""
    trace = problem.trace
    repeated = repetition(trace)
    best = full(problem)
    if repeated is None:
        return replace(best, solver="uniform")
    needs = Needs(trace)
    inside = {
        trace.value[name].storage
        for op in trace.ops[repeated.first : repeated.end]
        for name in op.outputs
    }
    group = 1
    while group <= repeated.count:
        kept = (set(needs.storages) - inside) | set(repeated.enters[::group])
        best = plan_on_demand(problem, kept, "uniform", needs)
        if fits(problem, best):
            break
        group *= 2
    return best


def block(problem: Problem) -> Plan:
    """Blocks from the first on are recomputed whole, until what is left fits the budget."""
    trace = problem.trace
    needs = Needs(trace)
    repeated = repetition(trace)
    if repeated is None:
        return full(problem)
    best = none(problem)
    for count in range(repeated.count + 1):
        inside: set[str] = set()
        for op in trace.ops[repeated.first : repeated.first + count * repeated.length]:
            inside |= {trace.value[name].storage for name in op.outputs}
        kept = (set(needs.storages) | set(repeated.enters)) - (inside - set(repeated.enters))
        best = plan_on_demand(problem, kept, "block", needs)
        if fits(problem, best):
            break
    return best


def checkmate(problem: Problem) -> Plan:
    """The least recompute time that fits, recomputed on demand: a program with no windows."""
    needs = Needs(problem.trace)
    costs = {
        name: replace(cost, compute_ns=cost.compute_ns + cost.comm_ns, comm_ns=0)
        for name, cost in problem.profile.costs.items()
    }
    silent = replace(problem, profile=replace(problem.profile, costs=costs, slowdown=Slowdown()))
    program = Program(silent, needs)
    budget = problem.budget_bytes
    best = none(problem)
    for percent in range(0, 60, 4) if budget is not None else (0,):
        limit = budget * (100 - percent) // 100 if budget is not None else 1 << 60
        try:
            found = program.solve(3.0, 0.002, program.thrifty(limit))
        except Infeasible:
            break
        if found.kept is None:
            continue
        best = plan_on_demand(problem, found.kept, "checkmate", needs)
        if fits(problem, best):
            break
    return best


def megatron(problem: Problem) -> Plan:
    """Weight gradients wait for the next collective and no longer."""
    modules = (
        _core_attention(problem),
        _outputs_of(problem, "native_layer_norm", "_fused_rms_norm"),
        _outputs_of(problem, "gelu", "silu", "relu"),
        _outputs_of(problem, _GATHER),
    )
    there = [storages for storages in modules if storages]
    plans = [full(problem)]
    for chosen in product((False, True), repeat=len(there)):
        dropped = set().union(*(m for m, is_in in zip(there, chosen, strict=True) if is_in))
        plans.append(_without(problem, dropped, "megatron"))
    ordered = [_hide_weights(problem, _gather_early(problem, p), at_most=1) for p in plans]
    return _fastest_fitting(problem, [*plans, *ordered], "megatron")


def lancet(problem: Problem) -> Plan:
    """Weight gradients anywhere after their inputs; saved sets as eager has them."""
    plan = none(problem)
    work = backward_work(problem, Choice(plan.saved, plan.recomputed))
    forward = tuple(op.name for op in problem.trace.ops if op.is_forward)
    found = [plan]
    if len(problem.phases) > 1:
        for style in (Style(2.0, True, "W"), Style(2.0, False, "W")):
            found.append(replace(plan, order=forward + list_schedule(work, NEVER, style)))
    return _fastest_fitting(problem, found, "lancet")


def lynx(problem: Problem) -> Plan:
    """HEU's choices, scheduled with weight gradients in their places."""
    return _fastest_fitting(problem, [none(problem), *heu_plans(problem, defer=False)], "lynx")


def fits(problem: Problem, plan: Plan) -> bool:
    budget = problem.budget_bytes
    return budget is None or max(memory_curve(problem, plan), default=0) <= budget


def _fastest_fitting(problem: Problem, plans: Sequence[Plan], solver: str) -> Plan:
    """The fastest that fits, else the smallest."""

    def key(plan: Plan) -> tuple[int, int]:
        timeline = simulate(problem, plan)
        over = max(0, timeline.peak_bytes - (problem.budget_bytes or timeline.peak_bytes))
        return over, timeline.step_ns

    return replace(min(plans, key=key), solver=solver, status="baseline")


def _hide_weights(problem: Problem, plan: Plan, at_most: int) -> Plan:
    """The plan with the last so many weight gradients before a collective's start behind it."""
    trace = problem.trace
    order: list[str] = []
    held: list[str] = []

    def release(count: int) -> None:
        """Issue the first of those held, until only `count` that take time are left."""
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
    """The plan with each gather that runs again started before the computation before it, if that
    makes nothing it reads."""
    trace = problem.trace
    order: list[str] = []
    for text in plan.order:
        name, again = parse_issue(text)
        at = len(order)
        if again and _is_gather(trace.op[name]):
            needed = {trace.value[given].producer for given in trace.op[name].inputs}
            names = [parse_issue(other)[0] for other in order]
            timed = (i for i in range(at - 1, -1, -1) if problem.cost(names[i]).compute_ns)
            first = next(timed, at)
            at = first if needed.isdisjoint(names[first:]) else at
        order.insert(at, text)
    return replace(plan, order=tuple(order))


def _reads_from(trace: Trace, op: Op, held: list[str]) -> bool:
    return any(trace.value[name].producer in held for name in op.inputs)
