"""A mixed integer program over slots that chooses what to recompute: its optimum is a lower bound
on every legal plan, and its solution says which storages to keep.

    keep_s, run_o in {0, 1}      storage s is saved; forward op o runs again
    keep + run_maker >= 1        for every storage the backward reads
    keep + run_maker >= run_o    for every storage that o reads

    time     of each phase: its compute, recompute included, and the idle rest of each window.
             Windows hold the work that may run in them (`slots`), as a fluid: ops are divisible
    memory   at chosen moments that every plan passes through: what is saved and certainly
             still needed, what the op of that moment touches, and what lasts

Every legal plan satisfies these rows. What they leave out (the order within a slot, buffers of
early recompute and late weight gradients) can only lower the optimum.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import dataclass, field, replace

import highspy
import numpy as np

from overlapc.core.errors import Infeasible
from overlapc.core.ir import Op, Problem
from overlapc.solvers.bound.moments import Moments
from overlapc.solvers.bound.slots import Slots, slots_of
from overlapc.solvers.choose.choice import Needs
from overlapc.solvers.constants import EXPOSED, LARGE, THRIFT

_INF = float(highspy.kHighsInf)
_LARGEST = 100.0  # columns and rows are scaled so that the dearest op costs this much
_NOTHING_FITS = (
    highspy.HighsModelStatus.kInfeasible,
    highspy.HighsModelStatus.kUnboundedOrInfeasible,
)


@dataclass
class Model:
    """A mixed integer program in the making: minimise cost over columns within row limits."""

    cost: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    whole: list[bool] = field(default_factory=list)
    rows: list[tuple[dict[int, float], float, float]] = field(default_factory=list)

    def column(self, cost: float = 0.0, upper: float = _INF, whole: bool = False) -> int:
        self.cost.append(cost)
        self.upper.append(upper)
        self.whole.append(whole)
        return len(self.cost) - 1

    def at_least(self, terms: dict[int, float], low: float) -> None:
        self.rows.append((terms, low, _INF))

    def at_most(self, terms: dict[int, float], high: float) -> None:
        self.rows.append((terms, -_INF, high))

    def highs(self, whole: bool, extra: dict[int, float] | None = None) -> highspy.Highs:
        """Load the program into HiGHS. `whole` asks for integers, else it is relaxed; `extra` adds
        to the costs of columns."""
        lp = highspy.HighsLp()
        count = len(self.cost)
        lp.num_col_, lp.num_row_ = count, len(self.rows)
        cost = np.array(self.cost)
        for column, more in (extra or {}).items():
            cost[column] += more
        lp.col_cost_ = cost
        lp.col_lower_, lp.col_upper_ = np.zeros(count), np.array(self.upper)
        lp.row_lower_ = np.array([low for _, low, _ in self.rows])
        lp.row_upper_ = np.array([high for _, _, high in self.rows])
        lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        lp.a_matrix_.start_ = np.cumsum([0, *(len(terms) for terms, _, _ in self.rows)])
        lp.a_matrix_.index_ = np.array([c for terms, _, _ in self.rows for c in terms])
        lp.a_matrix_.value_ = np.array([f for terms, _, _ in self.rows for f in terms.values()])
        if whole and any(self.whole):
            kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
            lp.integrality_ = [kinds[is_whole] for is_whole in self.whole]
        highs = highspy.Highs()
        highs.setOptionValue("output_flag", False)
        highs.setOptionValue("threads", 1)
        highs.passModel(lp)
        return highs


class IntegerProgram:
    """The program of one problem. Only the budget may change between solves."""

    def __init__(self, problem: Problem, needs: Needs | None = None, fine: bool = False) -> None:
        self.problem = problem
        # Which node runs in which window, where each has columns of its own: node -> window -> it
        self.during: dict[int, dict[int, int]] | None = {} if fine else None
        self.needs = needs or Needs(problem.trace)
        trace = problem.trace
        self.model = Model()
        self.keep: dict[str, int] = {}
        self.run: dict[str, int] = {}
        self.size = {value.storage: value.bytes for value in trace.values}
        costs = problem.profile.costs.values()
        self.ns = max([1, *(max(c.compute_ns, c.comm_ns) for c in costs)]) / _LARGEST
        self.bytes = max([1, *self.size.values()]) / _LARGEST
        self.maker: dict[str, Op] = {}
        for op in trace.ops:
            for name in op.outputs:
                self.maker.setdefault(trace.value[name].storage, op)
        self.lasting = {trace.value[name].storage for name in trace.outputs} - trace.resident
        self.forced: set[str] = set()  # storages that cannot be recomputed
        self._choices()
        self.slots = slots_of(problem, self.needs)
        for slots in self.slots:
            self._time(slots)
        # (row, what is there of each column of the traced microbatch, bytes that are there anyway)
        self.rows_of_memory: list[tuple[int, dict[int, float], int]] = []
        self._memory()

    def of(self, problem: Problem) -> IntegerProgram:
        """The program of a problem that differs from this one in its budget and in how many
        microbatches are in flight, as it would be made anew. Both have a budget, or none."""
        other = copy(self)
        other.problem = problem
        other.model = replace(self.model, rows=list(self.model.rows))
        for number, terms, there in self.rows_of_memory:
            other.model.rows[number] = other.row_of_memory(terms, there)
        return other

    # ------------------------------------------------------------------ choice

    def _choices(self) -> None:
        trace, needs = self.problem.trace, self.needs
        front: list[Op] = []

        def ask(names: Iterable[str], asking: Op | None) -> None:
            for storage in dict.fromkeys(trace.value[name].storage for name in names):
                maker = self.maker.get(storage)
                if storage in trace.resident or maker is None or not maker.is_forward:
                    continue
                if maker is asking:
                    continue
                if not needs.may_rerun(maker):
                    if asking is None:
                        self.forced.add(storage)
                        self.keep.setdefault(storage, -1)
                    continue
                keep = self._keep(storage)
                if maker.name not in self.run:
                    self.run[maker.name] = self.model.column(upper=1.0, whole=True)
                    front.append(maker)
                terms = {keep: 1.0, self.run[maker.name]: 1.0}
                if asking is None:
                    self.model.at_least(terms, 1.0)
                else:
                    terms[self.run[asking.name]] = -1.0
                    self.model.at_least(terms, 0.0)

        ask(needs.read_by_backward, None)
        while front:
            maker = front.pop()
            ask(maker.inputs, maker)
        for storage in self.forced:
            self.keep[storage] = self.model.column(upper=1.0, whole=True)
            self.model.at_least({self.keep[storage]: 1.0}, 1.0)

    def _keep(self, storage: str) -> int:
        if storage not in self.keep:
            self.keep[storage] = self.model.column(upper=1.0, whole=True)
        return self.keep[storage]

    # ------------------------------------------------------------------ time

    def _time(self, slots: Slots) -> None:
        """Columns and rows of one phase's duration, whose column has cost 1."""
        problem, model = self.problem, self.model
        ops = problem.trace.ops
        costs = [problem.cost(op.name) for op in ops]
        windows = len(slots.starts)
        comm = [costs[i].comm_ns / self.ns for i in slots.starts]
        total = sum(costs[i].compute_ns for i in slots.members) / self.ns
        total_terms = {
            self.run[ops[i].name]: costs[i].compute_ns / self.ns
            for i in slots.again
            if ops[i].name in self.run
        }
        duration = model.column(cost=1.0)
        hidden = self._hide(slots)
        idle = []
        slowdown = problem.profile.slowdown
        slow, drag = slowdown.compute_permille / 1000, slowdown.comm_permille / 1000
        # A window of work w under a collective of length C lasts max(C + w·a, w + C·b).
        a = min(1.0, slow * (1 - 1 / drag))
        b = min(1.0, drag * (1 - 1 / slow))
        for k in range(windows):
            rest = model.column()
            idle.append(rest)
            terms = {column: (1.0 - a) * work for column, work in hidden[k].items()}
            model.at_least({rest: 1.0, **terms}, comm[k])
            if b:
                model.at_least({rest: 1.0}, comm[k] * b)
        worked = {duration: 1.0, **{c: -f for c, f in total_terms.items()}}
        model.at_least({**worked, **dict.fromkeys(idle, -1.0)}, total)
        self._lanes(slots, duration, worked, total, idle, b)

    def _lanes(
        self,
        slots: Slots,
        duration: int,
        worked: dict[int, float],
        total: float,
        idle: list[int],
        drag: float,
    ) -> None:
        """Add rows: no phase is shorter than the work of any of its lanes. Each collective of a
        lane, recomputed or not, also costs a share `drag` of its time: either it slows the compute
        beside it, or compute waits."""
        ops = self.problem.trace.ops
        busy: dict[str, float] = defaultdict(float)
        slowing: dict[str, float] = defaultdict(float)
        again: dict[str, dict[int, float]] = defaultdict(dict)
        windows = dict(zip(slots.starts, idle, strict=True))
        for i in (i for i in slots.members if ops[i].role == "start"):
            took = self.problem.cost(ops[i].name).comm_ns / self.ns
            busy[ops[i].lane] += took
            slowing[ops[i].lane] += drag * took if i not in windows else 0.0
        for i in (i for i in slots.again if ops[i].role == "start"):
            if (run := self.run.get(ops[i].name)) is not None:
                again[ops[i].lane][run] = -self.problem.cost(ops[i].name).comm_ns / self.ns
        for lane in {*busy, *again}:
            self.model.at_least({duration: 1.0, **again[lane]}, busy[lane])
            if not drag:
                continue
            terms = {column: -1.0 for i, column in windows.items() if ops[i].lane == lane}
            terms |= {column: drag * took for column, took in again[lane].items()}
            self.model.at_least(_plus(worked, terms), total + slowing[lane])

    def _hide(self, slots: Slots) -> list[dict[int, float]]:
        """Return the work hidden in each window, as terms.

        Work that may run from the first slot on is one fluid, bound by its deadlines. Work that may
        run up to the last slot is another, bound by its releases. Other work has columns by range.
        """
        if self.during is not None and slots.phase == 1:
            return self._hide_each(slots, self.during)
        ops = self.problem.trace.ops
        tasks: dict[tuple[int, int], dict[int, float]] = defaultdict(dict)  # range -> terms
        amounts: dict[tuple[int, int], float] = defaultdict(float)
        for i in slots.members:
            if slots.first[i] < slots.last[i]:
                amounts[slots.first[i], slots.last[i]] += self._work(i)
        for i, span in slots.again.items():
            column = self.run.get(ops[i].name)
            if column is not None and span[0] < span[1] and self._work(i):
                tasks[span][column] = self._work(i)
        model, windows, final = self.model, len(slots.starts), slots.final
        hidden: list[dict[int, float]] = [{} for _ in range(windows)]
        ranges = sorted({*amounts, *tasks})
        both = [span for span in ranges if span[0] > 0 and span[1] < final]
        if len(both) > LARGE:  # let them run up to the last slot, which only lowers the bound
            widened = {span: (span[0], final) for span in both}
            both = []
        else:
            widened = {}
        early: list[tuple[int, float, dict[int, float]]] = []  # (deadline, amount, terms)
        late: list[tuple[int, float, dict[int, float]]] = []  # (release, amount, terms)
        for span in ranges:
            low, high = widened.get(span, span)
            amount, terms = amounts.get(span, 0.0), tasks.get(span, {})
            if span in both:
                columns = [model.column() for _ in range((low + 1) // 2, (high + 1) // 2)]
                for k, column in zip(range((low + 1) // 2, (high + 1) // 2), columns, strict=True):
                    hidden[k][column] = 1.0
                model.at_most({**dict.fromkeys(columns, 1.0), **_negative(terms)}, amount)
            elif low == 0 and high < final:
                early.append((high, amount, terms))
            else:
                late.append((low, amount, terms))
        before = [model.column() for _ in range(windows)]
        after = [model.column() for _ in range(windows)]
        for k in range(windows):
            hidden[k] |= {before[k]: 1.0, after[k]: 1.0}
            slot = 2 * k + 1
            open_ = [(amount, terms) for deadline, amount, terms in early if deadline >= slot]
            model.at_most(
                {**dict.fromkeys(before[k:], 1.0), **_negative(*(t for _, t in open_))},
                sum(amount for amount, _ in open_),
            )
            there = [(amount, terms) for release, amount, terms in late if release <= slot]
            model.at_most(
                {**dict.fromkeys(after[: k + 1], 1.0), **_negative(*(t for _, t in there))},
                sum(amount for amount, _ in there),
            )
        return hidden

    def _hide_each(self, slots: Slots, during: dict[int, dict[int, int]]) -> list[dict[int, float]]:
        """Like `_hide`, with a column for each op and window: the share of the op that is hidden
        there."""
        ops = self.problem.trace.ops
        hidden: list[dict[int, float]] = [{} for _ in slots.starts]

        def spread(node: int, span: tuple[int, int], most: dict[int, float], low: float) -> None:
            work = self._work(node % len(ops))
            windows = range((span[0] + 1) // 2, (span[1] + 1) // 2)
            if not work or not windows:
                return
            during[node] = {k: self.model.column(upper=1.0) for k in windows}
            for k, column in during[node].items():
                hidden[k][column] = work
            self.model.at_least({**most, **dict.fromkeys(during[node].values(), -1.0)}, low)

        for i in slots.members:
            spread(i, (slots.first[i], slots.last[i]), {}, -1.0)
        for i, span in slots.again.items():
            if (run := self.run.get(ops[i].name)) is not None:
                spread(i + len(ops), span, {run: 1.0}, 0.0)
        return hidden

    def _work(self, i: int) -> float:
        """Compute time of an op, scaled."""
        return self.problem.cost(self.problem.trace.ops[i].name).compute_ns / self.ns

    # ------------------------------------------------------------------ memory

    def _memory(self) -> None:
        """Rows of memory at the border between the phases and at moments of the backward."""
        problem = self.problem
        if problem.budget_bytes is None or len(problem.phases) != 2:
            return
        lasting = frozenset(s for s in self.lasting if s in self.maker and self.maker[s].is_forward)
        self.anyway = sum(self.size[s] for s in lasting) + problem.resident_bytes
        saved = {c: self.size[s] / self.bytes for s, c in self.keep.items() if s not in lasting}
        self.limit_at(saved, 0)
        Moments(self, self.slots[1], lasting, self.during).add()

    def limit_at(self, terms: dict[int, float], there: int) -> None:
        """Add a row of memory: the terms, `there` more bytes, lasting values, and what later
        microbatches hold."""
        there += self.anyway
        self.rows_of_memory.append((len(self.model.rows), terms, there))
        self.model.rows.append(self.row_of_memory(terms, there))

    def row_of_memory(
        self, terms: dict[int, float], there: int
    ) -> tuple[dict[int, float], float, float]:
        problem, terms = self.problem, dict(terms)
        if copies := float(problem.in_flight - 1):
            for storage, column in self.keep.items():
                terms[column] = terms.get(column, 0) + copies * self.size[storage] / self.bytes
        return terms, -_INF, ((problem.budget_bytes or 0) - there) / self.bytes

    def read_by(self, op: Op) -> list[str]:
        """Storages that the op reads and that may be kept or recomputed."""
        found = dict.fromkeys(self.problem.trace.value[name].storage for name in op.inputs)
        return [
            s
            for s in found
            if s in self.keep and self.maker[s] is not op and self.maker[s].name in self.run
        ]

    # ------------------------------------------------------------------ solving

    def relaxed(self, highs: highspy.Highs | None = None) -> Solution:
        return self._solve(highs or self.model.highs(whole=False))

    def solve(
        self,
        time_limit_s: float,
        gap: float,
        highs: highspy.Highs | None = None,
        watch: Callable[[int], bool] | None = None,
    ) -> Solution:
        """Solve. `watch` is called with the bound now and then, and ends the search by returning
        True."""
        highs = highs or self.model.highs(whole=True)
        highs.setOptionValue("time_limit", float(time_limit_s))
        highs.setOptionValue("mip_rel_gap", float(gap))
        if watch is not None:

            def ask(event: highspy.highs.HighsCallbackEvent) -> None:
                if watch(self._whole_ns(event.data_out.mip_dual_bound)):
                    event.interrupt()

            highs.cbMipInterrupt.subscribe(ask)
        return self._solve(highs)

    def thrifty(self, budget_bytes: int) -> highspy.Highs:
        """The program with a smaller budget, in which hidden recompute costs a little, too: less
        recompute leaves the schedule more freedom."""
        costs = self.problem.profile.costs
        extra = {
            column: (THRIFT * costs[name].compute_ns + EXPOSED * costs[name].comm_ns) / self.ns
            for name, column in self.run.items()
        }
        highs = self.model.highs(whole=True, extra=extra)
        self.limit(highs, budget_bytes)
        return highs

    def limit(self, highs: highspy.Highs, budget_bytes: int) -> None:
        """Change the budget of a loaded program."""
        for number, _, there in self.rows_of_memory:
            high = (budget_bytes - there) / self.bytes
            highs.changeRowBounds(number, -_INF, high)

    def _solve(self, highs: highspy.Highs) -> Solution:
        highs.run()
        status = highs.getModelStatus()
        if status in _NOTHING_FITS:
            raise Infeasible(self.problem.budget_bytes or 0, self.problem.budget_bytes or 0)
        info = highs.getInfo()
        if highs.getLp().integrality_:
            bound = max(0.0, info.mip_dual_bound)
        else:
            optimal = status == highspy.HighsModelStatus.kOptimal
            bound = info.objective_function_value if optimal else 0.0
        values = highs.getSolution().col_value
        found = bool(values) and info.primal_solution_status == 2
        kept = frozenset(s for s, c in self.keep.items() if values[c] > 0.5) if found else None
        return Solution(kept, self._whole_ns(bound))

    def _whole_ns(self, bound: float) -> int:
        """Whole nanoseconds that are certainly below a bound, given the engine's tolerance."""
        if not math.isfinite(bound):
            return 0
        return max(0, math.ceil(bound * self.ns * (1 - 1e-6) - 1e-3))


@dataclass(frozen=True)
class Solution:
    """`kept` storages (None if no solution was found in time) and a lower bound on any plan."""

    kept: frozenset[str] | None
    bound_ns: int


def _plus(a: dict[int, float], b: dict[int, float]) -> dict[int, float]:
    return {column: a.get(column, 0.0) + b.get(column, 0.0) for column in {**a, **b}}


def _negative(*terms: dict[int, float]) -> dict[int, float]:
    return {column: -factor for some in terms for column, factor in some.items()}
