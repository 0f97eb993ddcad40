"""Solvers on problems of real graphs: the small ones of the benchmark set, kept as text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from overlapc.core.check import check
from overlapc.core.errors import Infeasible
from overlapc.core.simulate import simulate
from overlapc.core.text import format_problem, parse_problem
from overlapc.solvers import FIELD, bound_ns, solve

TEXTS = sorted((Path(__file__).parent / "problems").glob("*.txt"))


@pytest.fixture(params=TEXTS, ids=lambda path: path.stem)
def problem(request):
    return parse_problem(request.param.read_text())


def test_there_are_some():
    assert len(TEXTS) >= 4


def test_the_text_is_the_problem(problem, request):
    assert format_problem(problem) == request.node.callspec.params["problem"].read_text()


def test_every_solver_is_legal_within_the_budget_and_above_the_bound(problem):
    least = bound_ns(problem)
    steps = {}
    for solver in ("heu", "overlap", *FIELD):
        try:
            plan = solve(problem, solver)
        except Infeasible:
            continue
        check(problem, plan)
        timeline = simulate(problem, plan)
        assert timeline.peak_bytes <= problem.budget_bytes
        assert timeline.step_ns >= least
        steps[solver] = timeline.step_ns
    assert steps["overlap"] <= 1.03 * min(steps.values())
    assert steps["heu"] <= 1.03 * steps["overlap"]


def test_opt_comes_close_to_its_bound(problem):
    plan = solve(problem, "opt", time_limit_s=10.0, gap=0.02)
    check(problem, plan)
    step = simulate(problem, plan).step_ns
    assert simulate(problem, plan).peak_bytes <= problem.budget_bytes
    assert plan.bound_ns <= step
    assert step <= 1.1 * plan.bound_ns


def test_heu_takes_what_memory_there_is(problem):
    """More memory, less time, on the whole."""
    free = replace(problem, budget_bytes=None)
    most = simulate(free, solve(free, "none")).peak_bytes
    steps = []
    for budget in (problem.budget_bytes, (problem.budget_bytes + most) // 2, most):
        limited = replace(problem, budget_bytes=budget)
        steps.append(simulate(limited, solve(limited, "heu")).step_ns)
    assert steps[1] <= 1.005 * steps[0]
    assert steps[2] <= 1.005 * steps[1]


def test_heu_fills_the_windows_of_a_baseline_that_wins(problem, monkeypatch):
    """At the smallest budgets one may: its own order has everything in place."""
    full = FIELD["full"](problem)
    tight = replace(problem, budget_bytes=simulate(problem, full).peak_bytes)
    monkeypatch.setattr("overlapc.solvers.heu_plans", lambda *_, **__: ())
    plan = solve(tight, "heu")
    timelines = [simulate(tight, FIELD[name](tight)) for name in ("full", "uniform", "megatron")]
    best = min(t.step_ns for t in timelines if t.peak_bytes <= tight.budget_bytes)
    assert simulate(tight, plan).step_ns < best
    assert plan.found_by.startswith(("full", "uniform", "block", "megatron"))


def test_heu_does_without_highs(problem, monkeypatch):
    """CBC, which comes with PuLP, solves the same small program."""
    with_highs = simulate(problem, solve(problem, "heu")).step_ns
    monkeypatch.setattr("pulp.HiGHS.available", lambda engine: False)
    with_cbc = simulate(problem, solve(problem, "heu")).step_ns
    assert abs(with_cbc / with_highs - 1) <= 0.02
