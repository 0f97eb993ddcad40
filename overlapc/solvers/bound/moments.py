"""Rows of memory for `program`: what is certainly in memory at moments that every plan passes.

A moment is when an op on the backward's longest path is issued, so moments come in a fixed order
and lie between known windows. By then the op's ancestors have run, its descendants have not, and
slots decide some other ops; for each remaining op, how far it has run is a column between 0 and 1.

    done_n <= done_maker              nothing runs before what it reads
    done_n <= its value at the next moment
    what n does in earlier windows <= done_n <= its all - what it does in later windows
    bytes of a storage >= done_maker - done_reader   it is there once made, until it is read

The sum of those bytes, and of what the op itself touches, is at most the budget. It is never more
than a legal plan's ledger has at that moment, because it counts only what all orders have in
common.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING

from overlapc.solvers.bound.slots import Slots
from overlapc.solvers.constants import RUNGS

if TYPE_CHECKING:
    from overlapc.solvers.bound.program import IntegerProgram

Terms = dict[int, float]  # column -> factor
_ONE = -1  # stands for the constant of a sum
_DONE: Terms = {_ONE: 1.0}
_STRETCHES = 2 * RUNGS  # number of moments, unless every window has its own


class Moments:
    """Adds the rows of memory of a program's backward. `during` maps a node (an op, or an op's
    number plus the count of ops for its recompute) to its columns by window; if given, every window
    has moments, and early or late work has columns of its own."""

    def __init__(
        self,
        program: IntegerProgram,
        slots: Slots,
        lasting: frozenset[str],
        during: Mapping[int, Mapping[int, int]] | None,
    ) -> None:
        self.program, self.model, self.slots = program, program.model, slots
        self.lasting = lasting
        self.fine = during is not None
        self.during = during or {}
        trace = program.problem.trace
        self.trace, self.ops, self.count = trace, trace.ops, len(trace.ops)
        self.index = {op.name: i for i, op in enumerate(trace.ops)}
        self.outputs = {trace.value[name].storage for name in trace.outputs}
        self.again = [i for i in slots.again if self.ops[i].name in program.run]
        self._edges()
        self._leaves()
        self.held = {s: self._held(s) for s in program.keep}
        self.before: dict[int, Terms] = {}  # how far nodes had run at the last moment

    def add(self) -> None:
        for m in self._choose():
            self._moment(m)

    # ------------------------------------------------------------------ the graph

    def _edges(self) -> None:
        """Compute ancestors and descendants of backward ops as bits, and who makes and reads
        storages."""
        trace, program = self.trace, self.program
        self.place = {i: n for n, i in enumerate(self.slots.members)}
        forward = {trace.value[n].storage for op in trace.ops if op.is_forward for n in op.outputs}
        self.above = [0] * len(self.place)
        self.below = [0] * len(self.place)
        self.made: dict[str, int] = {}  # storage of the backward -> its maker
        self.readers: dict[str, list[int]] = defaultdict(list)  # storage -> backward ops
        self.rereaders: dict[str, list[int]] = defaultdict(list)  # storage -> ops run again
        self.makers: dict[int, set[int]] = {}  # backward op -> those of the backward it reads from
        self.values: dict[str, list[int]] = defaultdict(list)  # value of the forward -> readers
        seen_as: dict[str, str] = {}  # view that the backward makes -> value of the forward
        for i, n in self.place.items():
            op = self.ops[i]
            self.makers[i] = set()
            for name in op.inputs:
                value = trace.value[name]
                if not self.readers[value.storage] or self.readers[value.storage][-1] != i:
                    self.readers[value.storage].append(i)
                self.values[seen_as.get(name, name)].append(i)
                maker = self.index[value.producer] if value.producer else -1
                if maker in self.place:
                    self.makers[i].add(maker)
                    self.above[n] |= self.above[self.place[maker]] | 1 << self.place[maker]
            for name in op.outputs:
                storage = trace.value[name].storage
                for given in op.inputs:
                    if trace.value[given].storage == storage:
                        seen_as.setdefault(name, seen_as.get(given, given))
                if storage not in forward and storage not in trace.resident:
                    self.made.setdefault(storage, i)
        for i, n in reversed(self.place.items()):
            for maker in self.makers[i]:
                self.below[self.place[maker]] |= self.below[n] | 1 << n
        for i in self.again:
            for storage in program.read_by(self.ops[i]):
                self.rereaders[storage].append(i)

    def _leaves(self) -> None:
        """For each storage that may be kept, its values that are read other than to make a view."""
        trace, program = self.trace, self.program
        self.leaves: dict[str, set[str]] = defaultdict(set)
        for op in trace.ops:
            made = {trace.value[name].storage for name in op.outputs}
            for name in op.inputs:
                storage = trace.value[name].storage
                if storage not in program.keep or not program.needs.forward_made(name):
                    continue
                if not op.is_forward or made != {storage}:
                    self.leaves[storage].add(name)

    def _held(self, storage: str) -> Terms:
        """The column that says that a storage is held while it has readers: `keep`, unless several
        values of the storage are read. Then one value may be saved and another recomputed, as
        separate storages."""
        keep = {self.program.keep[storage]: 1.0}
        run = self._run_of(storage)
        if len(self.leaves[storage]) <= 1 or run is None:
            return keep
        return self._at_least(_minus(keep, {run: 1.0}))

    def _run_of(self, storage: str) -> int | None:
        return self.program.run.get(self.program.maker[storage].name)

    # ------------------------------------------------------------------ moments

    def _choose(self) -> list[int]:
        """Choose ops of the longest path: the heaviest of each stretch, or, if every window has
        moments, also the start and the wait of each."""
        path = [i for i in self.slots.path if i in self.place]
        if not self.fine:
            stretch = max(1, -(-len(path) // _STRETCHES))
            parts = [path[a : a + stretch] for a in range(0, len(path), stretch)]
            return [max(part, key=self._weight) for part in parts]
        chosen = {i for i in path if self.ops[i].role != "input_grad"}
        by_slot: dict[int, list[int]] = defaultdict(list)
        for i in path:
            by_slot[self.slots.first[i]].append(i)
        chosen |= {max(part, key=self._weight) for part in by_slot.values()}
        return [i for i in path if i in chosen]

    def _weight(self, m: int) -> int:
        """Bytes that are certainly there when the op runs: those that it touches, and those made
        and not yet read."""
        n = self.place[m]
        there = self._touched_bytes(m, self._touched(m))
        for storage, maker in self.made.items():
            if self.above[n] >> self.place[maker] & 1 and (
                storage in self.outputs or self._later(self.readers[storage], n)
            ):
                there += self.program.size[storage]
        return there

    def _later(self, readers: list[int], n: int) -> bool:
        return any(self.below[n] >> self.place[i] & 1 for i in readers)

    def _touched(self, m: int) -> set[str]:
        op = self.ops[m]
        touched = {self.trace.value[name].storage for name in (*op.inputs, *op.outputs)}
        return touched - self.trace.resident

    def _touched_bytes(self, m: int, touched: set[str]) -> int:
        cost = self.program.problem.cost(self.ops[m].name)
        return sum(self.program.size[s] for s in touched - self.lasting) + cost.workspace_bytes

    def _moment(self, m: int) -> None:
        """The row of one moment, and the rows of what has been done by then."""
        program = self.program
        n = self.place[m]
        done = self._done(m)
        self._order(m, done)
        self._windows(m, done)
        touched = self._touched(m)
        there = self._touched_bytes(m, touched)
        terms: Terms = {}

        def add(storage: str, amount: Terms) -> None:
            for column, factor in amount.items():
                share = factor * program.size[storage]
                terms[column] = terms.get(column, 0.0) + share

        for storage in program.keep:
            if storage in self.lasting or storage in touched:
                continue
            for amount in self._alive_of_forward(storage, n, done):
                add(storage, amount)
        for storage, maker in self.made.items():
            if storage not in touched and storage not in self.lasting and done.get(maker):
                add(storage, self._alive_of_backward(storage, done[maker], done))
        there += round(terms.pop(_ONE, 0.0))
        program.limit_at({c: f / program.bytes for c, f in terms.items()}, there)

    def _done(self, m: int) -> dict[int, Terms]:
        """How far each node has run. Backward nodes of which nothing is known are missing, unless
        every window has moments."""
        slots, slot, n = self.slots, self.slots.first[m], self.place[m]
        found: dict[int, Terms] = {}
        for i in self.again:
            low, high = slots.again[i]
            run = self.program.run[self.ops[i].name]
            if high < slot:
                found[i + self.count] = {run: 1.0}
            elif low > slot:
                found[i + self.count] = {}
            else:
                found[i + self.count] = done = {self.model.column(upper=1.0): 1.0}
                self._not_below(_minus({run: 1.0}, done))
        for i, k in self.place.items():
            if self.above[n] >> k & 1 or slots.last[i] < slot:
                found[i] = _DONE
            elif i == m or self.below[n] >> k & 1 or slots.first[i] > slot:
                found[i] = {}
            elif self.fine:
                found[i] = {self.model.column(upper=1.0): 1.0}
        for node, now in found.items():
            earlier = self.before.get(node)
            if earlier and earlier != now and earlier != _DONE and now != _DONE:
                self._not_below(_minus(now, earlier))
        self.before = {node: now for node, now in found.items() if now and now != _DONE}
        return found

    def _order(self, m: int, done: dict[int, Terms]) -> None:
        """Add rows: nothing runs before what it reads."""
        program, run = self.program, self.program.run
        for i in self.again:
            for storage in program.read_by(self.ops[i]):
                maker = self.index[program.maker[storage].name] + self.count
                self._after(done[i + self.count], storage, done[maker])
        for storage, column in program.keep.items():
            name = program.maker[storage].name
            if name not in run:
                continue
            again = done[self.index[name] + self.count]
            asked = [_DONE if i == m else done.get(i, {}) for i in self.readers.get(storage, ())]
            for now in [_DONE] if _DONE in asked else asked:
                if now and not (now == _DONE and again == {run[name]: 1.0}):
                    self._not_below(_minus({column: 1.0, **again}, now))
        if not self.fine:
            return
        for i in self.place:
            now = done[i]
            if now and now != _DONE:
                for maker_op in self.makers[i]:
                    if done[maker_op] != _DONE:
                        self._not_below(_minus(done[maker_op], now))

    def _after(self, now: Terms, storage: str, maker: Terms) -> None:
        run = self._run_of(storage)
        if now and not (maker == {run: 1.0} and set(now) <= set(self.program.run.values())):
            self._not_below(_minus({self.program.keep[storage]: 1.0, **maker}, now))

    def _windows(self, m: int, done: dict[int, Terms]) -> None:
        """Add rows: work in windows up to here has run, work in later windows has not."""
        slot = self.slots.first[m]
        for node, columns in self.during.items():
            now = done[node]
            if now == _DONE:
                continue
            early = {column: 1.0 for k, column in columns.items() if 2 * k + 1 < slot}
            late = {column: 1.0 for k, column in columns.items() if 2 * k + 1 > slot}
            run = self.program.run[self.ops[node - self.count].name] if node >= self.count else _ONE
            if early and now != {run: 1.0}:
                self._not_below(_minus(now, early))
            if late and now:
                self._not_below(_minus({run: 1.0}, now, late))

    def _alive_of_forward(self, storage: str, n: int, done: dict[int, Terms]) -> list[Terms]:
        """Sums that add up to what exists of a storage: its saved and its recomputed copy."""
        keep = {self.program.keep[storage]: 1.0}
        maker = self.program.maker[storage]
        again = done.get(self.index[maker.name] + self.count, {})
        leaves = self.leaves[storage]
        if again and len(maker.outputs) > 1:  # it may run again for another output
            again = self._at_least(_minus(again, keep))
        if self._later(self.readers.get(storage, []), n):
            sure = len(leaves) <= 1 or all(self._later(self.values[v], n) for v in leaves)
            return [keep if sure else self.held[storage], again]
        if again and len(leaves) > 1:
            again = self._at_least(_minus(again, keep))
        limits: list[Terms] = []
        for i in self.rereaders.get(storage, ()):
            run = self.program.run[self.ops[i].name]
            if (now := done[i + self.count]) != {run: 1.0}:
                limits.append(_minus({run: 1.0, _ONE: -1.0}, now))
        for i in self.readers.get(storage, ()):
            late = done.get(i)
            if late is not None and late != _DONE:
                limits.append(_minus({}, late))
        if not limits:
            return []
        return [
            self._at_least(*(_plus(a, b) for a in (self.held[storage], again) if a for b in limits))
        ]

    def _alive_of_backward(self, storage: str, made: Terms, done: dict[int, Terms]) -> Terms:
        if storage in self.outputs:
            return made
        readers = [done[i] for i in self.readers.get(storage, ()) if i in done]
        if {} in readers:
            return made
        limits = [_minus(made, now) for now in readers if now != _DONE]
        return self._at_least(*limits) if limits else {}

    # ------------------------------------------------------------------ sums

    def _at_least(self, *lows: Terms) -> Terms:
        """Add a column between 0 and 1 that is at least each of these sums."""
        column = self.model.column(upper=1.0)
        for low in lows:
            self._not_below(_minus({column: 1.0}, low))
        return {column: 1.0}

    def _not_below(self, terms: Terms) -> None:
        """Add a row: the sum is at least 0."""
        low = -terms.get(_ONE, 0.0)
        self.model.at_least({c: f for c, f in terms.items() if c != _ONE and f}, low)


def _plus(a: Terms, b: Terms) -> Terms:
    return {c: a.get(c, 0.0) + b.get(c, 0.0) for c in {**a, **b}}


def _minus(first: Terms, *others: Terms) -> Terms:
    found = dict(first)
    for terms in others:
        for column, factor in terms.items():
            found[column] = found.get(column, 0.0) - factor
    return found
