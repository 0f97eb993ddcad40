"""OPT: the best plan that can be found and a proof of how much better any other could be.

Small problems are searched through (`exact`). For others the mixed integer program of `program`
gives a lower bound and, for the budget and ever less than it, choices of what to keep: the
less the program may use, the more room a schedule has for early recompute and late weight
gradients. `listing` turns each choice into orders; the best legal one that fits is handed out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product

from overlapc.errors import Infeasible
from overlapc.ir import Plan, Problem
from overlapc.simulate import memory_curve, simulate
from overlapc.solvers.choice import Choice, Needs, on_demand
from overlapc.solvers.exact import TooLarge, exact
from overlapc.solvers.listing import Style, list_schedule
from overlapc.solvers.program import Program
from overlapc.solvers.work import NEVER, backward_work, forward_work

_SMALL = 28  # ops that can be searched through
_MARGINS = (0.0, 0.02, 0.04, 0.06, 0.09, 0.12, 0.16, 0.2, 0.25, 0.3, 0.4)
_LIMITS = (1.0, 0.97, 0.93, 0.88)  # of the budget, for the list scheduler to aim at
_STYLES = (Style(4.0, False), Style(1.0, False), Style(2.0, True), Style(1.0, True))


@dataclass(frozen=True)
class Progress:
    """Where a search stands. `step_ns` is that of the best plan so far, 0 if there is none."""

    seconds: float
    step_ns: int
    bound_ns: int
    doing: str

    @property
    def gap(self) -> float:
        """How much of the best plan's time is not proven to be needed."""
        return 1 - self.bound_ns / self.step_ns if self.step_ns else 1.0


def opt(
    problem: Problem,
    known: Iterable[Plan] = (),
    *,
    time_limit_s: float = 60.0,
    gap: float = 0.001,
    progress: Callable[[Progress], None] = lambda _: None,
) -> Plan:
    """The best plan found until the gap is closed or time is up, with the proven bound in it.

    `known` are legal plans to start from. Ctrl-C ends the search and keeps its best. Infeasible
    if nothing fits, which is certain only for small problems.
    """
    search = _Search(problem, time_limit_s, gap, progress)
    try:
        search.run(known)
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
    )


class _Search:
    def __init__(
        self,
        problem: Problem,
        time_limit_s: float,
        gap: float,
        progress: Callable[[Progress], None],
    ) -> None:
        self.problem, self.gap, self.progress = problem, gap, progress
        self.began = time.monotonic()
        self.time_limit_s = time_limit_s
        self.budget = problem.budget_bytes if problem.budget_bytes is not None else NEVER
        self.best: Plan | None = None
        self.key = (0, 0)
        self.bound = 0
        self.smallest = NEVER

    @property
    def step(self) -> int:
        return self.key[0]

    def left_s(self) -> float:
        return self.time_limit_s - (time.monotonic() - self.began)

    def done(self) -> bool:
        closed = self.best is not None and self.step * (1 - self.gap) <= self.bound
        return closed or self.left_s() <= 0

    def tell(self, doing: str) -> None:
        seconds = time.monotonic() - self.began
        self.progress(Progress(seconds, self.step, self.bound, doing))

    def offer(self, plan: Plan) -> bool:
        """Take the plan if it fits and is better; whether it fits."""
        peak = max(memory_curve(self.problem, plan), default=0)
        self.smallest = min(self.smallest, peak)
        if peak > self.budget:
            return False
        key = (simulate(self.problem, plan).step_ns, peak)
        if self.best is None or key < self.key:
            self.best, self.key = plan, key
        return True

    def run(self, known: Iterable[Plan]) -> None:
        for plan in known:
            self.offer(plan)
        self.tell("known plans")
        if len(self.problem.trace.ops) <= _SMALL and self.small():
            return
        needs = Needs(self.problem.trace)
        program = Program(self.problem, needs)
        self.bound = max(self.bound, program.relaxed().bound_ns)
        self.tell("relaxed bound")
        if self.done():
            return
        share = max(0.2, min(20.0, self.left_s() / 4))
        first = program.solve(share, self.gap / 2)
        self.bound = max(self.bound, first.bound_ns)
        self.tell("bound")
        if first.kept is not None:
            self.schedule(needs.complete(first.kept))
        if len(self.problem.phases) == 1:
            return
        tried = {first.kept}
        for margin in self.margins():
            if self.done():
                return
            budget = int(self.budget * (1 - margin)) if self.budget < NEVER else NEVER
            seconds = max(0.1, min(2.0, self.left_s() / 8))
            try:
                found = program.solve(seconds, 0.002, program.thrifty(budget))
            except Infeasible:
                continue
            if found.kept is None or found.kept in tried:
                continue
            tried.add(found.kept)
            self.schedule(needs.complete(found.kept))
            self.tell(f"{margin:.1%} of the budget left free")

    def small(self) -> bool:
        """Try to go through all plans; whether that came to an end."""
        try:
            found = exact(self.problem, best=self.best)
        except TooLarge as too_large:
            if too_large.best is not None:
                self.offer(too_large.best)
            return False
        if found is not None:
            self.offer(found)
        self.bound = self.step
        self.tell("all plans")
        return True

    def margins(self) -> Iterator[float]:
        """A first sweep, then ever closer around what was best."""
        if self.budget >= NEVER:
            yield 0.0
            return
        results: dict[float, int] = {}
        for margin in _MARGINS:
            before = self.key
            yield margin
            results[margin] = 0 if self.key != before else 1
        for _ in range(6):
            better = [margin for margin, worse in results.items() if not worse]
            if not better:
                return
            centre = better[-1]
            near = sorted(results)
            at = near.index(centre)
            for other in near[max(0, at - 1) : at] + near[at + 1 : at + 2]:
                middle = (centre + other) / 2
                before = self.key
                yield middle
                results[middle] = 0 if self.key != before else 1

    def schedule(self, choice: Choice) -> None:
        """Offer orders of this choice."""
        problem = self.problem
        digest = problem.trace.digest
        self.offer(Plan(digest, "opt", choice.saved, on_demand(problem, choice)))
        if len(problem.phases) == 1:
            return
        plain = tuple(op.name for op in problem.trace.ops if op.is_forward)
        seen: set[tuple[str, ...]] = set()
        shares = _LIMITS if self.budget < NEVER else _LIMITS[:1]
        works = [backward_work(problem, choice, defer) for defer in (True, False)]
        for work, share, style in product(works, shares, _STYLES):
            if self.left_s() <= 0:
                return
            limit = int(self.budget * share) if self.budget < NEVER else NEVER
            backward = list_schedule(work, limit, style)
            if backward not in seen:
                seen.add(backward)
                self.offer(Plan(digest, "opt", choice.saved, plain + backward))
        if self.best is not None and self.best.saved == choice.saved:
            early = list_schedule(forward_work(problem), NEVER, Style(1.0, True))
            order = early + self.best.order[len(early) :]
            self.offer(replace(self.best, order=order))
