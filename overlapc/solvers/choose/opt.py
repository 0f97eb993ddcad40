"""OPT: the best plan found in the time given, with a proven bound on how much better any plan could
be.

Small problems are searched exhaustively (`exact`). For others two threads work until they meet:

    proof     the mixed integer program of `program`, coarse and then fine: a rising lower bound
    search    the same program with a little thrift, for the budget and ever less than it, says
              what to keep: the less it may use, the more room is left to early recompute and
              late weight gradients. `listing` and `filling` turn each choice into orders. Then
              HEU's groups of blocks for smaller budgets, unless a gap of one percent is proven,
              and the best choice is varied: one storage more that is kept.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product

from overlapc.core.errors import Infeasible
from overlapc.core.ir import Plan, Problem
from overlapc.core.simulate import peak_bytes, step_ns
from overlapc.solvers.bound.bounds import simple_bound_ns
from overlapc.solvers.bound.program import IntegerProgram
from overlapc.solvers.choose.choice import Choice, Needs, choice_of, plan_of
from overlapc.solvers.choose.exact import TooLarge, exact
from overlapc.solvers.choose.heu import heu_plans
from overlapc.solvers.constants import FEW, GAP, LARGE, OVERSHOOT, SEARCHED, SECONDS
from overlapc.solvers.order.filling import PASSES, Taste, filled
from overlapc.solvers.order.listing import Style, list_schedule
from overlapc.solvers.order.work import NEVER, Work, backward_work, forward_work
from overlapc.tools.progress import stoppable

_MARGINS = (0.0, 0.01, 0.02, 0.03, 0.045, 0.06, 0.08, 0.1, 0.13, 0.16, 0.2, 0.3)
_GROUPED = 0.1  # the largest margin with which groups of blocks are tried
_LIMITS = (1.0, 0.95)  # shares of the budget for the list scheduler to aim at
_STYLES = (Style(OVERSHOOT**2, False), Style(OVERSHOOT, True), Style(1.0, True))
# Fillings in a row that may be no better: of any choice, and of the best
_SEEDS, _IDLE = 2 * FEW, 80


@dataclass(frozen=True)
class SolverProgress:
    """The state of a search. `step_ns` is that of the best plan so far, 0 if there is none."""

    seconds: float
    step_ns: int
    bound_ns: int
    doing: str

    @property
    def gap(self) -> float:
        """The share of the best plan's time that is above the bound."""
        return 1 - self.bound_ns / self.step_ns if self.step_ns else 1.0


def opt(
    problem: Problem,
    known: Iterable[Plan] = (),
    menu: Iterable[Plan] = (),
    others: Iterable[Plan] = (),
    *,
    time_limit_s: float = 60.0,
    gap: float = 0.001,
    progress: Callable[[SolverProgress], None] = lambda _: None,
) -> Plan:
    """The best plan found until the gap is closed or time is up, with the proven bound in it.

    The result is never worse than the legal plans in `known`. While time is left, the search tries
    `menu` first and `others` at the end. Ctrl-C or SIGTERM ends the search and keeps its best. It
    raises Infeasible if nothing fits, which is certain only for small problems.
    """
    search = _OptSearch(problem, time_limit_s, gap, progress)
    try:
        with stoppable():
            search.run(known, menu, others)
    except KeyboardInterrupt:
        if search.best is None:
            raise
    if search.best is None:
        raise Infeasible(problem.budget_bytes or 0, search.smallest)
    proven = search.bound >= search.step
    return replace(
        search.best,
        solver="opt",
        status="optimal" if proven else "feasible",
        bound_ns=min(search.bound, search.step),
        found_by=f"{search.best.found_by or search.best.solver}; of {search.offered} plans",
    )


class _Proof(threading.Thread):
    """Raises `bound_ns` in the background until `stop` is set or time is up."""

    def __init__(
        self, programs: Iterable[Callable[[], IntegerProgram]], gap: float, until: float
    ) -> None:
        super().__init__(name="overlapc-proof", daemon=True)
        self.programs, self.gap, self.until = programs, gap, until
        self.bound_ns = 0
        self.stop = threading.Event()

    def run(self) -> None:
        for make in self.programs:
            program = make()
            left = self.until - time.monotonic()
            if self.stop.is_set() or left <= 0:
                return
            try:
                found = program.solve(left, self.gap, watch=self.watch)
            except Infeasible:
                return  # no plan fits, and the search says so
            self.watch(found.bound_ns)

    def watch(self, bound_ns: int) -> bool:
        self.bound_ns = max(self.bound_ns, bound_ns)
        return self.stop.is_set()


