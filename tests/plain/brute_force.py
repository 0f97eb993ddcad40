"""The best plan by trying all: every set of saved values, of recomputed ops, and every order.

Written from the rules of `check` and judged by `simulate`; shares nothing with the solvers.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, combinations

from overlapc.core.check import check
from overlapc.core.errors import InvalidPlan
from overlapc.core.ir import Plan, Problem, issue, parse_issue
from overlapc.core.simulate import simulate


class TooMany(Exception):
    """More plans than a test has time for."""


def brute_force(problem: Problem, most: int) -> int | None:
    """The least step time of a legal plan within the budget; None if nothing fits."""
    trace = problem.trace
    forward = [op for op in trace.ops if op.is_forward]
    read = {name for op in trace.ops for name in op.inputs}
    values = [name for op in forward if op.role != "start" for name in op.outputs if name in read]
    again = [op.name for op in forward if op.recomputable]
    if 2 ** (len(values) + len(again)) > most:
        raise TooMany
    best = None
    tried = 0
    for saved in _subsets(values):
        for recomputed in _subsets(again):
            for order in _orders(problem, set(saved), set(recomputed)):
                tried += 1
                if tried > most:
                    raise TooMany
                plan = Plan(trace.digest, "brute", tuple(saved), tuple(order))
                try:
                    check(problem, plan)
                except InvalidPlan:
                    continue
                timeline = simulate(problem, plan)
                if problem.budget_bytes is None or timeline.peak_bytes <= problem.budget_bytes:
                    best = min(timeline.step_ns, best if best is not None else timeline.step_ns)
    return best


def _subsets(items: list[str]) -> Iterator[tuple[str, ...]]:
    return chain.from_iterable(combinations(items, n) for n in range(len(items) + 1))


def _orders(problem: Problem, saved: set[str], recomputed: set[str]) -> Iterator[list[str]]:
    """Orders in which every read is of something made before, or none if that cannot be."""
    trace = problem.trace
    everything = [op.name for op in trace.ops] + [issue(name, True) for name in recomputed]
    needs: dict[str, set[str]] = {}
    for text in everything:
        name, rerun = parse_issue(text)
        op = trace.op[name]
        needs[text] = {name} if rerun and not problem.trace.lag else set()
        for given in op.inputs:
            producer = trace.value[given].producer
            if producer:
                late = trace.op[producer].is_forward and (rerun or not op.is_forward)
                if not (problem.trace.lag and late and given in saved):
                    needs[text].add(issue(producer, late and given not in saved))
    if any(not needed <= set(everything) for needed in needs.values()):
        return
    order: list[str] = []

    def extend() -> Iterator[list[str]]:
        if len(order) == len(everything):
            yield order
        reached = problem_phase(order[-1]) if order else 0
        for text in everything:
            if text in order or not needs[text] <= set(order) or problem_phase(text) < reached:
                continue
            order.append(text)
            yield from extend()
            order.pop()

    def problem_phase(text: str) -> int:
        name, rerun = parse_issue(text)
        return problem.phase_of(trace.op[name], rerun)

    yield from extend()
