"""What others would run of a batch in pieces: only ranges of the graph are cut (`ranges.py`).

    program     Lancet's: ranges of the forward and the number of their pieces by dynamic program,
                weight gradients into windows of the backward, which stays whole
    experts     Tutel's and FasterMoE's: from all-to-all to all-to-all, forward and backward

A range ends when all its pieces have. What its pieces read is split for them before, and what is
read behind it, in the backward too, is joined from them, at a price for each byte: Lancet's code
puts a split and a concatenation there, which copy, and counts what they were measured to take.
Costs of pieces are those of a smaller batch's trace, whose ops have the same names. Neither knows
of memory, so their plans save everything and may take more than the budget.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from benchmarks.papers.ranges import Cut, Node, Range, in_ranges
from overlapc.core.check import check
from overlapc.core.ir import Plan, Problem, Trace
from overlapc.core.simulate import step_ns
from overlapc.solvers.field import baselines
from overlapc.solvers.order.work import NEVER

GROUPS = 5  # that Lancet makes of what lies between two MoE layers; a range may be as long as both
_TURNS = ("on", "first", "level")  # a piece until it waits; the first piece; the first op


def took_ns(cut: Cut, order: tuple[str, ...]) -> int:
    """What these issues take, begun with idle lanes."""
    return step_ns(cut.problem, Plan(cut.problem.trace.digest, "", (), order))


def ordered(cut: Cut, first: int, end: int) -> tuple[str, ...]:
    """The fastest order of the ops between these places, by turns."""
    nodes = cut.between(first, end)
    if all(node.piece < 0 for node in nodes):
        return tuple(node.op.name for node in nodes)
    orders = [_by_turns(cut.problem, nodes, how) for how in _TURNS]
    return min(orders, key=lambda order: took_ns(cut, order))


def _by_turns(problem: Problem, nodes: Sequence[Node], how: str) -> tuple[str, ...]:
    """An order of these ops: what is whole as soon as it can, pieces by turns."""
    trace, number = problem.trace, {node.op.name: i for i, node in enumerate(nodes)}
    after: list[list[int]] = [[] for _ in nodes]
    missing = [0] * len(nodes)
    for i, node in enumerate(nodes):
        makers = {trace.value[name].producer for name in node.op.inputs}
        for maker in makers & number.keys():
            after[number[maker]].append(i)
            missing[i] += 1
    ready = [i for i, count in enumerate(missing) if not count]
    ends: dict[str, int] = {}  # start -> when its collective does
    lanes: dict[str, int] = {}
    now = current = 0
    order: list[str] = []

    def due(i: int) -> int:
        op = nodes[i].op
        return ends.get(trace.start_of[op.name], 0) if op.role == "wait" else 0

    def rank(i: int) -> tuple[int, int]:
        node = nodes[i]
        if node.op.piece.letter == "W":
            return NEVER, i
        if node.piece < 0 or how == "level":
            return -1, i
        return (node.piece - current) % NEVER if how == "on" else node.piece, i

    while ready:
        able = [i for i in ready if due(i) <= now]
        if not able:
            now = min(due(i) for i in ready)
            continue
        i = min(able, key=rank)
        ready.remove(i)
        node, cost = nodes[i], problem.cost(nodes[i].op.name)
        current = node.piece if node.piece >= 0 else current
        now += cost.compute_ns
        if node.op.role == "start":
            lanes[node.op.lane] = max(lanes.get(node.op.lane, 0), now) + cost.comm_ns
            ends[node.op.name] = lanes[node.op.lane]
        order.append(node.op.name)
        for user in after[i]:
            missing[user] -= 1
            if not missing[user]:
                ready.append(user)
    return tuple(order)


# --------------------------------------------------------------------------- Lancet


def program(
    problem: Problem, slices: Mapping[int, Problem], copy_ns_per_byte: float = 0
) -> tuple[Problem, Plan]:
    """Lancet's: `T(n) = min over i of T(i) + min over k of P(i, n, k)`, in groups of ops."""
    borders = groups(problem)
    ranges = best_ranges(problem, slices, borders, 2 * (1 + GROUPS), copy_ns_per_byte)
    cut = in_ranges(problem, slices, ranges, copy_ns_per_byte)
    plan = baselines.lancet(replace(problem, budget_bytes=None))
    back = plan.order[borders[-1] :]
    order = tuple(text for each in ranges for text in ordered(cut, each.first, each.end))
    return cut.problem, _plan(cut.problem, plan, order + back, "lancet-program")


def groups(problem: Problem) -> list[int]:
    """Borders of groups of the forward, 0 and its end among them: each collective is one, and what
    lies between two is up to `GROUPS` that take alike."""
    trace = problem.trace
    end = sum(op.is_forward for op in trace.ops)
    place_of = {op.name: place for place, op in enumerate(trace.ops[:end])}
    ends: dict[str, int] = {}  # start -> its last wait
    for wait, start in trace.start_of.items():
        if start in place_of:
            ends[start] = max(ends.get(start, 0), place_of[wait])
    flights = [range(place_of[start], wait + 1) for start, wait in ends.items()]
    closed = {place for flight in flights for place in flight[1:]}
    fixed = {0, end, *(edge for flight in flights for edge in (flight.start, flight.stop))}
    found = set(fixed)
    starts = {flight.start for flight in flights}
    for first, last in pairwise(sorted(fixed - closed)):
        took = [problem.cost(op.name).compute_ns for op in trace.ops[first:last]]
        total = 0 if first in starts else sum(took)
        before = 0
        for place, ns in enumerate(took, first):
            if total and before * GROUPS // total < (before + ns) * GROUPS // total:
                found.add(place + 1)
            before += ns
    return sorted(found - closed)


