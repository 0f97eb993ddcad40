"""`LinkSpec` says how long collectives take on one kind of link."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from overlapc.core.ir import Slowdown
from overlapc.emulate.model import Kind, Link

Table = tuple[tuple[float, float], ...]
Measured = tuple[int, int, float]

# What part of an all-reduce's time a collective takes that a ring makes it of.
_RINGS: Mapping[str, float] = {"all_reduce": 1.0, "all_gather": 0.5, "reduce_scatter": 0.5}


@dataclass(frozen=True)
class LinkSpec:
    """One kind of link, per rank and direction.

    A kind in `busbw` (full bytes -> bus bandwidth, ascending) is read from that table: the wire
    volume of the ring algorithm over the bus bandwidth. Any other kind takes `alpha_ns` plus
    the wire volume over `bytes_per_s` times its `efficiency`. Before all of these come times that
    were `measured`, by number of ranks and full bytes: of an all-reduce, and so of what a ring
    makes it of, a reduce-scatter and an all-gather that take half as long each.
    """

    alpha_ns: int
    bytes_per_s: float
    efficiency: Mapping[str, float]
    busbw: Mapping[str, Table]
    slowdown: Slowdown
    measured: tuple[Measured, ...] = ()  # of all-reduces: ranks, full bytes, nanoseconds

    def collective_ns(self, kind: Kind, size_bytes: int, ranks: int, share: float = 1.0) -> int:
        """How long a collective takes; `share` is this rank's part of `bytes_per_s`, in tables
        too."""
        if ranks <= 1 or size_bytes <= 0:
            return 0

        if self.measured and kind in _RINGS and share == 1.0:
            return round(self._measured_ns(size_bytes, ranks) * _RINGS[kind])

        def wire_ns(size: float, bytes_per_s: float) -> float:
            return Link.wire_bytes(kind, size, ranks) / (bytes_per_s * share) * 1e9  # type: ignore[arg-type]

        table = self.busbw.get(kind)
        if table is None:
            rate = self.bytes_per_s * self.efficiency.get(kind, 1.0)
            return round(self.alpha_ns + wire_ns(size_bytes, rate))
        smallest, rate = table[0]
        if size_bytes >= smallest:
            return round(wire_ns(size_bytes, interpolate(table, size_bytes)))
        first = wire_ns(smallest, rate)  # below the table: a line down to the latency
        alpha = min(float(self.alpha_ns), first)
        return round(alpha + (first - alpha) * size_bytes / smallest)

    @cached_property
    def _times(self) -> Mapping[int, list[tuple[int, float]]]:
        times: dict[int, list[tuple[int, float]]] = {}
        for ranks, size, ns in self.measured:
            times.setdefault(ranks, []).append((size, ns))
        return times

    def _measured_ns(self, size: int, ranks: int) -> float:
        """Of an all-reduce: lines between the sizes that were measured, and on behind them; of more
        ranks than were, as their wire volumes are."""
        nearest = min((n for n in self._times if n >= ranks), default=max(self._times))
        times = self._times[nearest]
        at = min(max(1, bisect_left(times, (size, 0.0))), len(times) - 1)
        (left, low), (right, high) = times[at - 1 : at + 1]
        found = low + (high - low) * (size - left) / (right - left)
        if size < left:  # a line down to the latency
            alpha = min(float(self.alpha_ns), low)
            found = alpha + (low - alpha) * size / left
        if ranks > nearest:
            found *= (1 - 1 / ranks) / (1 - 1 / nearest)
        return found


def interpolate(table: Table, at: float) -> float:
    """Interpolate linearly in the logarithm of the key; flat beyond both ends."""
    if at <= table[0][0]:
        return table[0][1]
    for (left, low), (right, high) in itertools.pairwise(table):
        if at <= right:
            part = math.log(at / left) / math.log(right / left)
            return low + (high - low) * part
    return table[-1][1]
