"""Solvers turn a Problem into a Plan. They are torch-free, and only `simulate` judges their plans.

    overlap   the default: a menu of plans that does not depend on the budget, so a smaller
              budget never gives a larger peak, nor a plan that is faster by 1/10,000
    heu       one small program for the repeated block, found in hundredths of a second at any
              depth, and a few schedules of what it chose: the quickest
    opt       the best plan that can be found, with a proven bound: up to a minute
    torch     what PyTorch's own partitioner would save
    ...       what others would run: `baselines`, `modules`

`solve(problem, name)` returns the fastest plan found that fits the budget. overlap, heu and opt
never return a plan predicted slower than the baselines none, full and selective; opt, and heu
beyond a handful of ops, none slower than uniform, block, Megatron's and Lancet's either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain

from overlapc.core.check import check
from overlapc.core.errors import Infeasible, OptionError
from overlapc.core.ir import Plan, Problem
from overlapc.core.simulate import peak_bytes, step_ns
from overlapc.solvers.bound.bounds import Least, Within, bound_ns, simple_bound_ns
from overlapc.solvers.choose.choice import Choice, Needs, choice_of, plan_on_demand
from overlapc.solvers.choose.heu import heu_plans, ordered
from overlapc.solvers.choose.keep import keep_sets
from overlapc.solvers.choose.opt import SolverProgress, opt
from overlapc.solvers.choose.overlap import overlap_plans, steady_plans
from overlapc.solvers.choose.period import Periodic
from overlapc.solvers.constants import AT_BOUND, FEW, LADDER, LARGE, RUNGS, SMALL, STEPS
from overlapc.solvers.field import baselines
from overlapc.solvers.field.modules import PREFIX, by_module, modules_of
from overlapc.solvers.order.merging import merged_plans
from overlapc.solvers.order.placing import can_place, placed
from overlapc.tools.collecting import of_young_alone

__all__ = [
    "BASELINES",
    "FIELD",
    "ONE_PLAN",
    "PREFIX",
    "SEARCHED",
    "SOLVERS",
    "Progress",
    "best_baseline",
    "bound_ns",
    "faster",
    "generators",
    "has_one_plan",
    "is_of_field",
    "menu",
    "modules_of",
    "simple_plans",
    "smallest_bytes",
    "solve",
]

BASELINES: dict[str, Callable[[Problem], Plan]] = {
    "none": baselines.none,
    "full": baselines.full,
    "selective": baselines.selective,
}
FIELD: dict[str, Callable[[Problem], Plan]] = BASELINES | {
    "whole": baselines.whole,
    "uniform": baselines.uniform,
    "block": baselines.block,
    "checkmate": baselines.checkmate,
    "megatron": baselines.megatron,
    "megatron-none": baselines.megatron_none,
    "megatron-selective": baselines.megatron_selective,
    "megatron-full": baselines.megatron_full,
    "lancet": baselines.lancet,
    "lynx": baselines.lynx,
}
# These have one plan, however much memory there is and however many microbatches are in flight.
ONE_PLAN = (*BASELINES, "whole", "megatron-none", "megatron-selective", "megatron-full")
SEARCHED = ("overlap", "heu", "opt")  # by these plans are searched for, not made by a rule
SOLVERS = (*SEARCHED, *FIELD, "torch")


def is_of_field(solver: str) -> bool:
    """Is this what others would run: one of `FIELD`, or Megatron's recompute of some modules?"""
    return solver in FIELD or solver.startswith(PREFIX)


def has_one_plan(solver: str) -> bool:
    return solver in ONE_PLAN or solver.startswith(PREFIX)


_QUICK = ("uniform", "block", "megatron", "lancet")  # found in tenths of a second


