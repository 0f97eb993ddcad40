"""The first solver: keep what is dear to recompute, and fill communication windows jointly with
recompute and weight gradients.

    keep_path      which storages to save, for less and less memory
    list_schedule  for one choice and one memory limit, an issue order
    overlap_plans  a menu of both, the same for every budget

Recompute has a deadline and raises memory until its use; a weight gradient can wait but keeps
its inputs alive until it runs. So a window takes recompute first (it is lost as a filler once
its deadline comes) and weight gradients after.
"""

from __future__ import annotations

from collections.abc import Iterator

from overlapc.ir import Plan, Problem
from overlapc.simulate import memory_curve
from overlapc.solvers.choice import Choice, Needs, on_demand
from overlapc.solvers.keep import keep_path
from overlapc.solvers.listing import Style, list_schedule
from overlapc.solvers.work import NEVER, backward_work, forward_work

_STYLES = (Style(1.0, False), Style(4.0, False), Style(2.0, True))
_EVALUATIONS = 90_000  # about how many ops are scheduled in all for one problem


def overlap_plans(problem: Problem) -> Iterator[Plan]:
    """Candidate plans over the whole range of memory, whatever the budget is."""
    needs = Needs(problem.trace)
    path = keep_path(problem, needs)
    effort = max(1, _EVALUATIONS // max(1, len(problem.trace.ops)))
    points = _points(problem, needs, path, at_most=min(48, max(8, effort // 3)))
    forward = _forward_orders(problem)
    ceiling = max(peak for peak, _ in points) * 5 // 4
    floor = min(peak for peak, _ in points)
    rungs = min(14, max(5, effort // 12), 2 + len(problem.trace.ops) // 4)
    levels = sorted(
        {floor + (ceiling - floor) * i // rungs for i in range(rungs + 1)}
        | {peak for peak, _ in points[:1]}
    )
    styles = _STYLES if effort > 60 else _STYLES[:1] if effort < 20 else _STYLES[:2]
    shares = (1000, 940, 860, 740) if effort > 60 else (970, 850)
    tried: set[tuple[int, int, Style]] = set()
    found: set[tuple[int, tuple[str, ...]]] = set()
    for _, choice in points:
        yield _plan(problem, choice, on_demand(problem.trace, choice))
    for level in levels:
        for share in shares:
            fitting = [i for i, (peak, _) in enumerate(points) if peak * 1000 <= level * share]
            if not fitting:
                continue
            chosen = fitting[0]
            for style in styles:
                if (chosen, level, style) in tried:
                    continue
                tried.add((chosen, level, style))
                choice = points[chosen][1]
                backward = list_schedule(backward_work(problem, choice), level, style)
                if (chosen, backward) in found:
                    continue
                found.add((chosen, backward))
                for first in forward:
                    yield _plan(problem, choice, first + backward)


def _plan(problem: Problem, choice: Choice, order: tuple[str, ...]) -> Plan:
    return Plan(problem.trace.digest, "overlap", choice.saved, order)


def _points(
    problem: Problem, needs: Needs, path: list[frozenset[str]], at_most: int
) -> list[tuple[int, Choice]]:
    """Choices along the path with the peak of their plain order, peaks falling."""
    size = {value.storage: value.bytes for value in problem.trace.values}
    weights = [sum(size[s] for s in kept) for kept in path]
    span = weights[0] - min(weights)
    wanted = [weights[0] - span * i // at_most for i in range(at_most + 1)]
    picked: list[int] = []
    index = 0
    for weight in wanted:
        while index + 1 < len(path) and weights[index] > weight:
            index += 1
        if not picked or picked[-1] != index:
            picked.append(index)
    found: list[tuple[int, Choice]] = []
    for i in picked:
        choice = needs.complete(path[i])
        plan = _plan(problem, choice, on_demand(problem.trace, choice))
        peak = max(memory_curve(problem, plan), default=0)
        if not found or peak < found[-1][0]:
            found.append((peak, choice))
    return found


def _forward_orders(problem: Problem) -> list[tuple[str, ...]]:
    """The trace's own forward order, and one that starts collectives as early as it can."""
    plain = tuple(op.name for op in problem.trace.ops if op.is_forward)
    early = list_schedule(forward_work(problem), NEVER, Style(1.0, True))
    return [plain] if early == plain else [plain, early]
