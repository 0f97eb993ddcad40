"""`in_fp8` prices the products of matrices of a model's layers as they run in FP8.

As Transformer Engine runs linear layers with a scale for each tensor that follows the tensor itself
(Megatron's `--fp8-recipe tensorwise`): all three products of a layer take FP8 operands and make
half precision. An operand becomes FP8 once: activations in the forward, gradients in the backward,
weights once a step, since all microbatches take the same (`is_first_microbatch` of its modules,
which Megatron's callers set). What tensor-parallel ranks gather for a product is FP8 already
(`_all_gather_fp8` of its distributed.py). With scales that follow from earlier steps (delayed
scaling) nothing has to be read for the largest value first. Attention, norms, the router, the loss
and its scores stay as they are.

What a product needs again for its weight's gradient is kept in FP8 (`kept_in_fp8`), beside what is
kept in half precision where something else needs it, too: attention its own result. Weights are
counted in half precision, as many bytes as in FP8 in rows and in columns (Megatron's
`--fp8-param-gather`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from overlapc.core.ir import Profile
from overlapc.profiler.hardware import FP8, Hardware
from overlapc.profiler.work import OpWork, work_ns
from overlapc.search.frameworks.beside import product_behind

if TYPE_CHECKING:
    from overlapc.profiler.estimate import Described

# Of an element that becomes FP8: read, and written twice, in rows and in columns, since products
# take both operands with the dimension last that they sum over; and read before, in a kernel of its
# own, for the tensor's largest value, if the scale follows from that.
CAST_BYTES, _LOOKED_AT_BYTES = 2 + 1 + 1, 2
_MULTIPLE = 16  # of which both dimensions of an operand must be


def in_fp8(
    described: Described, profile: Profile, machine: Hardware, experts: int, delayed: bool = False
) -> Profile:
    """The profile with the products of layers in FP8; `experts` is the width of the router."""
    trace, works, costs = described.trace, described.works, dict(profile.costs)
    groups = described.groups(machine)
    for op in trace.ops:
        work, cost = works[op.name], costs[op.name]
        if cost.source == "estimated" and runs_in_fp8(work, experts):
            took_ns = fp8_ns(machine, work, op.piece.letter, delayed)
            costs[op.name] = replace(cost, compute_ns=took_ns)
        elif op.role == "start" and work.traffic is not None and work.traffic[0] == "all_gather":
            product = product_behind(trace, works, op)
            if product is not None and runs_in_fp8(works[product.name], experts):
                kind, size = work.traffic
                sent_ns = machine.collective_ns(kind, size // 2, *groups[op.group])
                costs[op.name] = replace(cost, comm_ns=sent_ns)
    return replace(profile, costs=costs)


def kept_in_fp8(described: Described, experts: int) -> Described:
    """The graph with the sizes of what is kept for the backward; `experts` is as in `in_fp8`."""
    trace, works = described.trace, described.works
    reads: dict[str, set[bool]] = {}  # storage -> do backward ops that read it run in FP8?
    for op in reversed(trace.ops):
        given = {trace.value[name].storage for name in op.inputs}
        found = {runs_in_fp8(works[op.name], experts)}
        if "all_gather" in op.signature or op.role == "wait":  # what is gathered may be again
            found = set().union(*(reads.get(trace.value[v].storage, set()) for v in op.outputs))
        elif op.is_forward or works[op.name].kind == "free":
            continue
        for storage in given:
            reads.setdefault(storage, set()).update(found)
    made = {v.storage for v in trace.values if v.producer and trace.op[v.producer].is_forward}
    halves = {
        storage: 1 if found == {True} else 3  # with a copy in FP8 where others read it
        for storage, found in reads.items()
        if True in found and storage in made - trace.resident
    }
    values = tuple(replace(v, bytes=v.bytes * halves.get(v.storage, 2) // 2) for v in trace.values)
    return replace(described, trace=replace(trace, values=values))


def runs_in_fp8(work: OpWork, experts: int) -> bool:
    """Is it a product of a layer, with dimensions that FP8's kernels take?"""
    product = work.product
    if work.kind != "matmul" or product is None or work.dtype not in ("bfloat16", "float16"):
        return False
    sides = product.m, product.n, product.k
    return not any(side % _MULTIPLE for side in sides) and experts not in sides


def fp8_ns(machine: Hardware, work: OpWork, letter: str, delayed: bool = False) -> int:
    """How long the product takes, with what makes its first operand FP8, an activation in the
    forward and a gradient in the backward; a product for a weight's gradient finds both."""
    product = work.product
    assert product is not None
    left = product.batch * product.m * product.k
    right = product.batch * product.k * product.n
    less = min(work.moved_bytes, left + right)  # operands are a byte an element, not two
    quick_ns = work_ns(machine, replace(work, dtype=FP8, moved_bytes=work.moved_bytes - less))
    if letter == "W":
        return quick_ns
    moved = left * (CAST_BYTES + (0 if delayed else _LOOKED_AT_BYTES))
    return quick_ns + round(machine.memory_ns(moved)) + (2 - delayed) * machine.launch_ns
