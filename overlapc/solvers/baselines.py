"""The plans others would run, as plans of the same kind, judged by the same simulator.

none        save everything the backward reads (eager)
full        keep only the borders of the repeated blocks (torch.utils.checkpoint per block)
selective   recompute the core of attention (Megatron's selective recompute)

Each recomputes where the value is needed and keeps the trace's own order. PyTorch's own choice
(`torch`) needs its partitioner and lives in `overlapc.passes.torch_choice`.
"""

from __future__ import annotations

from overlapc.ir import Op, Plan, Problem
from overlapc.solvers.blocks import block_borders
from overlapc.solvers.choice import Needs, plan_on_demand


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
    trace = problem.trace
    needs = Needs(trace)
    dropped: set[str] = set()
    for op in trace.ops:
        if op.is_forward and _is_core_attention(op):
            dropped |= {trace.value[name].storage for name in op.outputs}
            if "_softmax" in op.signature:
                dropped |= _around_softmax(problem, op)
    kept = {s for s in needs.storages if s not in dropped}
    return plan_on_demand(problem, kept, "selective", needs)


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
