"""`in_ranges` turns the problem of a batch into one of which only ranges of the graph are cut into
pieces, and the rest is whole: what others do where `merge.in_slices` cuts all of it. Valid."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from overlapc.core.errors import OptionError
from overlapc.core.ir import COMPUTE, Cost, Op, Problem, Role, Value
from overlapc.core.merge import at
from overlapc.core.valid import validated


@dataclass(frozen=True)
class Range:
    """The ops of a trace from `first` up to `end`, in so many pieces."""

    first: int
    end: int
    pieces: int


@dataclass(frozen=True)
class Node:
    """An op of a problem whose ranges are cut: that of the `place`-th op of the whole trace, of
    one piece; of a whole op, and of what joins pieces, the piece is -1."""

    op: Op
    place: int
    piece: int


@dataclass(frozen=True)
class Cut:
    """A problem whose ranges are cut, and its ops."""

    problem: Problem
    nodes: Sequence[Node]

    @cached_property
    def apart(self) -> frozenset[int]:
        """The places of ops that are in pieces."""
        return frozenset(node.place for node in self.nodes if node.piece >= 0)

    def between(self, first: int, end: int) -> list[Node]:
        """The ops of these places."""
        return [node for node in self.nodes if first <= node.place < end]


def in_ranges(
    problem: Problem,
    slices: Mapping[int, Problem],
    ranges: Iterable[Range],
    copy_ns_per_byte: float = 0,
) -> Cut:
    """Cut each of the ranges into its pieces. `slices` has, for each number of pieces, the problem
    of one of them. What does not get smaller with the batch, and weight gradients, stay whole.

    What pieces of a range read from before it is split for them, and what is read behind it is
    joined from them; each is a copy of the whole, at so many nanoseconds for each byte. Without a
    price pieces read parts of what is whole."""
    cutting = _Cutting(problem, slices, ranges, copy_ns_per_byte)
    for place, op in enumerate(problem.trace.ops):
        cutting.take(op, place)
    return cutting.done()


class _Cutting:
    """The ops and values so far of a problem whose ranges are cut."""

    def __init__(
        self,
        problem: Problem,
        slices: Mapping[int, Problem],
        ranges: Iterable[Range],
        copy_ns_per_byte: float,
    ) -> None:
        self.problem, self.slices, self.copy_ns_per_byte = problem, slices, copy_ns_per_byte
        trace = problem.trace
        self.range_of = {place: each for each in ranges for place in range(each.first, each.end)}
        self.place_of = {op.name: place for place, op in enumerate(trace.ops)}
        self.moving = {*trace.of_kind("batch", "gradient")}  # what depends on the batch
        self.pieces = self.cuttable()
        self.roots: dict[str, str] = {}  # storage -> the op that makes it
        for op in trace.ops:
            for name in op.outputs:
                self.roots.setdefault(trace.value[name].storage, op.name)
        self.values = dict(trace.value)
        self.joined: dict[str, list[str]] = {}  # storage -> what was joined on it
        self.split: dict[tuple[str, int], str] = {}  # storage, first place -> its parts there
        self.nodes: list[Node] = []
        self.costs: dict[str, Cost] = {}

    def cuttable(self) -> dict[int, int]:
        """The places of ops that are cut -> into how many pieces."""
        trace, moving = self.problem.trace, self.moving
        found: dict[int, int] = {}
        for place, op in enumerate(trace.ops):
            if moving.isdisjoint(op.inputs):
                continue
            moving.update(op.outputs)
            count = self.range_of[place].pieces if place in self.range_of else 1
            if count == 1 or op.piece.letter == "W" or not op.outputs:
                continue
            small = self.slices[count].trace.value
            if not small.keys() >= {*op.outputs}:
                raise OptionError(
                    f"{op.name} is in the trace of the batch, not in that of one of {count} "
                    "pieces; expected the same model"
                )
            if all(small[v].bytes * count == trace.value[v].bytes for v in op.outputs):
                found[place] = count
        flights: dict[str, list[int]] = {}  # start -> its place and those of its waits
        for wait, start in trace.start_of.items():
            flights.setdefault(start, [self.place_of[start]]).append(self.place_of[wait])
        for places in flights.values():
            there = {id(self.range_of.get(place)) for place in places}
            if len(there) > 1 or any(place not in found for place in places):
                for place in places:
                    found.pop(place, None)
        return found

    def beside(self, name: str, place: int) -> bool:
        """Is the op of that name cut into the same pieces as the one at that place?"""
        there = self.place_of.get(name, -1)
        return there in self.pieces and self.range_of[there] is self.range_of[place]

    def take(self, op: Op, place: int) -> None:
        count = self.pieces.get(place, 1)
        if count == 1:
            self.add(op, place, -1, self.problem.cost(op.name))
            return
        trace = self.problem.trace
        makers = {v: trace.value[v].producer for v in op.inputs}
        whole = [v for v in op.inputs if not self.beside(makers[v], place)]
        parts = {v: self.parts_of(v, op, place) for v in whole}
        for k in range(count):
            given = [parts.get(v) or at(v, k) for v in op.inputs]
            made = tuple(self.piece_of(v, place, k).name for v in op.outputs)
            copy = replace(op, name=at(op.name, k), inputs=tuple(given), outputs=made, random=False)
            self.add(copy, place, k, self.slices[count].cost(op.name))
        for v in op.outputs:
            users = trace.users[v]
            if v in trace.outputs or not all(self.beside(user.name, place) for user in users):
                self.join(op, v, place, count)
            else:
                del self.values[v]

    def add(self, op: Op, place: int, piece: int, cost: Cost) -> None:
        self.nodes.append(Node(op, place, piece))
        self.costs[op.name] = cost

    def piece_of(self, name: str, place: int, k: int) -> Value:
        """The k-th piece of a value, made by the op at that place."""
        whole, small = self.problem.trace.value[name], self.slices[self.pieces[place]]
        storage, size = whole.storage, whole.bytes  # a view of what is whole
        if self.beside(self.roots.get(storage, ""), place):
            storage, size = at(storage, k), small.trace.value[name].bytes
        found = Value(at(name, k), size, storage, at(whole.producer, k))
        self.values[found.name] = found
        return found

    def parts_of(self, name: str, op: Op, place: int) -> str:
        """A copy of a value of the batch for the pieces of the range of that place to read."""
        if not self.copy_ns_per_byte or name not in self.moving:
            return name
        value = self.values[name]
        key = value.storage, self.range_of[place].first
        if key not in self.split:
            made = self.split[key] = f"{name}_parts_{key[1]}"
            role: Role = "forward" if op.is_forward else "input_grad"
            split = Op(f"{made}_split", role, COMPUTE, op.piece, (name,), (made,), "split")
            self.add(split, place, -1, self.copying(value))
            self.values[made] = Value(made, value.bytes, made, split.name)
        return self.split[key]

    def copying(self, value: Value) -> Cost:
        return Cost(round(value.bytes * self.copy_ns_per_byte))

    def join(self, op: Op, name: str, place: int, count: int) -> None:
        """Make one value of its pieces, on the storage of what was joined there before."""
        before = self.joined.setdefault(self.values[name].storage, [])
        given = (*(at(name, k) for k in range(count)), *before)
        before.append(name)
        role: Role = "forward" if op.is_forward else "input_grad"
        join = Op(f"{name}_joined", role, COMPUTE, op.piece, given, (name,), "join")
        self.add(join, place, -1, Cost() if given[count:] else self.copying(self.values[name]))
        self.values[name] = replace(self.values[name], producer=join.name)

    def done(self) -> Cut:
        ops = tuple(node.op for node in self.nodes)
        trace = replace(self.problem.trace, ops=ops, values=tuple(self.values.values()))
        profile = replace(self.problem.profile, costs=self.costs)
        found = replace(self.problem, trace=trace, profile=profile)
        return Cut(validated(found), self.nodes)
