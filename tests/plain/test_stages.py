"""A plan cut into the actions of a pipeline: legal, and it adds up."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest

from overlapc.core.check import check
from overlapc.core.ir import Plan, Problem
from overlapc.core.simulate import saved_bytes, simulate
from overlapc.core.stages import in_parts, stage_cost, turns
from overlapc.solvers import solve
from tests.plain.strategies import random_problem


def planned(seeds: range, solver: str) -> Iterator[tuple[Problem, Plan]]:
    for seed in seeds:
        problem = random_problem(Random(seed), 6)
        if problem.phases == ("F", "IW") and problem.budget_bytes is None:
            yield problem, solve(problem, solver)


@pytest.mark.parametrize("solver", ["none", "full", "heu"])
def test_parts_are_legal_and_in_turn(solver):
    seen = 0
    for problem, plan in planned(range(120 if solver != "heu" else 40), solver):
        apart = in_parts(problem.trace, plan)
        check(problem, apart)
        assert sorted(apart.order) == sorted(plan.order)
        action = turns(problem.trace, plan.order)
        letters = [action[text] for text in apart.order if text in action]
        assert letters == sorted(letters, key="RIW".index)
        seen += 1
    assert seen > 5


@pytest.mark.parametrize("solver", ["none", "full", "heu"])
def test_actions_take_what_the_plan_takes(solver):
    for problem, plan in planned(range(120 if solver != "heu" else 40), solver):
        cost = stage_cost(problem, plan)
        whole = simulate(problem, plan)
        apart = simulate(problem, in_parts(problem.trace, plan))
        assert cost.takes("F") + cost.takes("B") == whole.step_ns
        parts = cost.forward_ns + cost.recompute_ns + cost.input_ns + cost.weight_ns
        assert parts == apart.step_ns
        assert cost.saved <= saved_bytes(problem, plan.saved)
        assert all(size >= 0 for _, size in cost.working)


def test_no_action_needs_more_than_the_whole_plan_holds():
    """What is held before an action and what it allocates is what the simulator sees then."""
    for problem, plan in planned(range(150), "full"):
        if problem.in_flight == 1 and not problem.resident_bytes:
            cost = stage_cost(problem, plan)
            peak = simulate(problem, in_parts(problem.trace, plan)).peak_bytes
            assert cost.works["F"] <= peak
            assert cost.saved + cost.works["R"] <= peak
