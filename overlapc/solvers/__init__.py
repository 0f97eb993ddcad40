"""Solvers: from a Problem to a Plan. Torch-free; `simulate` is their only judge.

    overlap   the default: a menu of plans that does not depend on the budget, so a smaller
              budget never gives a faster plan nor a larger peak
    heu       one small program for the repeated block, found in hundredths of a second at any
              depth, and a few schedules of what it chose: the quickest
    opt       the best plan that can be found, with a proven bound: up to a minute
    torch     what PyTorch's own partitioner would save
    ...       what others would run: `baselines`

`solve(problem, name)` hands out the fastest plan found that fits the budget; of overlap, heu and
opt never one predicted slower than the baselines none, full and selective; of opt, and of heu
beyond a handful of ops, nor than uniform, block, Megatron's and Lancet's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain

from overlapc.check import check
from overlapc.errors import Infeasible, OptionError
from overlapc.ir import Plan, Problem
from overlapc.simulate import simulate
from overlapc.solvers import baselines
from overlapc.solvers.bounds import bound_ns
from overlapc.solvers.choice import Choice, Needs, plan_on_demand
from overlapc.solvers.heu import heu_plans
from overlapc.solvers.keep import keep_sets
from overlapc.solvers.merging import merged_plans
from overlapc.solvers.opt import Progress, opt
from overlapc.solvers.overlap import overlap_plans, steady_plans

__all__ = [
    "BASELINES",
    "FIELD",
    "SOLVERS",
    "Progress",
    "best_baseline",
    "bound_ns",
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
    "uniform": baselines.uniform,
    "block": baselines.block,
    "checkmate": baselines.checkmate,
    "megatron": baselines.megatron,
    "lancet": baselines.lancet,
    "lynx": baselines.lynx,
}
SOLVERS = ("overlap", "heu", "opt", *FIELD, "torch")
_QUICK = ("uniform", "block", "megatron", "lancet")  # found in tenths of a second
_SMALL = 64  # ops up to which heu, too, tries the same budgets whatever it is given
_LARGE = 1500  # ops up to which the smallest budgets of the ladder get all of HEU's effort
_RUNGS = 12


def solve(
    problem: Problem,
    solver: str = "overlap",
    torch_choices: Sequence[tuple[str, ...]] = (),
    *,
    time_limit_s: float = 60.0,
    gap: float = 0.001,
    progress: Callable[[Progress], None] = lambda _: None,
) -> Plan:
    """The best plan of this solver (or baseline) that fits the problem's budget.

    `torch_choices` are saved sets PyTorch's partitioner proposes; they are the plans of solver
    "torch" and further candidates for "overlap" and "opt". `time_limit_s`, `gap` (proven, at
    which it stops) and `progress` are opt's. Raises Infeasible, naming the smallest budget that
    works, if nothing fits.
    """
    if solver not in SOLVERS:
        raise OptionError(f"solver={solver!r}: expected one of {', '.join(SOLVERS)}")
    if problem.lag:
        return _merged(problem, solver)
    if solver == "torch":
        if not torch_choices:
            raise OptionError(
                'solver="torch" needs the saved sets that PyTorch\'s partitioner proposes, and '
                'found none: pass torch_choices, or use "overlap"'
            )
        return _best(problem, [_torch(problem, names) for names in torch_choices])
    if solver in FIELD:
        return _best(problem, [FIELD[solver](problem)])
    cheap = [make(problem) for make in BASELINES.values()]
    rivals = (FIELD[name](problem) for name in _QUICK)
    small = len(problem.trace.ops) <= _SMALL
    if solver == "heu" and not small:
        try:
            hopeful = any(baselines.fits(problem, plan) for plan in cheap)
            return _best(problem, chain(cheap, rivals, heu_plans(problem, hopeful=hopeful)))
        except Infeasible:
            return _best(problem, [*cheap, *steady_plans(problem)])
    steady = simple_plans(problem)
    ladder = _ladder(problem, steady)
    theirs = [_torch(problem, names) for names in torch_choices]
    choices = [Choice(plan.saved, plan.recomputed) for plan in (*steady, *theirs)]
    try:
        if solver == "heu":
            return _best(problem, [*steady, *ladder])
        menu = chain(steady, theirs, overlap_plans(problem, choices))
        if solver == "overlap":
            return _best(problem, chain(menu, ladder))
        menu = chain(menu, ladder if small else (), heu_plans(problem, grouped=True))
        found = opt(
            problem,
            [*steady, *rivals],
            menu,
            () if small else ladder,
            time_limit_s=time_limit_s,
            gap=gap,
            progress=progress,
        )
    except Infeasible:
        return _best(problem, steady)  # names a budget that works in every run
    check(problem, found)
    return found


def _merged(problem: Problem, solver: str) -> Plan:
    """The best found for merged pieces, for which there is one search."""
    if solver not in ("overlap", "heu", "opt"):
        raise OptionError(
            f"solver={solver!r} knows nothing of merged pieces; expected overlap, heu or opt"
        )
    needs = Needs(problem.trace)
    choices = [needs.complete(kept) for kept in keep_sets(problem, needs, 24)]
    found = merged_plans(problem, choices)
    if found:
        check(problem, found[0].plan)
        return found[0].plan
    free = merged_plans(replace(problem, budget_bytes=None), choices)
    smallest = [simulate(problem, merged.plan).peak_bytes for merged in free]
    raise Infeasible(problem.budget_bytes or 0, min(smallest))


def _ladder(problem: Problem, steady: Sequence[Plan]) -> Iterator[Plan]:
    """HEU's plans for budgets from the smallest to the largest that make sense, whatever the
    problem's own is."""
    peaks = [simulate(problem, plan).peak_bytes for plan in steady]
    least, most = min(peaks), max(peaks)
    rungs = max(3, min(_RUNGS, 9000 // max(1, len(problem.trace.ops))))
    for rung in range(rungs + 1):
        budget = least + (most - least) * rung // rungs
        tight = rung <= 1 and len(problem.trace.ops) <= _LARGE
        groups = None if rung == 0 else False  # seconds, for what only the least memory needs
        yield from heu_plans(replace(problem, budget_bytes=budget), thorough=tight, grouped=groups)


def simple_plans(problem: Problem) -> list[Plan]:
    """Plans that depend on sizes alone, the same in every run."""
    return [*(make(problem) for make in BASELINES.values()), *steady_plans(problem)]


def smallest_bytes(problem: Problem) -> int:
    """The smallest budget that surely works: the one an Infeasible names."""
    return min(simulate(problem, plan).peak_bytes for plan in simple_plans(problem))


def best_baseline(problem: Problem) -> Plan:
    """The fastest baseline that fits."""
    return _best(problem, (make(problem) for make in BASELINES.values()))


def _best(problem: Problem, plans: Iterable[Plan]) -> Plan:
    best: tuple[int, int, Plan] | None = None
    smallest: int | None = None
    for plan in plans:
        timeline = simulate(problem, plan)
        smallest = min(timeline.peak_bytes, timeline.peak_bytes if smallest is None else smallest)
        if problem.budget_bytes is not None and timeline.peak_bytes > problem.budget_bytes:
            continue
        key = (timeline.step_ns, timeline.peak_bytes, plan)
        if best is None or key[:2] < best[:2]:
            best = key
    if best is None:
        raise Infeasible(problem.budget_bytes or 0, smallest or 0)
    check(problem, best[2])
    return best[2]


def _torch(problem: Problem, saved: Sequence[str]) -> Plan:
    """The plan that saves exactly these values and recomputes the rest on demand."""
    kept = (problem.trace.value[name].storage for name in saved)
    return plan_on_demand(problem, kept, "torch")