class _OptSearch:
    def __init__(
        self,
        problem: Problem,
        time_limit_s: float,
        gap: float,
        progress: Callable[[SolverProgress], None],
    ) -> None:
        self.problem, self.gap, self.progress = problem, gap, progress
        self.began = time.monotonic()
        self.until = self.began + time_limit_s
        self.budget = problem.budget_bytes if problem.budget_bytes is not None else NEVER
        self.found: tuple[tuple[int, int], Plan] | None = None  # the best of all, with its key
        self.least = simple_bound_ns(problem)  # the bound from before the proof began
        self.proof: _Proof | None = None
        self.here: tuple[tuple[int, int], Plan] | None = None  # the best of the choice at hand
        self.smallest = NEVER
        self.offered = 0
        self.tried: set[frozenset[str]] = set()  # sets of kept storages
        self.swept: dict[float, bool] = {}  # margin -> did it beat all before?

    @property
    def best(self) -> Plan | None:
        return self.found[1] if self.found else None

    @property
    def key(self) -> tuple[int, int]:
        """Step and peak of the best plan."""
        return self.found[0] if self.found else (0, 0)

    @property
    def step(self) -> int:
        return self.key[0]

    @property
    def bound(self) -> int:
        return max(self.least, self.proof.bound_ns if self.proof else 0)

    def left_s(self) -> float:
        return self.until - time.monotonic()

    def done(self) -> bool:
        closed = self.best is not None and self.step * (1 - self.gap) <= self.bound
        return closed or self.left_s() <= 0

    def tell(self, doing: str) -> None:
        seconds = time.monotonic() - self.began
        self.progress(SolverProgress(seconds, self.step, self.bound, doing))

    def offer(self, plan: Plan) -> bool:
        """Take the plan if it fits and is better; return whether it fits."""
        self.offered += 1
        peak = peak_bytes(self.problem, plan)
        self.smallest = min(self.smallest, peak)
        if peak > self.budget:
            return False
        key = (step_ns(self.problem, plan), peak)
        if self.found is None or key < self.key:
            self.found = key, plan
        if self.here is None or key < self.here[0]:
            self.here = key, plan
        return True

    def run(self, known: Iterable[Plan], menu: Iterable[Plan], others: Iterable[Plan]) -> None:
        for plan in known:
            self.offer(plan)
        if not self.done():
            self.take(menu)
        self.tell("known plans")
        if self.best is not None and not self.best.found_by and not self.done():
            self.schedule(choice_of(self.problem, self.best))  # a baseline leaves windows empty
            self.tell(f"windows of {self.best.solver} filled")
        if len(self.problem.trace.ops) <= SEARCHED and self.small():
            return
        needs = Needs(self.problem.trace)
        program = IntegerProgram(self.problem, needs)
        self.least = program.relaxed().bound_ns
        self.tell("relaxed bound")
        if self.done():
            return
        makers = [lambda: program]
        if len(self.problem.trace.ops) <= LARGE:
            makers.append(lambda: IntegerProgram(self.problem, needs, fine=True))
        self.proof = _Proof(makers, self.gap / 2, self.until)
        try:
            self.proof.start()
            search = IntegerProgram(self.problem, needs)
            for n, margin in enumerate(_MARGINS):
                self.sweep(needs, search, (margin,))
                if n % 2:
                    self.groups(needs, margin)
            self.polish()
            self.vary(needs)
            self.sweep(needs, search, self.closer())
            self.vary(needs)
            self.polish()
            self.take(others)
            self.tell("other plans")
            while self.proof.is_alive() and not self.done():
                self.proof.join(0.2)
            self.tell("end of the proof")
        finally:
            self.proof.stop.set()
            if self.proof.is_alive():
                self.proof.join(2.0)

    def take(self, plans: Iterable[Plan]) -> None:
        for plan in plans:
            self.offer(plan)
            if self.done():
                break

    def sweep(self, needs: Needs, program: IntegerProgram, margins: Iterable[float]) -> None:
        """Schedule the program's choices that leave these shares of the budget free."""
        for margin in margins:
            if self.done() or (self.budget >= NEVER and margin):
                return
            before = self.key
            budget = int(self.budget * (1 - margin)) if self.budget < NEVER else NEVER
            patience = max(1.0, len(self.problem.trace.ops) / 700)
            seconds = max(0.1, min(SECONDS * patience, self.left_s() / 8))
            try:
                found = program.solve(seconds, GAP, program.thrifty(budget))
            except Infeasible:
                continue
            if found.kept is None or found.kept in self.tried:
                continue
            self.tried.add(found.kept)
            self.schedule(needs.complete(found.kept, f"program {margin:.3g}"))
            self.swept[margin] = self.key < before
            self.tell(f"{margin:.1%} of the budget left free")

    def groups(self, needs: Needs, margin: float) -> None:
        """Try HEU's plans that leave this share of the budget free and take several blocks as one.
        Where little is kept, the memory of a few blocks while they are recomputed decides, and the
        program's slots do not show it."""
        if self.done() or self.budget >= NEVER or margin > _GROUPED:
            return
        less = replace(self.problem, budget_bytes=int(self.budget * (1 - margin)))
        self.take(heu_plans(less, needs, grouped=True))
        self.tell(f"groups of blocks, {margin:.1%} of the budget left free")

    def polish(self) -> None:
        """Fill the best plan's windows again and again, a little differently each time."""
        if self.best is None or self.budget >= NEVER or len(self.problem.phases) != 2:
            return
        before = self.key
        self.here = self.found
        self.refill(backward_work(self.problem, choice_of(self.problem, self.best)), _IDLE)
        if self.key < before:
            self.tell("windows filled anew")

    def refill(self, work: Work, idle: int) -> None:
        """Fill the windows of the best plan of the current choice, a little differently each time,
        until `idle` times in a row bring no gain."""
        seed, left = 0, idle if self.budget < NEVER else 0
        while left and self.here is not None and not self.done():
            seed, left, (before, plan) = seed + 1, left - 1, self.here
            taste = Taste(seed % FEW != 0, seed % FEW != 0, seed=seed)
            self.offer(filled(plan, work, self.budget, (taste,), self.until))
            if self.here[0] < before:
                left = idle

    def vary(self, needs: Needs) -> None:
        """Keep one more storage of those that the best plan recomputes, the most expensive
        first."""
        trace, tried = self.problem.trace, self.tried
        better = True
        while better and self.best is not None and self.budget < NEVER:
            better = False
            kept = frozenset(trace.value[name].storage for name in self.best.saved)
            before = self.key
            for name in self._dearest(self.best):
                more = kept | {trace.value[v].storage for v in trace.op[name].outputs}
                if more in tried:
                    continue
                tried.add(more)
                if self.done():
                    return
                base = choice_of(self.problem, self.best).found_by.removesuffix(" varied")
                self.schedule(needs.complete(more, f"{base} varied"), thorough=False)
                if self.key < before:
                    better = True
                    self.tell(f"one more kept: {name}")
                    break

    def _dearest(self, plan: Plan) -> list[str]:
        """Recomputed ops, sorted by time for each byte that they make, the largest first."""
        trace, problem = self.problem.trace, self.problem

        def worth(name: str) -> float:
            held = sum(trace.value[v].bytes for v in trace.op[name].outputs)
            return problem.cost(name).compute_ns / max(1, held)

        timed = [name for name in plan.recomputed if problem.cost(name).compute_ns]
        return sorted(timed, key=worth, reverse=True)

    def small(self) -> bool:
        """Try the exhaustive search; return whether it finished."""
        try:
            found = exact(self.problem, best=self.best)
        except TooLarge as too_large:
            if too_large.best is not None:
                self.offer(too_large.best)
            return False
        if found is not None:
            self.offer(found)
        self.least = self.step
        self.tell("all plans")
        return True

    def closer(self) -> Iterator[float]:
        """Margins closer and closer around the last one that beat all before it."""
        for _ in range(5):
            centre = max((m for m, better in self.swept.items() if better), default=0.0)
            near = sorted({*self.swept, centre})
            at = near.index(centre)
            for other in near[max(0, at - 1) : at] + near[at + 1 : at + 2]:
                yield (centre + other) / 2

    def schedule(self, choice: Choice, thorough: bool = True) -> None:
        """Offer orders of this choice."""
        problem = self.problem
        self.here = None
        plain = plan_of(problem, choice, "opt")
        fits = self.offer(plain)
        if len(problem.phases) != 2:
            return
        work = backward_work(problem, choice)
        if fits:
            self.fill(plain, work)
        if thorough:
            self.listed(choice, work)
        if self.here is None:
            return
        if thorough:
            self.fill(self.here[1], work)
        self.refill(work, _SEEDS)
        if self.best is self.here[1]:
            early = list_schedule(forward_work(problem), NEVER, Style(1.0, True))
            order = early + self.best.order[len(early) :]
            found_by = f"{self.best.found_by}, forward early"
            self.offer(replace(self.best, order=order, found_by=found_by))

    def fill(self, plan: Plan, work: Work) -> None:
        for passes in PASSES:
            if self.left_s() <= 0:
                return
            self.offer(filled(plan, work, self.budget, passes, self.until))

    def listed(self, choice: Choice, work: Work) -> None:
        problem = self.problem
        plain = tuple(op.name for op in problem.trace.ops if op.is_forward)
        seen: set[tuple[str, ...]] = set()
        shares = _LIMITS if self.budget < NEVER else _LIMITS[:1]
        works = [work, backward_work(problem, choice, defer=False)]
        for each, share, style in product(works, shares, _STYLES):
            if self.left_s() <= 0:
                return
            limit = int(self.budget * share) if self.budget < NEVER else NEVER
            backward = list_schedule(each, limit, style)
            how = f"{style} in {share:g}{'' if each is work else ', in place'}"
            if backward not in seen:
                seen.add(backward)
                self.offer(plan_of(problem, choice, "opt", plain + backward, how))
