"""Find the repeated blocks of a forward, and its layers.

Ops of equal signatures, one *period* apart, make a run of equal blocks. Signatures do not tell at
which op a block begins; dataflow does: a block begins where the fewest storages cross from one
block to the next. So a first block whose input is the graph's own input is found like any other.

A block may hold several *layers*: if every other layer has experts, a block is two layers. All
layers begin with the same residual branch; layers that do not repeat are found by that branch.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise, takewhile
from weakref import WeakKeyDictionary

from overlapc.core.ir import Trace
from overlapc.solvers.constants import FEW, RUNGS

_SYMBOL = re.compile(r"\bd\d+\b")


@dataclass(frozen=True)
class Repetition:
    """Ops `first + b * length + i` of a trace are alike for every block b < `count`.

    `handed_on` has, for each block but the last, the storages that it makes and the next block
    reads.
    """

    first: int
    length: int
    count: int
    handed_on: tuple[frozenset[str], ...]

    @property
    def end(self) -> int:
        return self.first + self.length * self.count

    def grouped(self, blocks: int) -> Repetition:
        """The repetition of groups of so many blocks; leftover blocks come before the first
        group."""
        over = self.count % blocks
        first = self.first + over * self.length
        handed_on = self.handed_on[over + blocks - 1 :: blocks]
        return Repetition(first, self.length * blocks, self.count // blocks, handed_on)


def repetition(trace: Trace) -> Repetition | None:
    """The repeated blocks of the forward, if anything repeats. Computed once for a trace."""
    try:
        return _known[trace]
    except KeyError:
        found = _known[trace] = find_repetition(trace)
        return found


_known: WeakKeyDictionary[Trace, Repetition | None] = WeakKeyDictionary()


def find_repetition(trace: Trace) -> Repetition | None:
    """Compute what `repetition` remembers."""
    flow = _Flow(trace)
    return _largest(flow, range(len(flow.ops)), len(flow.ops) // FEW)


def layers(trace: Trace) -> list[range]:
    """The forward ops of each layer, in order; all of the forward as one if nothing repeats."""
    flow = _Flow(trace)
    whole = range(len(flow.ops))
    return _layers(flow, repetition(trace), whole) or [whole]


def made_inside(trace: Trace, spans: Iterable[range]) -> set[str]:
    """Storages that one of these spans of the forward makes and that the forward does not read
    after the span: they need not be kept if each span is recomputed as a whole."""
    flow = _Flow(trace)
    return {
        storage
        for span in spans
        for op in flow.ops[span.start : span.stop]
        for storage in flow.storages(op.outputs)
        if flow.maker.get(storage, -1) >= span.start and flow.last_read(storage) < span.stop
    }


class _Flow:
    """The forward's ops by number, and the storages that they make and read."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.ops = list(takewhile(lambda op: op.is_forward, trace.ops))
        # Symbols of unknown sizes are numbered through a trace: d7 counts as d0.
        self.signatures = [_SYMBOL.sub("d", op.signature) for op in self.ops]
        # storage, unless it is an input's -> the op that allocates it
        self.maker: dict[str, int] = {}
        self.reads: dict[str, list[int]] = {}
        for i, op in enumerate(self.ops):
            for storage in self.storages(op.inputs):
                self.reads.setdefault(storage, []).append(i)
            for storage in self.storages(op.outputs) - trace.resident:
                self.maker.setdefault(storage, i)

    def storages(self, names: Iterable[str]) -> set[str]:
        return {self.trace.value[name].storage for name in names}

    def crossing(self, at: int, period: int) -> frozenset[str]:
        """Storages that the period before an op makes and the period from this op on reads."""
        recent = (s for op in self.ops[max(0, at - period) : at] for s in self.storages(op.outputs))
        return frozenset(
            storage
            for storage in recent
            if storage in self.maker
            and self.maker[storage] >= at - period
            and self._next_read(storage, at) < at + period
        )

    def crossings(self, period: int) -> list[int]:
        """How many storages cross at each op."""
        change = [0] * (len(self.ops) + 2)
        for storage, maker in self.maker.items():
            before = maker
            for read in self.reads.get(storage, ()):
                begin = max(before, read - period) + 1
                end = min(read, maker + period)
                if begin <= end:
                    change[begin] += 1
                    change[end + 1] -= 1
                before = read
        return list(_sums(change))

    def is_cut(self, at: int, period: int) -> bool:
        """Does the op before this one make something that crosses here?"""
        made = self.storages(self.ops[at - 1].outputs) if at else set()
        return any(
            self.maker.get(s) == at - 1 and self._next_read(s, at) < at + period for s in made
        )

    def last_read(self, storage: str) -> int:
        return max(self.reads.get(storage, ()), default=0)

    def _next_read(self, storage: str, at: int) -> int:
        reads = self.reads.get(storage, [])
        following = bisect_left(reads, at)
        return reads[following] if following < len(reads) else len(self.ops) + len(self.ops)


