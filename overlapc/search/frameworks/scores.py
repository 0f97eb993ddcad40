"""`kept_by_callers`: attention op by op keeps its scores longer than its ops read them.

In Megatron-LM v2.5 (`ParallelAttention.forward`) and in Aleph Alpha's Scaling
(`multi_head_attention`) a local name holds the scores until their values are mixed: while their
softmax is made, and while it is dropped. Where Scaling's softmax runs in float32
(`MaskedSoftmaxTorch`), they are masked in place, and held until the softmax is in half precision:
a score then takes 2 + 4 + 4 + 2 bytes.
"""

from __future__ import annotations

from dataclasses import replace

from overlapc.core.ir import Op, Trace
from overlapc.search.captures import Module


def kept_by_callers(blocks: Module) -> Module:
    """The blocks, whose scores live as long as names for them: the ops that end these read them,
    too. No op takes longer for it."""
    trace = blocks.described.trace
    read: dict[str, str] = {}  # op -> what it reads besides
    moved: dict[str, str] = {}  # storage -> the one in whose place it is
    for softmax in trace.ops:
        if not (softmax.is_forward and softmax.signature.startswith("aten._softmax.")):
            continue
        scores = _before(trace, softmax, "aten.bmm.")
        mixed = _behind(trace, softmax, "aten.bmm.")
        if scores is None or mixed is None:
            continue
        read[mixed.name] = scores.outputs[0]
        masked = _before(trace, softmax, "aten.masked_fill.")
        half = _behind(trace, softmax, "aten._to_copy.")
        if masked is not None and half is not None:
            given, made = masked.inputs[0], masked.outputs[0]
            moved[trace.value[made].storage] = trace.value[given].storage
            read[half.name] = made
    ops = tuple(
        replace(op, inputs=(*op.inputs, read[op.name])) if op.name in read else op
        for op in trace.ops
    )
    values = tuple(replace(v, storage=moved.get(v.storage, v.storage)) for v in trace.values)
    changed = replace(trace, ops=ops, values=values)
    return replace(blocks, described=replace(blocks.described, trace=changed))


def _before(trace: Trace, op: Op, kind: str) -> Op | None:
    """The op of that kind whose result the op reads, through casts, masks and views."""
    while op.inputs and (producer := trace.value[op.inputs[0]].producer):
        op = trace.op[producer]
        if op.signature.startswith(kind):
            return op
        if op.signature.startswith("aten.bmm."):
            break
    return None


def _behind(trace: Trace, op: Op, kind: str) -> Op | None:
    """The first op of that kind that reads the op's result in the forward, through casts, dropout
    and views."""
    waiting = list(trace.users[op.outputs[0]])
    for op in waiting:  # which grows
        if op.is_forward and op.signature.startswith(kind):
            return op
        if op.is_forward and not op.signature.startswith("aten.bmm."):
            waiting += trace.users[op.outputs[0]]
    return None
