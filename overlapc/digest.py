"""What identifies a trace: `digest`, by which a plan finds its graph, and ranks that they agree."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from string import digits
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from overlapc.ir import Trace


def digest(trace: Trace) -> str:
    """Compute what changes whenever a trace's structure, shapes or order do.

    Ranks that do the same work share it. So lanes count by their order of first use, since process
    groups have other names on other ranks, and inputs by name, since a rank may put its own part of
    something in another place than the others theirs. Inputs that nothing reads do not count: not
    all ranks may be given them. A forward that is ahead of its backward counts as if it were not: a
    plan saves the same values for both.
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
    """Give the inputs that are read the names they would have without the others: `x_3` is `x_2` if
    nothing reads `x_1`."""
    read = {*trace.outputs, *(name for name, users in trace.users.items() if users)}
    free: dict[str, list[str]] = {}
    for name in reversed(trace.inputs):
        free.setdefault(name.rstrip(digits), []).append(name)
    return {name: free[name.rstrip(digits)].pop() for name in trace.inputs if name in read}
