"""Where a trace repeats itself, by signatures and dataflow.

A *cut* is a place in the forward where a single storage carries everything the rest needs.
Between cuts lie segments; the repeated blocks are the longest run of segments that repeats with
some period (attention and MLP segments repeat with period two).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from weakref import WeakKeyDictionary

from overlapc.ir import Trace


def cuts(trace: Trace) -> list[tuple[int, str]]:
    """(index of the op behind the cut, the storage that crosses it), in order.

    Storages that cross most of the forward (masks, rotary tables) are common to all blocks and
    do not count.
    """
    forward = [op for op in trace.ops if op.is_forward]
    born: dict[str, int] = {}
    last: dict[str, int] = {}
    for i, op in enumerate(forward):
        for name in op.inputs:
            last[trace.value[name].storage] = i
        for name in op.outputs:
            born.setdefault(trace.value[name].storage, i)
            last.setdefault(trace.value[name].storage, i)
    common = {
        s for s in born if last[s] - born[s] > max(len(forward) // 2, 16) and len(forward) > 64
    }
    ends: dict[int, list[str]] = {}
    for storage, i in last.items():
        ends.setdefault(i, []).append(storage)
    live: set[str] = set()
    found: list[tuple[int, str]] = []
    for i, op in enumerate(forward):
        if len(live) == 1 and op.role == "forward":
            (storage,) = live
            if not found or found[-1][1] != storage:
                found.append((i, storage))
        for name in op.outputs:
            value = trace.value[name]
            if value.storage not in common and value.storage not in trace.resident and value.bytes:
                live.add(value.storage)
        for storage in ends.get(i, ()):
            live.discard(storage)
    return found


@dataclass(frozen=True)
class Repetition:
    """Ops `first + b * length + i` of a trace are alike for every block b < `count`.

    `enters` are the storages that the blocks hand on: the first block's input, then outputs.
    """

    first: int
    length: int
    count: int
    enters: tuple[str, ...]

    @property
    def end(self) -> int:
        return self.first + self.length * self.count

    def grouped(self, blocks: int) -> Repetition:
        """So many blocks taken as one; those left over come before the first."""
        over = self.count % blocks
        first = self.first + over * self.length
        enters = self.enters[over::blocks]
        return Repetition(first, self.length * blocks, self.count // blocks, enters)


def repetition(trace: Trace) -> Repetition | None:
    """The repeated blocks of the forward, if anything repeats. Found once for a trace."""
    try:
        return _known[trace]
    except KeyError:
        found = _known[trace] = find_repetition(trace)
        return found


_known: WeakKeyDictionary[Trace, Repetition | None] = WeakKeyDictionary()


def find_repetition(trace: Trace) -> Repetition | None:
    """As `repetition`, but found anew."""
    places = cuts(trace)
    ends = [i for i, _ in places] + [sum(op.is_forward for op in trace.ops)]
    segments = [tuple(op.signature for op in trace.ops[a:b]) for a, b in pairwise(ends)]
    best = (0, 0, 1)  # covered ops, first segment, period
    for period in range(1, max(2, len(segments) // 2 + 1)):
        run = 0
        for i in range(len(segments) - period - 1, -1, -1):
            run = run + 1 if segments[i] == segments[i + period] else 0
            covered = (run // period + 1) * period if run >= period else 0
            ops = ends[i + covered] - ends[i] if covered else 0
            if ops > best[0]:
                best = (ops, i, period)
    covered_ops, first, period = best
    if not covered_ops:
        return None
    length = ends[first + period] - ends[first]
    count = covered_ops // length
    enters = tuple(places[n][1] for n in range(first, first + count * period, period))
    if first + count * period < len(places):
        enters += (places[first + count * period][1],)
    return Repetition(ends[first], length, count, enters)


def block_borders(trace: Trace) -> tuple[int, int, tuple[str, ...]]:
    """First and last op index of the repeated part of the forward, and the storages that enter
    its blocks. Without repetition the whole forward is one block with no border."""
    found = repetition(trace)
    if found is None:
        return 0, sum(op.is_forward for op in trace.ops), ()
    return found.first, found.end, found.enters