@of_young_alone()
def solve(
    problem: Problem,
    solver: str = "overlap",
    torch_choices: Iterable[tuple[str, ...]] = (),
    *,
    time_limit_s: float = 60.0,
    gap: float = 0.001,
    progress: Callable[[SolverProgress], None] = lambda _: None,
) -> Plan:
    """Return the best plan of this solver (or baseline) that fits the problem's budget.

    `torch_choices` are saved sets that PyTorch's partitioner proposes: the plans of solver "torch",
    and more candidates for "opt". Only "opt" reads `time_limit_s`, `gap` (it stops when this gap is
    proven) and `progress`. If nothing fits, Infeasible names the smallest budget that works.
    """
    if solver not in SOLVERS and not solver.startswith(PREFIX):
        raise OptionError(f"solver={solver!r}: expected one of {', '.join(SOLVERS)}")
    if problem.trace.ahead:
        return _merged(problem, solver)
    if solver == "torch":
        theirs = [_torch(problem, names) for names in torch_choices]
        if not theirs:
            raise OptionError(
                'solver="torch" needs the saved sets that PyTorch\'s partitioner proposes, and '
                'found none: pass torch_choices, or use "overlap"'
            )
        return _best(problem, theirs)
    if is_of_field(solver):
        plan = FIELD[solver](problem) if solver in FIELD else by_module(problem, solver)
        return _best(problem, [plan])
    best = _Best(problem)
    try:
        if solver == "overlap":
            return _overlap(problem, best).plan()
        tried = generators(problem, solver, torch_choices, best)
        if solver != "opt":
            if not best.take(chain.from_iterable(tried.values())):
                best.take_placed()
            return best.plan()
        known = chain(tried.pop("baselines"), tried.pop("sizes"), tried.pop("others'"))
        last = () if len(problem.trace.ops) <= SMALL else tried.pop("ladder")
        first = chain.from_iterable(tried.values())
        found = opt(
            problem, known, first, last, time_limit_s=time_limit_s, gap=gap, progress=progress
        )
    except Infeasible:
        # Its Infeasible names a budget that works in every run.
        return _best(problem, simple_plans(problem))
    check(problem, found)
    return found


def faster(problem: Problem, than_ns: int) -> Plan | None:
    """Return the plan of `overlap` if it takes less time than this, else None. It is quicker than
    `solve`: choices that cannot be that fast are not ordered."""
    best = _overlap(problem, _Best(problem, than_ns))
    return best.plan() if best.found else None


def _overlap(problem: Problem, best: _Best) -> _Best:
    """Search the menu of `overlap` until a plan is as fast as any can be."""
    best.goal_ns = int(simple_bound_ns(problem) * AT_BOUND)
    if not best.take(make(problem) for make in BASELINES.values()):
        unlimited = replace(problem, budget_bytes=None)  # so the goal is the same for every budget
        best.goal_ns = int(bound_ns(unlimited) * AT_BOUND)
        if not best.take(chain.from_iterable(generators(problem, "overlap", (), best).values())):
            best.take_placed()
    return best


def generators(
    problem: Problem,
    solver: str,
    torch_choices: Iterable[tuple[str, ...]] = (),
    best: _Best | None = None,
) -> dict[str, Iterable[Plan]]:
    """Return the generators of overlap, heu or opt by name, in the order in which they are tried.
    Each makes plans, which may not fit, as they are asked for, and skips choices that cannot beat
    the `best` so far."""
    cheap = [make(problem) for make in BASELINES.values()]
    found: dict[str, Iterable[Plan]] = {"baselines": cheap}
    rivals = (FIELD[name](problem) for name in _QUICK)
    if solver == "heu" and len(problem.trace.ops) > SMALL:
        hopeful = any(baselines.fits(problem, plan) for plan in cheap)
        blocks = heu_plans(problem, hopeful=hopeful)
        return found | {"others'": rivals, "blocks": blocks, "filled": _filled(problem, best)}
    found["sizes"] = sizes = steady_plans(problem)
    simple = [*cheap, *sizes]
    if solver == "heu":
        return found | {"ladder": _ladder(problem, simple, best)}
    choices = [choice_of(problem, plan) for plan in simple]
    if solver == "overlap":
        found["menu"] = overlap_plans(problem, choices, worth=best.worth if best else _any)
        return found | {"ladder": _ladder(problem, simple, best, quick=True)}
    found["others'"] = rivals
    found["torch"] = _theirs(problem, torch_choices)
    found["menu"] = overlap_plans(problem, choices)
    found["ladder"] = _ladder(problem, simple)
    return found | {"blocks": heu_plans(problem, grouped=True)}


def menu(
    problem: Problem, solver: str, torch_choices: Iterable[tuple[str, ...]] = ()
) -> Iterator[Plan]:
    """Plans of this solver over the whole range of memory, whatever the problem's budget is. "opt"
    has the same menu as "overlap"."""
    if solver == "torch":
        yield from (_torch(problem, names) for names in torch_choices)
        return
    if solver in FIELD:
        yield FIELD[solver](problem)
        return
    needs = Needs(problem.trace)
    steady = simple_plans(problem)
    yield from steady
    kept = keep_sets(problem, needs, 2 * FEW * RUNGS)
    yield from (plan_on_demand(problem, each, solver, needs, "hull") for each in kept)
    if problem.trace.lanes:  # without collectives no order is faster
        choices = [choice_of(problem, plan) for plan in steady]
        yield from overlap_plans(problem, choices) if solver != "heu" else ()
        yield from _ladder(problem, steady)


