"""Plans for a step of several microbatches, each forward merged with an earlier backward.

    solve_step   the fastest step found, of these:

    alone        F0 B0  F1 B1  ...
    merged       F0  (F1;B0)  (F2;B1)  ...  B of the last
    in pairs     (F0;F1)  (F2;B0)  (F3;B1)  ...  (B;B) of the last two

In pairs no forward and no backward runs alone, so that each collective has something to hide
behind; one more microbatch is held for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from itertools import chain

from overlapc.core.errors import OptionError
from overlapc.core.ir import Plan, Problem
from overlapc.core.merge import held_in_pairs, in_pairs, merge, of_slice, one_by_one
from overlapc.core.simulate import peak_bytes, step_ns
from overlapc.solvers.bound.bounds import Least, bound_ns, simple_bound_ns
from overlapc.solvers.choose.choice import Choice, choice_of
from overlapc.solvers.choose.heu import heu_plans, schedules, thrifty
from overlapc.solvers.choose.keep import keep_sets
from overlapc.solvers.choose.period import Periodic
from overlapc.solvers.constants import AT_BOUND, FEW, GAP, LARGE, NEAR, RUNGS
from overlapc.solvers.order.merging import LEFT, merged_plans
from overlapc.solvers.order.slices import solve_slices
from overlapc.solvers.order.work import NEVER

Plans = tuple[Plan, ...]


def solve_step(
    problem: Problem,
    solver: str,
    alone: Callable[[], Plan],
    microbatches: int,
    lag: int = 1,
    pairs: bool = False,
    rival: Callable[[int], Plan | None] | None = None,
    must_pair: bool = False,
) -> Plans:
    """Plans for a step of several microbatches that save the same values: of `problem`, which is
    that of one microbatch; of two merged microbatches, if merging is faster; and of the ends of a
    step in pairs, if `pairs` may be tried and are predicted to be faster still. `alone` gives the
    solver's plan of one microbatch, and `rival` the same if it takes less than so many nanoseconds.
    With `must_pair` a step in pairs is the answer, or none.

    The first `lag` forwards and the last backwards have nothing to merge with: they run by the
    first plan, or in pairs. HEU's plan of little effort is as good a start for merging as
    `overlap`'s, which takes many times as long to find. `overlap`'s is asked for only where
    microbatches one by one may be faster by 5% than merged ones, or by 1 to 2% than the quick start
    if merging gave nothing, as it must have in long graphs. (In none of the 101 steps of the
    benchmark set that merging makes faster is it faster still.)
    """
    step = _Step(problem, microbatches, lag)
    plans = step.solve(solver, alone, rival)
    if not pairs or lag != 1 or not step.may_merge:
        if must_pair:
            what = "one microbatch" if microbatches < 2 else "no communication to hide"
            raise OptionError(
                f'schedule="pairs": found {what}; expected several microbatches and collectives, '
                'or schedule="auto"'
            )
        return plans
    search = _Pairs(problem, microbatches, plans, quick=solver == "heu")
    found = search.solve(must_pair)
    if must_pair and found is plans:
        raise OptionError(
            'schedule="pairs": no step in pairs was found that fits memory_budget='
            f'{problem.budget_bytes} bytes; give more, or schedule="auto"'
        )
    return found


class _Step:
    """The search for a step without pairs."""

    def __init__(self, problem: Problem, microbatches: int, lag: int) -> None:
        self.problem, self.microbatches, self.lag = problem, microbatches, lag
        # Is there something to merge with, and something to hide?
        self.may_merge = microbatches > lag and bool(problem.trace.lanes)
        self.tried: set[Choice] = set()  # choices whose microbatches have been merged

    @cached_property
    def periodic(self) -> Periodic:
        return Periodic(self.problem, quick=True, reuses=True)

    def solve(
        self,
        solver: str,
        alone: Callable[[], Plan],
        rival: Callable[[int], Plan | None] | None,
    ) -> Plans:
        problem, microbatches = self.problem, self.microbatches
        if solver != "overlap" or not self.may_merge:
            return self.merged(alone())
        start = quick_start(problem, periodic=self.periodic)
        if start is None:
            return self.merged(alone())
        quick = self.merged(start)
        took = _took(problem, quick, microbatches, self.lag)
        slow = len(problem.trace.ops) > LARGE and len(quick) > 1  # `overlap` takes half a minute
        bounds = (bound(problem) for bound in (simple_bound_ns, bound_ns))  # the second is slow
        near = NEAR if len(quick) > 1 else 1 + (NEAR - 1) / FEW
        if slow or any(took <= microbatches * bound * near for bound in bounds):
            return quick  # or `overlap` gains little or nothing
        known = rival(-(-took // microbatches)) if rival is not None else alone()
        if known is None or took <= microbatches * step_ns(problem, known):
            return quick
        return self.merged(known)

    def merged(self, lone: Plan) -> Plans:
        """The lone plan, or plans of merged microbatches if these are faster. A choice that an
        earlier call has tried is not tried again."""
        problem, lag = self.problem, self.lag
        if not self.may_merge:
            return (lone,)
        both = merge(problem, lag)
        if step_ns(problem, lone) <= simple_bound_ns(both) * AT_BOUND:
            return (lone,)  # merged microbatches take as long
        known = dict.fromkeys([choice_of(problem, lone), *_known(self.periodic)])
        new = [choice for choice in known if choice not in self.tried]
        self.tried.update(new)
        best: tuple[int, Plans] = step_ns(problem, lone) * self.microbatches, (lone,)
        few = FEW if len(problem.trace.ops) <= LARGE else 1
        for merged in merged_plans(both, new)[:few]:
            for own in schedules(problem, merged.choice, problem.budget_bytes):
                if peak_bytes(problem, own) > (problem.budget_bytes or NEVER):
                    continue
                steady_ns = (self.microbatches - lag) * merged.step_ns
                total_ns = lag * step_ns(problem, own) + steady_ns
                if total_ns < best[0]:
                    best = total_ns, (own, merged.plan)
        return best[1]


def _took(problem: Problem, plans: Plans, microbatches: int, lag: int) -> int:
    """What a step without pairs takes."""
    lone, *merged = plans
    if not merged:
        return microbatches * step_ns(problem, lone)
    steady_ns = step_ns(merge(problem, lag), merged[0])
    return lag * step_ns(problem, lone) + (microbatches - lag) * steady_ns


def quick_start(
    problem: Problem, others: Iterable[Plan] = (), periodic: Periodic | None = None
) -> Plan | None:
    """HEU's plan of one microbatch or slice, found with little effort, or one of the `others` if
    that is faster; None if nothing fits."""
    limit = problem.budget_bytes if problem.budget_bytes is not None else NEVER
    plans = chain(others, heu_plans(problem, thorough=False, periodic=periodic))
    fit = [plan for plan in plans if peak_bytes(problem, plan) <= limit]
    return min(fit, key=lambda plan: step_ns(problem, plan), default=None)


def _known(periodic: Periodic) -> Iterator[Choice]:
    """Choices of what to keep where microbatches are held together."""
    problem, needs = periodic.problem, periodic.needs
    yield from thrifty(periodic, LEFT)
    for storages in keep_sets(problem, needs, 2 * RUNGS):
        yield needs.complete(storages, "hull")


class _Pairs:
    """The search for a step in pairs that is faster than the step of the `plans` known."""

    def __init__(self, problem: Problem, microbatches: int, plans: Plans, quick: bool) -> None:
        self.problem, self.plans, self.quick = problem, plans, quick
        self.between = microbatches - 2  # so many merged microbatches are in the middle
        self.ends, self.middle = in_pairs(problem)
        self.held = held_in_pairs(problem)
        self.best_ns, self.best = _took(problem, plans, microbatches, 1), plans

    def may_win(self) -> bool:
        """Is there something to gain? In the middle there is not: what is merged there holds more
        and does the same."""
        if not self.between:
            return simple_bound_ns(self.ends) * (1 + GAP) < self.best_ns
        if len(self.plans) < 2:
            return False
        steady_ns = step_ns(merge(self.problem), self.plans[1])
        least_ns = simple_bound_ns(self.ends) + self.between * steady_ns
        return least_ns * (1 + GAP) < self.best_ns

    def solve(self, must: bool = False) -> Plans:
        if must:
            self.best_ns = NEVER
        elif not self.may_win():
            return self.plans
        choices = [
            choice_of(self.problem, self.plans[0]),
            *_known(Periodic(self.held, quick=True)),
        ]
        if not self.between:
            self.try_ends(choices)
            return self.best
        few = FEW if len(self.problem.trace.ops) <= LARGE else 1
        for merged in merged_plans(self.middle, choices)[:few]:
            self.try_ends([merged.choice], merged.step_ns, merged.plan)
        return self.best

    def try_ends(self, choices: list[Choice], steady_ns: int = 0, *middle: Plan) -> None:
        """Plan the ends by one of the choices. If there is a `middle`, its plan has made that
        choice, and takes `steady_ns` for each forward."""
        took_ns = self.between * steady_ns
        found = (self.one_by_one(choice) for choice in choices)
        lone = next(filter(None, found), None)
        if lone is None or took_ns + simple_bound_ns(self.ends) >= self.best_ns:
            return
        pair = solve_slices(self.ends, self.held, lone, self.quick, list(dict.fromkeys(choices)))
        total_ns = took_ns + step_ns(self.ends, pair)
        if total_ns < self.best_ns:
            mine = of_slice(pair, 0, self.problem.trace.digest)
            alike = choice_of(self.problem, mine) == choice_of(self.problem, lone)
            self.best_ns, self.best = total_ns, (lone if alike else mine, *middle, pair)

    def one_by_one(self, choice: Choice) -> Plan | None:
        """The fastest plan of one microbatch with which two fit one after the other, each forward
        before each backward; None if none of this choice does."""
        ends, held = self.ends, self.held
        limit = NEVER if ends.budget_bytes is None else ends.budget_bytes
        if Least(held).bytes(choice) > limit:
            return None
        plans = schedules(held, choice, held.budget_bytes)
        plain = next(iter(plans))  # which takes the least memory, or little more
        if peak_bytes(ends, one_by_one(ends, plain)) > limit:
            return None
        fit = (plan for plan in plans if peak_bytes(ends, one_by_one(ends, plan)) <= limit)
        return min((plain, *fit), key=lambda plan: step_ns(held, plan))
