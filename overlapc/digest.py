"""`digest` identifies a trace: a plan finds its graph by it, and ranks compare traces by it."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from string import digits
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from overlapc.ir import Trace


def digest(trace: Trace) -> str:
    """Compute a text that changes whenever the trace's structure, shapes or order change.

    Ranks that do the same work have the same digest. So lanes count by their order of first use,
    since process groups have other names on other ranks. An op's inputs are sorted by name, since a
    rank may pass its own part of a tensor at another position. Inputs that nothing reads do not
    count: some ranks may lack them. A forward counts the same whether or not it runs ahead of
    its backward: a plan saves the same values for both.
    """
    lanes = {name: str(i) for i, name in enumerate(trace.lanes)}
    named = _as_if_alone(trace)
    h = hashlib.sha256()
    for op in trace.ops:
        lane = lanes.get(op.lane, op.lane)
        inputs = tuple(sorted(named.get(name, name) for name in op.inputs))
        piece = replace(op.piece, microbatch=trace.microbatch(op, recomputed=True))
        h.update(ascii(replace(op, lane=lane, piece=piece, inputs=inputs)).encode())
    for value in trace.values:
        if value.producer or value.name in named:
            names = (named.get(name, name) for name in (value.name, value.storage))
            h.update(ascii((*names, value.producer)).encode())
    outputs = tuple(named.get(name, name) for name in trace.outputs)
    h.update(ascii((tuple(named.values()), outputs)).encode())
    return h.hexdigest()[:16]


def _as_if_alone(trace: Trace) -> dict[str, str]:
    """Rename the inputs that are read as if the unread ones did not exist: `x_3` becomes `x_2` if
    nothing reads `x_1`."""
    read = {*trace.outputs, *(name for name, users in trace.users.items() if users)}
    free: dict[str, list[str]] = {}
    for name in reversed(trace.inputs):
        free.setdefault(name.rstrip(digits), []).append(name)
    return {name: free[name.rstrip(digits)].pop() for name in trace.inputs if name in read}
