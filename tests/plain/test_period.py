"""The program of the repeated block: what its limits are rounded to."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from overlapc.core.files import load_problem
from overlapc.core.simulate import peak_bytes
from overlapc.solvers import BASELINES
from overlapc.solvers.choose.period import Periodic

PROBLEMS = Path(__file__).parent / "problems"
STEPS, BUDGETS = 6, 60


def test_limits_near_each_other_have_one_solution() -> None:
    problem = load_problem(min(PROBLEMS.iterdir()))
    most = peak_bytes(problem, BASELINES["none"](problem))
    periodic = Periodic(replace(problem, budget_bytes=most), reuses=True)
    size = {value.storage: value.bytes for value in problem.trace.values}
    found = []
    for i in range(BUDGETS + 1):
        budget = most * i // BUDGETS
        rounded = periodic.within(budget, STEPS).choice_with(0)
        exact = periodic.within(budget).choice_with(0)
        if rounded is not None:  # it keeps no more than the limit itself allows
            assert exact is not None
            kept = sum(size[problem.trace.value[name].storage] for name in rounded.saved)
            assert kept <= budget
            found.append(rounded.saved)
    assert 2 <= len(set(found)) <= STEPS + 1