def _sums(changes: Iterable[int]) -> Iterator[int]:
    total = 0
    for change in changes:
        total += change
        yield total


@dataclass(frozen=True)
class _Repeat:
    """A run of ops [first, end): each op equals the op one period before and the op one period
    behind it, where these are in the run."""

    first: int
    end: int
    period: int

    @property
    def covers(self) -> int:
        return (self.end - self.first) // self.period * self.period


def _largest(flow: _Flow, where: range, least: int) -> Repetition | None:
    """The repetition that covers the most ops of a part of the forward, and at least `least`."""
    runs = _runs(flow.signatures[where.start : where.stop], where.start)
    for run in sorted(runs, key=lambda run: (-run.covers, run.period)):
        if run.covers < least:
            break
        if (first := _border(flow, run)) is not None:
            count = (run.end - first) // run.period
            ends = range(first + run.period, first + run.period * count, run.period)
            handed_on = tuple(flow.crossing(end, run.period) for end in ends)
            return Repetition(first, run.period, count, handed_on)
    return None


def _runs(signatures: list[str], low: int) -> Iterator[_Repeat]:
    last: dict[str, int] = {}
    distances: Counter[int] = Counter()
    for i, signature in enumerate(signatures):
        if signature in last:
            distances[i - last[signature]] += 1
        last[signature] = i
    for period, _ in distances.most_common(2 * RUNGS):
        length = 0
        alike = [a == b for a, b in zip(signatures, signatures[period:], strict=False)]
        for i, same in enumerate([*alike, False]):
            if same:
                length += 1
                continue
            if length >= period:
                yield _Repeat(low + i - length, low + i + period, period)
            length = 0


def _border(flow: _Flow, run: _Repeat) -> int | None:
    """The op of a run at which a block begins; None if no block passes anything to the next."""
    crossings = flow.crossings(run.period)
    options = []
    for first in range(run.first, min(run.first + run.period, run.end - 2 * run.period + 1)):
        if crossing := crossings[first + run.period]:
            count = (run.end - first) // run.period
            is_cut = flow.is_cut(first + run.period, run.period)
            options.append(((crossing, -count, not is_cut), first))
    if not options:
        return None
    best = min(options)[0]
    firsts = [first for key, first in options if key == best]
    over = run.end - firsts[-1] + best[1] * run.period
    # One end of a run may reach far beyond the blocks: count blocks from the end that fits.
    return firsts[0] if firsts[0] - run.first <= over else firsts[-1]


def _layers(flow: _Flow, repeated: Repetition | None, where: range) -> list[range]:
    """The layers in a part of the forward: the repeated ones, and others beside them."""
    if repeated is None:
        return []
    found = _alike(flow, repeated, where)
    shortest = min(len(layer) for layer in found) // 2
    borders = [where.start, *(end for layer in found for end in (layer.start, layer.stop))]
    for gap in (
        range(*pair) for pair in zip(borders[::2], [*borders[1::2], where.stop], strict=True)
    ):
        other = _largest(flow, gap, 2 * shortest)
        if other is not None and other.length >= shortest:
            found = [*found, *_layers(flow, other, gap)]
    return sorted(found, key=lambda layer: layer.start)


def _alike(flow: _Flow, repeated: Repetition, where: range) -> list[range]:
    """The layers of repeated blocks, and others in this part of the forward that begin alike."""
    period, second = repeated.length, repeated.first + repeated.length
    handed_on = repeated.handed_on[0]
    crossings = flow.crossings(period)
    cuts = [
        at
        for at in range(where.start, where.stop)
        if crossings[at] <= len(handed_on) and flow.is_cut(at, period)
    ]
    inner = [cut for cut in cuts if second < cut < second + period]
    branch = flow.ops[second : inner[0]] if inner else []
    if not branch or handed_on.isdisjoint(flow.storages(branch[-1].inputs)):
        return [range(at, at + period) for at in range(repeated.first, repeated.end, period)]
    # The branch's last op adds to the layer's input. A layer begins at every such branch.
    begins, length = flow.signatures[second : inner[0]], len(branch)
    firsts = [
        at
        for at in range(where.start, where.stop - length + 1)
        if flow.signatures[at] == begins[0] and flow.signatures[at : at + length] == begins
    ]
    inside = [at for at in firsts if second <= at < second + period]
    branches = max(
        sum(first <= cut < behind for cut in {second, *inner})
        for first, behind in pairwise([*inside, second + period])
    )
    found = []
    for first, behind in pairwise([*firsts, where.stop]):
        following = cuts[bisect_left(cuts, first + length) :]
        found.append(range(first, min([behind, *following[branches - 1 : branches]])))
    return found