def _merged(problem: Problem, solver: str) -> Plan:
    """The best plan found for merged microbatches, which all solvers search alike."""
    if solver not in SEARCHED:
        raise OptionError(
            f"solver={solver!r} cannot plan merged microbatches; expected overlap, heu or opt"
        )
    needs = Needs(problem.trace)
    choices = [needs.complete(kept, "hull") for kept in keep_sets(problem, needs, 2 * RUNGS)]
    found = merged_plans(problem, choices)
    if found:
        check(problem, found[0].plan)
        return found[0].plan
    free = merged_plans(replace(problem, budget_bytes=None), choices)
    smallest = [peak_bytes(problem, merged.plan) for merged in free]
    raise Infeasible(problem.budget_bytes or 0, min(smallest))


# A ladder's rungs in halves, the last in quarters and eighths: a step grows fastest there.
_QUARTER = 1 / (FEW + 1)
_FINE = (
    *(n / 2 for n in range(2 * RUNGS, FEW, -1)),
    *(n * _QUARTER for n in range(2 * FEW + 1, 1, -1)),
    *(n * _QUARTER / 2 for n in range(FEW, -1, -1)),
)
_FINER = STEPS // RUNGS  # so many times as many steps at the last rungs


def _ladder(
    problem: Problem, steady: Sequence[Plan], best: _Best | None = None, quick: bool = False
) -> Iterator[Plan]:
    """HEU's plans for budgets from the largest to the smallest that make sense, whatever the
    problem's own budget is. It ends where no plan for a smaller budget can beat the `best` so
    far. `quick`: its programs are solved in half the time, and may find others of equal worth."""
    peaks = [peak_bytes(problem, plan) for plan in steady]
    least, most = min(peaks), max(peaks)
    ops = len(problem.trace.ops)
    rungs = RUNGS if quick else max(FEW, min(RUNGS, LADDER // max(1, ops)))
    periodic = Periodic(replace(problem, budget_bytes=most), quick=quick, reuses=quick)

    def budget_of(rung: float) -> int:
        return least + round((most - least) * rung / rungs)

    gathers = quick and bool(periodic.needs.gathered)
    if gathers:
        yield from _gathered_again(problem, periodic, best)
    for rung in _FINE if quick else range(rungs, -1, -1):
        above = budget_of(rung + 1) if rung < rungs else None  # no plan takes more
        if above is not None and best is not None and not best.beaten_within(above):
            return
        tight = rung <= (0 if quick and FEW * ops > LARGE else 1) and ops <= LARGE
        groups = None if rung == 0 else False  # takes seconds, and only the least memory needs it
        if rung == 0 and quick:  # of what is as good there, little fits once it is in order
            periodic = Periodic(replace(problem, budget_bytes=most))
        steps = STEPS * (_FINER if rung <= 1 else 1) if quick and rung else 0
        less, worth = periodic.within(budget_of(rung), steps), best.worth if best else _any
        for plan in heu_plans(
            less.problem, thorough=tight, grouped=groups, quick=gathers, worth=worth, periodic=less
        ):
            if above is None or peak_bytes(problem, plan) <= above:
                yield replace(plan, found_by=f"rung {rung:g} of {rungs} {plan.found_by}")


def _gathered_again(problem: Problem, periodic: Periodic, best: _Best | None) -> Iterator[Plan]:
    """HEU's plans for what FSDP2 takes, which keeps all but the weights it gathers: the budget of
    whoever gives none."""
    kept = [each for each in periodic.needs.storages if each not in periodic.needs.gathered]
    limit = peak_bytes(problem, plan_on_demand(problem, kept, ""))
    less, worth = periodic.within(limit, STEPS * _FINER), best.worth if best else _any
    for plan in heu_plans(
        less.problem, thorough=False, grouped=False, quick=True, worth=worth, periodic=less
    ):
        yield replace(plan, found_by=f"weights gathered again, {plan.found_by}")


def _filled(problem: Problem, best: _Best | None) -> Iterator[Plan]:
    """Orders of what the best plan so far keeps, if it is a baseline's: windows are empty there."""
    if best is not None and best.found is not None and not best.found[1].found_by:
        yield from ordered(problem, best.found[1])


def _theirs(problem: Problem, torch_choices: Iterable[tuple[str, ...]]) -> Iterator[Plan]:
    """Plans that save what PyTorch's partitioner saves. It is asked only where there are
    collectives: without them `keep_sets` has its minimum cut."""
    if problem.trace.lanes:
        plans = [_torch(problem, names) for names in torch_choices]
        yield from plans
        if plans:
            choices = [choice_of(problem, plan) for plan in plans]
            yield from overlap_plans(problem, choices, own=False)


def _any(_: Choice) -> bool:
    return True


def simple_plans(problem: Problem) -> list[Plan]:
    """Plans that depend on sizes alone, the same in every run."""
    return [*(make(problem) for make in BASELINES.values()), *steady_plans(problem)]


def smallest_bytes(problem: Problem) -> int:
    """The smallest budget that surely works; Infeasible names it."""
    return min(peak_bytes(problem, plan) for plan in simple_plans(problem))


def best_baseline(problem: Problem) -> Plan:
    """The fastest baseline that fits."""
    return _best(problem, (make(problem) for make in BASELINES.values()))


def _best(problem: Problem, plans: Iterable[Plan]) -> Plan:
    best = _Best(problem)
    best.take(plans)
    return best.plan()


class _Best:
    """The fastest plan that fits among those offered; among equally fast ones, the smallest peak.

    The first plan that takes at most `goal_ns` ends the search. The budget only decides which plans
    fit, so a smaller budget never gives a larger peak. Plans that take `than_ns` or more do not
    count.
    """

    def __init__(self, problem: Problem, than_ns: int | None = None) -> None:
        self.problem = problem
        self.than_ns = than_ns
        self.goal_ns = 0
        self.found: tuple[tuple[int, int], Plan] | None = None
        self.smallest: int | None = None
        self.offered = 0
        self.least = Least(problem)
        self.places = can_place(problem)
        self.tried: list[tuple[int, int, Plan]] = []  # time, peak; only of what may be placed

    def take(self, plans: Iterable[Plan]) -> bool:
        """Judge plans until one reaches the goal; return whether one did."""
        budget = self.problem.budget_bytes
        for plan in plans:
            self.offered += 1
            peak = peak_bytes(self.problem, plan)
            self.smallest = peak if self.smallest is None else min(self.smallest, peak)
            if self.places:
                self.tried.append((step_ns(self.problem, plan), peak, plan))
            if budget is not None and peak > budget:
                continue
            key = self.tried[-1][0] if self.places else step_ns(self.problem, plan), peak
            if self.than_ns is not None and key[0] >= self.than_ns:
                continue
            if self.found is None or key < self.found[0]:
                self.found = key, plan
            if key[0] <= self.goal_ns:
                return True
        return False

    def take_placed(self) -> None:
        """Judge plans with the gathers and reductions placed of those that no other beats in both
        peak and the least time that any order of its choice takes. They do not depend on the
        budget."""
        front: list[tuple[int, Plan]] = []
        least: int | None = None
        found = [(self._least_ns(plan), ns, peak, plan) for ns, peak, plan in self.tried]
        for could_ns, _, peak, plan in sorted(found, key=lambda each: each[:3]):
            if least is None or peak < least:
                least = peak
                front.append((could_ns, plan))
        self.places = False
        for could_ns, plan in front:
            if self.may_count(could_ns):
                self.take(placed(self.problem, plan))

    def _least_ns(self, plan: Plan) -> int:
        return self.least.ns(choice_of(self.problem, plan))

    def worth(self, choice: Choice) -> bool:
        """Could a plan of this choice be the result? Skipping those that could not changes no
        result."""
        budget = self.problem.budget_bytes
        if budget is not None and self.least.bytes(choice) > budget:
            return False
        return self.may_count(self.least.ns(choice))

    def may_count(self, ns: float) -> bool:
        """Could a plan that takes so long be the result?"""
        if self.found is not None:
            return ns <= self.found[0][0]
        return self.than_ns is None or ns < self.than_ns

    def beaten_within(self, budget_bytes: int) -> bool:
        """Could a plan of at most so many bytes be the result? For large problems the answer is
        yes: proving otherwise takes longer than trying."""
        if len(self.problem.trace.ops) > LARGE or (self.found is None and self.than_ns is None):
            return True
        return self.may_count(self.within.ns(budget_bytes))

    @cached_property
    def within(self) -> Within:
        return Within(self.problem)

    def plan(self) -> Plan:
        if self.found is None:
            raise Infeasible(self.problem.budget_bytes or 0, self.smallest or 0)
        plan = self.found[1]
        check(self.problem, plan)
        found_by = plan.found_by and f"{plan.found_by}; of {self.offered} plans"
        return replace(plan, found_by=found_by)


def _torch(problem: Problem, saved: Sequence[str]) -> Plan:
    """The plan that saves exactly these values and recomputes the rest on demand."""
    kept = (problem.trace.value[name].storage for name in saved)
    return plan_on_demand(problem, kept, "torch", found_by="torch")
