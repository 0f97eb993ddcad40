"""These passes turn the problem of one microbatch into that of several: `accumulate` adds gradients
up, `merge` puts the forward of one beside the backward of another. Their results are valid."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from overlapc.ir import COMPUTE, Cost, Op, Problem, Trace
from overlapc.valid import validated

ADD = "_add"  # what adds the gradient `mm_3` to the parameter's is the op `mm_3_add`


def accumulate(
    problem: Problem, gradients: Collection[str], ns_per_kib: float = 0.0, sums: bool = True
) -> Problem:
    """Return the problem in which each of these gradients, once made, is added to what the
    microbatches before left, and ends there, instead of being handed out at the end. `sums`: what
    they are added to is in the budget."""
    trace = problem.trace
    ops: list[Op] = []
    costs = dict(problem.profile.costs)

    def add(name: str, maker: Op) -> None:
        piece = replace(maker.piece, letter="W")
        ops.append(Op(name + ADD, "weight_grad", COMPUTE, piece, (name,), (), "add"))
        took = int(trace.value[name].bytes / 1024 * ns_per_kib)
        costs[name + ADD] = Cost(took, source=problem.cost(maker.name).source)

    for op in trace.ops:
        ops.append(op)
        for name in op.outputs:
            if name in gradients:
                add(name, op)
    for name in gradients:
        if not trace.value[name].producer:  # an incoming gradient, as it is
            add(name, trace.ops[-1])
    outputs = tuple(name for name in trace.outputs if name not in set(gradients))
    summed = replace(trace, ops=tuple(ops), outputs=outputs)
    held = {trace.value[n].storage: trace.value[n].bytes for n in gradients if sums}
    return validated(
        replace(
            problem,
            trace=summed,
            profile=replace(problem.profile, costs=costs),
            resident_bytes=problem.resident_bytes + sum(held.values()),
        )
    )


def merge(problem: Problem, lag: int = 1) -> Problem:
    """Put F of one microbatch beside R, I and W of the one `lag` before it. Those between them are
    among the problem's microbatches in flight."""
    trace, in_flight = ahead(problem.trace, lag), max(1, problem.in_flight - lag + 1)
    return validated(replace(problem, trace=trace, phases=("FIW",), in_flight=in_flight))


def ahead(trace: Trace, steps: int) -> Trace:
    """Return the trace with its forwards of the microbatches that come so many steps later."""
    count = steps * len({op.piece.microbatch for op in trace.ops if op.is_forward})

    def later(op: Op) -> Op:
        return replace(op, piece=replace(op.piece, microbatch=op.piece.microbatch + count))

    return replace(trace, ops=tuple(later(op) if op.is_forward else op for op in trace.ops))
