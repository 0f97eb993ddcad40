"""The default solver: keep what is expensive to recompute, and fill windows with recompute and
weight gradients together.

    keep_sets      which storages to save, for less and less memory
    list_schedule  for one choice and one memory limit, an issue order
    overlap_plans  a menu of both, the same for every budget

Recompute has a deadline and takes memory until its use. A weight gradient can wait but keeps its
inputs alive until it runs. So a window takes recompute first (after its deadline it can fill no
window) and then weight gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial

from overlapc.core.ir import Plan, Problem
from overlapc.core.simulate import memory_curve, simulate
from overlapc.solvers.choose.choice import Choice, Needs, plan_of, plan_on_demand
from overlapc.solvers.choose.keep import keep_sets
from overlapc.solvers.constants import EVALUATIONS, FEW, OVERSHOOT, RUNGS
from overlapc.solvers.order.listing import Style, list_schedule
from overlapc.solvers.order.work import NEVER, backward_work, forward_work

_STYLES = (Style(OVERSHOOT**2, False), Style(1.0, False), Style(OVERSHOOT, True))


def overlap_plans(
    problem: Problem,
    choices: Iterable[Choice] = (),
    own: bool = True,
    worth: Callable[[Choice], bool] = lambda _: True,
) -> Iterator[Plan]:
    """Candidate plans over the whole range of memory, whatever the budget is, the largest first.
    `choices` are other solvers' saved sets to schedule besides its `own`, or instead of them;
    choices that are not `worth` it are not scheduled."""
    needs = Needs(problem.trace)
    effort = max(1, EVALUATIONS // max(1, len(problem.trace.ops)))
    sets = min(4 * RUNGS, max(2 * RUNGS, effort // FEW))
    kept = keep_sets(problem, needs, sets) if own else []
    own_choices = [needs.complete(storages, "hull") for storages in kept]
    points = _points(problem, [*own_choices, *choices])
    ceiling = max(point.peak_bytes for point in points) * 5 // 4
    floor = min(point.peak_bytes for point in points)
    rungs = min(14, max(5, effort // RUNGS), 2 + len(problem.trace.ops) // 4)
    levels = {floor + (ceiling - floor) * i // rungs for i in range(rungs + 1)}
    levels.add(points[0].peak_bytes)
    styles = _STYLES if effort > 60 else _STYLES[:1] if effort < 20 else _STYLES[:2]
    shares = (1000, 940, 860, 740) if effort > 60 else (1000, 900)
    tried: set[tuple[int, int, Style]] = set()
    found: set[tuple[int, tuple[str, ...]]] = set()
    for point in points:
        yield plan_of(problem, point.choice, "overlap")
    if len(problem.phases) != 2:
        return  # not for merged microbatches: this scheduling separates forward and backward
    forward = _forward_orders(problem)
    work = cache(partial(backward_work, problem))
    for level in sorted(levels, reverse=True):
        for share in shares:
            fitting = [i for i, p in enumerate(points) if p.peak_bytes * 1000 <= level * share]
            if not fitting:
                continue
            chosen = fitting[0]
            for style in styles:
                choice = points[chosen].choice
                if (chosen, level, style) in tried or not worth(choice):
                    continue
                tried.add((chosen, level, style))
                backward = list_schedule(work(choice), level, style)
                if (chosen, backward) in found:
                    continue
                found.add((chosen, backward))
                for how, first in forward.items():
                    yield plan_of(problem, choice, "overlap", first + backward, f"{style}{how}")


def steady_plans(problem: Problem) -> list[Plan]:
    """Plans for less and less memory that depend on sizes alone, not on times: a plan that fits in
    one run fits in the next, although measured times differ."""
    costs = {
        op.name: replace(problem.cost(op.name), compute_ns=1000, comm_ns=0)
        for op in problem.trace.ops
    }
    alike = replace(problem, profile=replace(problem.profile, costs=costs))
    needs = Needs(problem.trace)
    kept = keep_sets(alike, needs, 2 * RUNGS)
    return [plan_on_demand(problem, each, "overlap", needs, "sizes") for each in kept]


@dataclass(frozen=True)
class _Point:
    choice: Choice
    peak_bytes: int  # peak of the plain order
    recompute_ns: int


def _points(problem: Problem, choices: Iterable[Choice]) -> list[_Point]:
    """The choices that no other beats in both peak and recompute time, by falling peak: the first
    that fits recomputes least."""
    points = []
    for choice in choices:
        plan = plan_of(problem, choice, "overlap")
        costs = [problem.cost(name) for name in choice.recomputed]
        ns = sum(cost.compute_ns + cost.comm_ns for cost in costs)
        points.append(_Point(choice, max(memory_curve(problem, plan), default=0), ns))
    best: list[_Point] = []
    for point in sorted(points, key=lambda p: (p.recompute_ns, p.peak_bytes)):
        if not best or point.peak_bytes < best[-1].peak_bytes:
            best.append(point)
    return best


def _forward_orders(problem: Problem) -> dict[str, tuple[str, ...]]:
    """The trace's own forward order, and the order that starts collectives as early as possible, if
    that is faster; each with its name."""
    plain = plan_on_demand(problem, Needs(problem.trace).storages, "plain")
    first = tuple(op.name for op in problem.trace.ops if op.is_forward)
    early = list_schedule(forward_work(problem), NEVER, Style(1.0, True))
    hurried = replace(plain, order=early + plain.order[len(early) :])
    gain = simulate(problem, plain).phase_ns[0] - simulate(problem, hurried).phase_ns[0]
    return {"": first, ", forward early": early} if gain > 0 else {"": first}
