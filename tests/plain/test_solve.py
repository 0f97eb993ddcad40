"""Solvers on random small problems: legal, within budget, never worse, monotone in the budget."""

from __future__ import annotations

import re
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings

from overlapc.check import check
from overlapc.errors import Infeasible, OptionError
from overlapc.simulate import simulate
from overlapc.solvers import BASELINES, bound_ns, smallest_bytes, solve
from tests.plain.strategies import problems, random_problem
from tests.plain.tiny import tiny


@settings(max_examples=settings.default.max_examples // 4)
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


@pytest.mark.parametrize(("solver", "ops"), [("overlap", 3), ("heu", 3), ("opt", 1)])
def test_every_plan_says_what_found_it(solver, ops):
    """Where a baseline did, its name is the solver's."""
    for seed in range(4):
        problem = random_problem(Random(seed), ops)
        limited = replace(problem, budget_bytes=smallest_bytes(problem))
        plan = solve(limited, solver)
        if plan.solver not in BASELINES:
            assert re.fullmatch(r"[^;]+; of [1-9]\d* plans", plan.found_by), plan.found_by


def asked_too_much():
    raise AssertionError("torch was asked")
    yield ()


def test_nothing_is_searched_where_nothing_can_be_won():
    chain = "".join(f"f{i} F | v{i} > v{i + 1} | 5\n" for i in range(200))
    chain += "".join(f"b{i} I | v{i} > g{i} | 5\n" for i in reversed(range(200)))
    problem = replace(tiny(chain, "g0"), budget_bytes=10**9)
    plan = solve(problem, torch_choices=asked_too_much())
    assert not plan.recomputed
    assert simulate(problem, plan).step_ns == 2000


def test_torch_is_asked_last_and_only_where_there_is_something_to_hide():
    text = """
    a    F    | x   > r     | 10
    b    F    | r   > y     | 10
    db   I    | t r > dr    | 10
    st   I tp | dr  > dx    | 1 + 90
    wait_ I   | dx  > dxw   | 0
    dw   W    | dr x > gw   | 20
    """
    lone = tiny(
        text.replace("I tp", "I").replace("1 + 90", "91").replace("wait_", "end"), "y dxw gw"
    )
    tight = simulate(lone, solve(lone, "full")).peak_bytes
    solve(replace(lone, budget_bytes=tight), torch_choices=asked_too_much())
    asked = []
    problem = replace(tiny(text, "y dxw gw"), budget_bytes=10**9)

    def theirs():
        asked.append(True)
        yield ("r",)

    assert solve(problem, torch_choices=theirs())
    assert asked == []  # what costs less has reached the bound


@pytest.mark.parametrize("seed", range(5))
def test_checkmate_recomputes_nothing_where_all_fits(seed: int) -> None:
    problem = replace(random_problem(Random(seed), 8), budget_bytes=None)
    everything = simulate(problem, solve(problem, "none"))
    roomy = replace(problem, budget_bytes=everything.peak_bytes)
    plan = solve(roomy, "checkmate")
    assert (plan.solver, plan.recomputed) == ("checkmate", ())
    assert simulate(roomy, plan).step_ns == everything.step_ns
