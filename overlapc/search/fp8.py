"""`in_fp8` prices the products of matrices of a model's layers as they run in FP8.

As Transformer Engine runs linear layers with a scale for each tensor that follows the tensor itself
(Megatron's `--fp8-recipe tensorwise`): all three products of a layer take FP8 operands and make
half precision. An operand becomes FP8 once: activations and weights in the forward, gradients in
the backward. Attention, norms, the router, the loss and its scores stay as they are. What is kept
for the backward is counted in half precision, which is more than a run keeps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from overlapc.ir import Profile, Trace
from overlapc.profiler.hardware import FP8, Hardware
from overlapc.profiler.work import Work, work_ns

# Of an element that becomes FP8: read for the largest value, read again and written twice, in rows
# and in columns, since products take both operands with the dimension last that they sum over.
_CAST_BYTES = 2 + 2 + 1 + 1
_CAST_KERNELS = 2
_MULTIPLE = 16  # of which both dimensions of an operand must be
# Operands that become FP8 for a product of the forward, of an input's gradient, of a weight's.
_CAST = {"F": 2, "I": 1, "W": 0}


def in_fp8(
    trace: Trace, profile: Profile, works: Mapping[str, Work], machine: Hardware, experts: int
) -> Profile:
    """The profile with the products of layers in FP8; `experts` is the width of the router."""
    costs = dict(profile.costs)
    for op in trace.ops:
        work, cost = works[op.name], costs[op.name]
        if runs_in_fp8(work, experts) and cost.source == "estimated":
            costs[op.name] = replace(cost, compute_ns=fp8_ns(machine, work, op.piece.letter))
    return replace(profile, costs=costs)


def runs_in_fp8(work: Work, experts: int) -> bool:
    """Is it a product of a layer, with dimensions that FP8's kernels take?"""
    product = work.product
    if work.kind != "matmul" or product is None or work.dtype not in ("bfloat16", "float16"):
        return False
    sides = product.m, product.n, product.k
    return not any(side % _MULTIPLE for side in sides) and experts not in sides


def fp8_ns(machine: Hardware, work: Work, letter: str) -> int:
    """How long the product takes, with what makes its operands FP8."""
    product = work.product
    assert product is not None
    left = product.batch * product.m * product.k
    right = product.batch * product.k * product.n
    less = min(work.moved_bytes, left + right)  # operands are a byte an element, not two
    quick_ns = work_ns(machine, replace(work, dtype=FP8, moved_bytes=work.moved_bytes - less))
    count = _CAST[letter]
    cast = (0, left, left + right)[count] * _CAST_BYTES
    launched_ns = count * _CAST_KERNELS * machine.launch_ns
    return quick_ns + round(machine.memory_ns(cast)) + launched_ns
