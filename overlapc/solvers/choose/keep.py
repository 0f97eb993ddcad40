"""`keep_sets` chooses storages to keep: sets from everything down to almost nothing.

At a price per byte, the best choice between keeping a storage and running its maker again is a
small linear program, because recompute only needs its inputs to be there:

    minimise    sum(time of op * r_op) + price * sum(bytes of storage * y_storage)
    subject to  y + r_maker >= 1      for every storage the backward reads
                y + r_maker >= r_op   for every storage that an op reads which may run again

The program is a minimum cut, so its corners are whole numbers. Views count as their storage.
Raising the price walks down the convex hull of (recompute time, bytes kept). Between two corners of
the hull all layers change at once; so sets are added that take one corner's choice for the first
part of the forward and the other's for the rest.

A byte has its price whether or not it is alive at the peak, which only a plan's ledger knows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

import highspy
import numpy as np

from overlapc.core.ir import Problem
from overlapc.core.simulate import memory_curve, saved_bytes
from overlapc.solvers.choose.choice import Needs, plan_on_demand
from overlapc.solvers.constants import FEW

_MILLION = 1e6
_DEAREST = 1e9


@dataclass(frozen=True)
class _Corner:
    kept: frozenset[str]
    ns: int  # of recompute
    bytes: int  # kept


def keep_sets(problem: Problem, needs: Needs, at_most: int) -> list[frozenset[str]]:
    """About `at_most` different sets of kept storages.

    Half of the sets price all bytes equally. In the other half, values that the backward reads
    before its peak (often the head's logits) cost nothing to keep: they would be recomputed by then
    anyway.
    """
    found: dict[frozenset[str], None] = {}
    for free in (frozenset[str](), _read_before_peak(problem, needs)):
        for kept in _walk(problem, needs, free, max(4, at_most // 2)):
            found[kept] = None
    return list(found)


def _read_before_peak(problem: Problem, needs: Needs) -> frozenset[str]:
    plan = plan_on_demand(problem, needs.storages, "none", needs)
    curve = memory_curve(problem, plan)
    peak = max(range(len(curve)), key=curve.__getitem__, default=0)
    early = [op for name in plan.order[: peak + 1] if not (op := needs.trace.op[name]).is_forward]
    return frozenset(needs.trace.value[name].storage for op in early for name in op.inputs)


def _walk(
    problem: Problem, needs: Needs, free: frozenset[str], at_most: int
) -> list[frozenset[str]]:
    """Walk down the hull, the largest set first."""
    corners = _hull(problem, needs, free, solves=max(4, at_most // FEW))
    gaps = [a.bytes - b.bytes for a, b in itertools.pairwise(corners)]
    mixes = max(0, at_most - len(corners))
    found: dict[frozenset[str], None] = {}
    for i, corner in enumerate(corners):
        found[corner.kept] = None
        if i < len(gaps):
            share = round(mixes * gaps[i] / max(1, sum(gaps)))
            for kept in _between(needs, corner.kept, corners[i + 1].kept, share):
                found[kept] = None
    return list(found)


def _hull(problem: Problem, needs: Needs, free: frozenset[str], solves: int) -> list[_Corner]:
    """Corners of the hull, bytes falling, by cutting the widest gap again and again."""
    program = _CutProgram(problem, needs, free)

    def corner(kept: Iterable[str]) -> _Corner:
        choice = needs.complete(frozenset(kept))
        costs = [problem.cost(name) for name in choice.recomputed]
        ns = sum(cost.compute_ns + cost.comm_ns for cost in costs)
        priced = [name for name in choice.saved if needs.trace.value[name].storage not in free]
        return _Corner(frozenset(kept), ns, saved_bytes(problem, priced))

    first = corner(needs.storages)
    if not program.columns:
        return [first]
    corners = [first, corner(program.solve(_DEAREST))]
    closed: set[tuple[int, int]] = set()
    for _ in range(solves):
        pairs = [
            (a.bytes - b.bytes, a, b)
            for a, b in itertools.pairwise(corners)
            if (a.bytes, b.bytes) not in closed and a.bytes > b.bytes and b.ns > a.ns
        ]
        if not pairs:
            break
        gap, a, b = max(pairs, key=lambda pair: pair[0])
        price = (b.ns - a.ns) / gap
        middle = corner(program.solve(price))
        if middle.ns + price * middle.bytes >= (a.ns + price * a.bytes) * (1 - 1e-9):
            closed.add((a.bytes, b.bytes))
        elif b.bytes < middle.bytes < a.bytes:
            corners.insert(corners.index(b), middle)
        else:
            closed.add((a.bytes, b.bytes))
    return corners


def _between(
    needs: Needs, large: frozenset[str], small: frozenset[str], count: int
) -> Iterable[frozenset[str]]:
    """Take the smaller set's choice for a growing first part of the forward, whose recompute comes
    late in the backward and has more windows before it."""
    trace = needs.trace
    born: dict[str, int] = {}
    for name, value in trace.value.items():
        if value.producer and name == value.storage:
            born[name] = needs.position[value.producer]
    places = sorted(born.get(s, 0) for s in large ^ small)
    for i in range(1, count + 1):
        border = places[min(len(places) - 1, len(places) * i // (count + 1))]
        early = {s for s in small if born.get(s, 0) < border}
        yield frozenset(early | {s for s in large if born.get(s, 0) >= border})


class _CutProgram:
    """The linear program; only its prices change from solve to solve."""

    def __init__(self, problem: Problem, needs: Needs, free: frozenset[str]) -> None:
        trace = problem.trace
        self.columns: dict[tuple[str, str], int] = {}  # ("keep", storage) or ("run", op)
        rows: list[tuple[list[int], list[float], float]] = []
        front: list[str] = []  # makers whose own inputs still need rows
        maker: dict[str, str] = {}
        for op in trace.ops:
            for name in op.outputs:
                maker.setdefault(trace.value[name].storage, op.name)

        def ask(names: Iterable[str], asking: str | None) -> None:
            """Add rows: the storages of these values must be there, if the asking op runs again."""
            for storage in dict.fromkeys(trace.value[name].storage for name in names):
                made_by = maker.get(storage)
                if storage in trace.resident or made_by is None:
                    continue
                if not trace.op[made_by].is_forward or not needs.may_rerun(trace.op[made_by]):
                    continue
                columns = [self.column("keep", storage)]
                if ("run", made_by) not in self.columns:
                    front.append(made_by)
                columns.append(self.column("run", made_by))
                if asking is None:
                    rows.append((columns, [1.0, 1.0], 1.0))
                elif asking != made_by:
                    columns.append(self.column("run", asking))
                    rows.append((columns, [1.0, 1.0, -1.0], 0.0))

        ask(needs.read_by_backward, None)
        while front:
            made_by = front.pop()
            ask(trace.op[made_by].inputs, made_by)
        size = {value.storage: value.bytes for value in trace.values}
        count = len(self.columns)
        self.time = np.zeros(count)
        self.bytes = np.zeros(count)
        for (kind, name), i in self.columns.items():
            if kind == "run":
                cost = problem.cost(name)
                self.time[i] = (cost.compute_ns + cost.comm_ns + 1) / _MILLION
            else:
                self.bytes[i] = 0.0 if name in free else size[name] / _MILLION
        self.highs = self._model(rows, count)

    def column(self, kind: str, name: str) -> int:
        return self.columns.setdefault((kind, name), len(self.columns))

    def _model(self, rows: list[tuple[list[int], list[float], float]], count: int) -> highspy.Highs:
        lp = highspy.HighsLp()
        lp.num_col_, lp.num_row_ = count, len(rows)
        lp.col_cost_ = self.time
        lp.col_lower_, lp.col_upper_ = np.zeros(count), np.ones(count)
        lp.row_lower_ = np.array([low for _, _, low in rows])
        lp.row_upper_ = np.full(len(rows), highspy.kHighsInf)
        lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        lp.a_matrix_.start_ = np.cumsum([0, *(len(columns) for columns, _, _ in rows)])
        lp.a_matrix_.index_ = np.array([c for columns, _, _ in rows for c in columns])
        lp.a_matrix_.value_ = np.array([f for _, factors, _ in rows for f in factors])
        highs = highspy.Highs()
        highs.setOptionValue("output_flag", False)
        highs.setOptionValue("threads", 1)
        highs.passModel(lp)
        return highs

    def solve(self, price_ns: float) -> list[str]:
        """The storages to keep when a byte costs this many nanoseconds."""
        count = len(self.columns)
        costs = self.time + price_ns * self.bytes
        self.highs.changeColsCost(count, np.arange(count, dtype=np.int32), costs)
        self.highs.run()
        values = self.highs.getSolution().col_value
        return [
            name for (kind, name), i in self.columns.items() if kind == "keep" and values[i] > 0.5
        ]