def best_ranges(
    problem: Problem,
    slices: Mapping[int, Problem],
    borders: Sequence[int],
    longest: int,
    copy_ns_per_byte: float = 0,
) -> list[Range]:
    """The ranges, of at most so many groups each, that take least together."""

    def cut_all(pieces: int) -> Cut:
        return in_ranges(problem, slices, [Range(0, borders[-1], pieces)], copy_ns_per_byte)

    cuts = {k: cut_all(k) for k in slices}
    cuts[1] = in_ranges(problem, slices, ())
    known: dict[object, int] = {}
    forward = problem.trace.ops[: borders[-1]]
    made = {name: place for place, op in enumerate(forward) for name in op.outputs}
    read = {name: place for place, op in enumerate(forward) for name in op.inputs}

    def least_ns(first: int, end: int, pieces: int) -> int:
        cut = cuts[pieces]
        key = pieces, _shape(cut.problem, cut.between(first, end))
        if key not in known:
            known[key] = took_ns(cut, ordered(cut, first, end))
        crossing = _crossing_bytes(problem.trace, cut, first, end, made, read)
        return known[key] + round(crossing * copy_ns_per_byte)

    best: list[tuple[int, list[Range]]] = [(0, [])]
    for n in range(1, len(borders)):
        best.append(
            min(
                (
                    (
                        best[i][0] + least_ns(borders[i], borders[n], pieces),
                        [*best[i][1], Range(borders[i], borders[n], pieces)],
                    )
                    for i in range(max(0, n - longest), n)
                    for pieces in sorted(cuts)
                ),
                key=lambda found: found[0],
            )
        )
    return best[-1][1]


def _crossing_bytes(
    trace: Trace, cut: Cut, first: int, end: int, made: Mapping[str, int], read: Mapping[str, int]
) -> int:
    """What pieces between these places read from pieces before, and leave to those behind alone:
    the forward cut as a whole neither splits nor joins it. `made` and `read` are the places where a
    value is made, and where the forward reads it last."""
    crossing: dict[tuple[str, bool], int] = {}
    for place in cut.apart.intersection(range(first, end)):
        op = trace.ops[place]
        joined = cut.problem.trace.value.keys()
        left = [v for v in op.outputs if read.get(v, 0) >= end and v not in joined]
        came = [v for v in op.inputs if made.get(v, end) < first and made[v] in cut.apart]
        for name in (*left, *came):
            value = trace.value[name]
            crossing[value.storage, name in left] = value.bytes
    return sum(crossing.values())


def _shape(problem: Problem, nodes: Sequence[Node]) -> object:
    """What an order of these ops, and how long it takes, depends on."""
    place = {node.op.name: i for i, node in enumerate(nodes)}
    value = problem.trace.value
    return tuple(
        (
            problem.cost(node.op.name),
            node.op.lane,
            node.op.role,
            node.piece,
            tuple(place.get(value[name].producer, -1) for name in node.op.inputs),
        )
        for node in nodes
    )


# --------------------------------------------------------------------------- the experts alone


def experts(
    problem: Problem, slices: Mapping[int, Problem], copy_ns_per_byte: float = 0
) -> tuple[Problem, Plan]:
    """The fastest number of pieces, one included, for all MoE layers, forward and backward."""
    found = [_experts(problem, slices, k, copy_ns_per_byte) for k in (1, *slices)]
    return min(found, key=lambda each: step_ns(*each))


def _experts(
    problem: Problem, slices: Mapping[int, Problem], k: int, copy_ns_per_byte: float
) -> tuple[Problem, Plan]:
    trace = problem.trace
    place_of = {op.name: place for place, op in enumerate(trace.ops)}
    exchanges = [op for op in trace.ops if op.role == "start" and "all_to_all" in op.signature]
    spans: list[Range] = []
    for phase in (True, False):
        mine = [op for op in exchanges if op.is_forward == phase]
        for there, back in zip(mine[::2], mine[1::2], strict=False):
            end = place_of[trace.wait_of[back.name]] + 1
            spans.append(Range(place_of[there.name], end, k))
    cut = in_ranges(problem, slices, spans if k > 1 else (), copy_ns_per_byte)
    edges = sorted({0, len(trace.ops), *(edge for s in spans for edge in (s.first, s.end))})
    order = tuple(text for first, end in pairwise(edges) for text in ordered(cut, first, end))
    plan = baselines.none(problem)
    return cut.problem, _plan(cut.problem, plan, order, "experts")


def _plan(problem: Problem, like: Plan, order: tuple[str, ...], solver: str) -> Plan:
    """The plan that saves what that one of the whole batch does."""
    plan = Plan(problem.trace.digest, solver, like.saved, order, status="baseline")
    check(problem, plan)
    return plan


Baseline = Callable[[Problem, Mapping[int, Problem], float], tuple[Problem, Plan]]
BASELINES: Mapping[str, Baseline] = {
    "lancet-program": program,
    "experts": experts,
}
