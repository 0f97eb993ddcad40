"""Solvers: from a Problem to a Plan. Torch-free; `simulate` is their only judge.

`solve(problem, name)` hands out the fastest plan found that fits the budget, never one predicted
slower than a baseline that fits. Which plans are compared does not depend on the budget, so a
smaller budget never gives a faster plan nor a larger peak.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from overlapc.check import check
from overlapc.errors import Infeasible, OptionError
from overlapc.ir import Plan, Problem
from overlapc.simulate import simulate
from overlapc.solvers import baselines
from overlapc.solvers.bounds import bound_ns
from overlapc.solvers.choice import Choice, plan_on_demand
from overlapc.solvers.overlap import overlap_plans, steady_plans

__all__ = ["BASELINES", "SOLVERS", "best_baseline", "bound_ns", "smallest_bytes", "solve"]

BASELINES: dict[str, Callable[[Problem], Plan]] = {
    "none": baselines.none,
    "full": baselines.full,
    "selective": baselines.selective,
}
SOLVERS = ("overlap", *BASELINES, "torch")


def solve(
    problem: Problem, solver: str = "overlap", torch_choices: Sequence[tuple[str, ...]] = ()
) -> Plan:
    """The best plan of this solver (or baseline) that fits the problem's budget.

    `torch_choices` are saved sets PyTorch's partitioner proposes; they are the plans of solver
    "torch" and further candidates for "overlap". Raises Infeasible, naming the smallest budget
    that works, if nothing fits.
    """
    if solver not in SOLVERS:
        raise OptionError(f"solver={solver!r}: expected one of {', '.join(SOLVERS)}")
    if solver == "torch" and not torch_choices:
        raise OptionError(
            'solver="torch" needs the saved sets that PyTorch\'s partitioner proposes, and found '
            'none: pass torch_choices, or use "overlap"'
        )
    if solver != "overlap":
        return _best(problem, _candidates(problem, solver, torch_choices))
    steady = [*(make(problem) for make in BASELINES.values()), *steady_plans(problem)]
    try:
        return _best(problem, [*steady, *_candidates(problem, solver, torch_choices, steady)])
    except Infeasible:
        return _best(problem, steady)  # names a budget that works in every run


def smallest_bytes(problem: Problem) -> int:
    """The smallest budget that surely works: the one an Infeasible names."""
    plans = [*(make(problem) for make in BASELINES.values()), *steady_plans(problem)]
    return min(simulate(problem, plan).peak_bytes for plan in plans)


def best_baseline(problem: Problem) -> Plan:
    """The fastest baseline that fits."""
    return _best(problem, (make(problem) for make in BASELINES.values()))


def _best(problem: Problem, plans: Iterable[Plan]) -> Plan:
    best: tuple[int, int, Plan] | None = None
    smallest: int | None = None
    for plan in plans:
        timeline = simulate(problem, plan)
        smallest = min(timeline.peak_bytes, smallest or timeline.peak_bytes)
        if problem.budget_bytes is not None and timeline.peak_bytes > problem.budget_bytes:
            continue
        key = (timeline.step_ns, timeline.peak_bytes, plan)
        if best is None or key[:2] < best[:2]:
            best = key
    if best is None:
        raise Infeasible(problem.budget_bytes or 0, smallest or 0)
    check(problem, best[2])
    return best[2]


def _candidates(
    problem: Problem,
    solver: str,
    torch_choices: Sequence[tuple[str, ...]],
    others: Sequence[Plan] = (),
) -> Iterator[Plan]:
    if solver in BASELINES:
        yield BASELINES[solver](problem)
        return
    plans = [_torch(problem, names) for names in torch_choices]
    yield from plans
    if solver == "overlap":
        choices = [Choice(plan.saved, plan.recomputed) for plan in (*others, *plans)]
        yield from overlap_plans(problem, choices)


def _torch(problem: Problem, saved: Sequence[str]) -> Plan:
    """The plan that saves exactly these values and recomputes the rest on demand."""
    kept = (problem.trace.value[name].storage for name in saved)
    return plan_on_demand(problem, kept, "torch")
