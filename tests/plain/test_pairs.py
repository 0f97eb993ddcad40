"""Steps in pairs: the first two forwards beside each other, and the last two backwards."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlapc.core.errors import Infeasible, InvalidPlan, OptionError
from overlapc.core.ir import Plan, Problem
from overlapc.core.merge import ADD, BEFORE, TOTAL, accumulate, in_pairs, merge, one_by_one
from overlapc.core.simulate import simulate, step_ns
from overlapc.core.text import format_plan, parse_plan
from overlapc.planning.problem import TrainingStep
from overlapc.planning.report import Report
from overlapc.planning.road import reports
from overlapc.solvers import solve
from overlapc.solvers import step as step_solver
from overlapc.solvers.choose.choice import Needs, plan_on_demand
from overlapc.solvers.pipeline.schedules import in_pairs as rows_in_pairs
from overlapc.solvers.step import solve_step
from tests.plain.brute_force import TooMany, brute_force
from tests.plain.strategies import random_problem
from tests.plain.tiny import tiny

# Alone a microbatch takes 60; in each collective's time another one could compute.
WAITING = """
first   F    | x p   > a     | 10
gather  F tp | a     > raw   | 0 + 10
wait    F    | raw   > whole
last    F    | whole > z     | 10
back    I    | g z   > d     | 10
push    I tp | d     > sent  | 0 + 10
wait2   I    | sent  > e
end     W    | e x   > dp    | 10
"""


def waiting() -> Problem:
    problem = tiny(WAITING, outputs="dp")
    kinds = {"p": "parameter", "x": "batch", "g": "gradient"}
    return accumulate(replace(problem, trace=replace(problem.trace, kinds=kinds)), ["dp"])


def report_of(problem: Problem, count: int, plans: tuple[Plan, ...], pairs: bool) -> Report:
    (report,) = reports(problem, TrainingStep("x", count, lag=1, pairs=pairs), plans)
    return report


def test_no_forward_and_no_backward_waits_alone():
    problem = waiting()
    found = {}
    for count in (2, 4):
        for pairs in (False, True):
            plans = solve_step(problem, "heu", lambda: solve(problem, "heu"), count, pairs=pairs)
            found[count, pairs] = report_of(problem, count, plans, pairs)
    # Merged microbatches take 40, the forwards of a pair 40, and its backwards 40.
    assert found[4, False].step_ns == 60 + 3 * 40
    assert found[4, True].step_ns == 40 + 2 * 40 + 40
    assert found[2, True].step_ns == 40 + 40
    assert found[2, True].merged is None
    assert "in pairs" in found[4, True].explain()
    assert "in pairs" not in found[4, False].explain()
    assert "F1 " in found[4, True].explain()  # says which forward hides what


def test_gradients_of_a_pair_are_added_up_in_order():
    ends, middle = in_pairs(waiting())
    adds = [op for op in ends.trace.ops if op.name.partition("@")[0].endswith(ADD)]
    assert [op.inputs for op in adds] == [("dp@0",), ("dp@1", "dp_add@0")]
    assert middle.trace.lag == 2
    assert middle.copies == 1  # the microbatch between the two


def test_microbatches_of_a_pair_ask_nothing_of_each_other():
    lone = tiny("drop F | x > r | 1\nask F | r > n | 1\nsum F | n > m | 1\nuse F | m > y | 1", "y")
    changed = {
        "ask": {"signature": f"{BEFORE}default", "recomputable": False},
        "sum": {"signature": f"{TOTAL}default", "recomputable": False},
        "drop": {"random": True},  # which drops nothing
    }
    ops = tuple(replace(op, **changed.get(op.name, {})) for op in lone.trace.ops)
    ends, _ = in_pairs(replace(lone, trace=replace(lone.trace, ops=ops)))
    assert [ends.trace.op[f"ask@{k}"].inputs for k in range(2)] == [("r@0",), ("r@1",)]
    assert [ends.trace.op[f"sum@{k}"].inputs for k in range(2)] == [("n@0",), ("n@1",)]
    drops = [ends.trace.op[f"drop@{k}"] for k in range(2)]
    assert [(op.random, op.seeded) for op in drops] == [(False, True)] * 2


def stepped(seed: int, room: float, microbatches: int, solver: str) -> tuple[Report, Report] | None:
    """A random step without and with pairs, in so many times the budget of one microbatch."""
    problem = replace(random_problem(Random(seed), 6), phases=("F", "IW"))
    if any(op.piece.microbatch for op in problem.trace.ops):
        return None
    if problem.budget_bytes is not None:
        problem = replace(problem, budget_bytes=int(problem.budget_bytes * room))
    try:
        alone = solve(problem, solver)
    except Infeasible:
        return None
    found = []
    for pairs in (False, True):
        plans = solve_step(problem, solver, lambda: alone, microbatches, pairs=pairs)
        found.append(report_of(problem, microbatches, plans, pairs))
    return found[0], found[1]


@settings(max_examples=settings.default.max_examples // 4)
@given(
    st.integers(0, 10_000),
    st.sampled_from((0.7, 1.0, 2.0)),
    st.integers(2, 9),
    st.sampled_from(("heu", "overlap")),
)
def test_pairs_are_taken_only_where_they_are_faster_within_the_budget(
    seed, room, microbatches, solver
):
    """`reports` checks that all plans are legal, save the same and keep to the budget."""
    found = stepped(seed, room, microbatches, solver)
    if found is None:
        return
    plain, pairs = found
    assert pairs.step_ns < plain.step_ns if pairs.pair else pairs.step_ns == plain.step_ns
    assert plain.pair is None
    if pairs.pair is not None:
        others = [each.plan for each in (pairs.merged, pairs.pair) if each]
        told = [parse_plan(format_plan(plan)) for plan in (pairs.plan, *others)]
        problem = replace(pairs.problem, budget_bytes=None)
        again = report_of(problem, microbatches, tuple(told), True)
        assert again.step_ns == pairs.step_ns
        assert again.pair is not None
        assert again.pair.plan == pairs.pair.plan


def test_some_steps_are_in_pairs():
    found = [stepped(seed, 2.0, 4, "heu") for seed in range(30)]
    taken = [both for both in found if both and both[1].pair]
    assert len(taken) >= 5, len(taken)


@pytest.mark.parametrize("seeds", [range(30), pytest.param(range(30, 600), marks=pytest.mark.slow)])
def test_small_ends_are_near_the_best_there_is(seeds):
    """Two microbatches in pairs: never better than brute force, most often as good."""
    as_good = seen = 0
    for seed in seeds:
        problem = replace(random_problem(Random(seed), 1), phases=("F", "IW"))
        if any(op.piece.microbatch for op in problem.trace.ops) or not problem.trace.lanes:
            continue
        ends, _ = in_pairs(problem)
        try:
            best = brute_force(ends, 4000)
            alone = solve(problem)
        except (TooMany, Infeasible):
            continue
        plans = solve_step(problem, "overlap", lambda alone=alone: alone, 2, pairs=True)
        pair = report_of(problem, 2, plans, True).pair
        if pair is not None:
            assert best is not None
            assert pair.timeline.step_ns >= best
            seen += 1
            as_good += pair.timeline.step_ns == best
    assert seen
    assert as_good >= 0.8 * seen, (as_good, seen)


def test_what_has_nothing_to_gain_is_not_searched(monkeypatch):
    """The collectives of one microbatch are hidden by its own weight gradients."""
    monkeypatch.setattr(step_solver._Pairs, "try_ends", None)
    text = "\n".join(line.replace("+ 10", "+ 0") for line in WAITING.strip().splitlines())
    problem = tiny(text, outputs="dp")
    lone = solve(problem, "heu")
    for count in (2, 4):
        assert solve_step(problem, "heu", lambda: lone, count, pairs=True) == (lone,)


def test_plans_of_other_steps_are_refused():
    problem = waiting()
    plans = solve_step(problem, "heu", lambda: solve(problem, "heu"), 4, pairs=True)
    assert len(plans) == 3
    with pytest.raises(OptionError, match="the last not of this step's pairs"):
        report_of(problem, 4, plans, False)
    ends, _ = in_pairs(problem)
    lone, merged, pair = plans
    other = one_by_one(ends, plan_on_demand(problem, (), "none"))
    assert set(other.saved) != set(pair.saved)
    with pytest.raises(InvalidPlan, match="has other values saved"):
        report_of(problem, 4, (lone, merged, other), True)


def test_the_rows_of_a_step_in_pairs():
    names = ["".join(f"{a.kind}{a.microbatch}" for a in step) for step in rows_in_pairs(4).rows[0]]
    assert names == ["F0F1", "F2B0", "F3B1", "B2B3"]
    assert [len(step) for step in rows_in_pairs(2).rows[0]] == [2, 2]


def test_a_pair_takes_what_the_simulator_says():
    problem = waiting()
    ends, middle = in_pairs(problem)
    plans = solve_step(problem, "heu", lambda: solve(problem, "heu"), 5, pairs=True)
    report = report_of(problem, 5, plans, True)
    lone, merged, pair = plans
    assert report.step_ns == step_ns(ends, pair) + 3 * step_ns(middle, merged)
    peaks = [simulate(at, plan).peak_bytes for at, plan in ((ends, pair), (middle, merged))]
    assert report.peak_bytes == max(simulate(problem, lone).peak_bytes, *peaks)
    assert Needs(problem.trace).storages
    assert simulate(merge(problem), merged).peak_bytes < peaks[1]  # holds one microbatch less
