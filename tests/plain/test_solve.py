"""Solvers on random small problems: legal, within budget, never worse, monotone in the budget."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings

from overlapc.check import check
from overlapc.errors import Infeasible, OptionError
from overlapc.simulate import simulate
from overlapc.solvers import BASELINES, bound_ns, solve
from tests.plain.strategies import problems


@settings(max_examples=60)
@given(problems())
def test_solve_is_legal_never_worse_and_monotone(problem):
    free = replace(problem, budget_bytes=None)
    bound = bound_ns(free)
    baselines = [simulate(free, make(free)) for make in BASELINES.values()]
    top = max(t.peak_bytes for t in baselines)
    with pytest.raises(Infeasible) as error:
        solve(replace(free, budget_bytes=-1))
    smallest = error.value.smallest_bytes
    last = None
    for budget in sorted({smallest, (smallest + top) // 2, top, 2 * top}):
        limited = replace(free, budget_bytes=budget)
        plan = solve(limited)
        check(limited, plan)
        timeline = simulate(limited, plan)
        assert timeline.peak_bytes <= budget
        assert timeline.step_ns >= bound
        for baseline in baselines:
            if baseline.peak_bytes <= budget:
                assert timeline.step_ns <= baseline.step_ns
        if last is not None:
            assert timeline.step_ns <= last.step_ns
            assert timeline.peak_bytes >= last.peak_bytes
        last = timeline


def test_unknown_solver_is_named():
    with pytest.raises(OptionError, match="expected one of overlap"):
        solve(None, "magic")  # type: ignore[arg-type]
