"""Times and bytes of those who put work in order, against what is simulated of it in the end."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlapc.core.ir import Plan, Problem, Profile
from overlapc.core.merge import ahead
from overlapc.core.pipeline import Rank, simulate_pipeline
from overlapc.core.schedule import Schedule, steps_of
from overlapc.core.simulate import simulate, step_ns
from overlapc.solvers.choose.choice import Needs
from overlapc.solvers.choose.exact import _State
from overlapc.solvers.choose.keep import keep_sets
from overlapc.solvers.order.listing import Listing, Style
from overlapc.solvers.order.merging import PACES, _Merging
from overlapc.solvers.order.work import NEVER, backward_work, merged_work
from overlapc.solvers.pipeline.rows import PATIENCE, _arrivals, _Clock
from overlapc.solvers.pipeline.schedules import SCHEDULES, make_schedule
from tests.plain.strategies import random_plan, random_problem
from tests.plain.test_machine import random_rows
from tests.plain.test_merging import lagging
from tests.plain.test_rows import random_cost


def steady(problem: Problem, waits_ns: int = 1) -> Problem:
    """The problem where nothing slows anything; `waits_ns` of 0: and waits cost nothing."""
    costs = {
        op.name: replace(cost, compute_ns=cost.compute_ns * (op.role != "wait" or waits_ns))
        for op in problem.trace.ops
        for cost in [problem.cost(op.name)]
    }
    return replace(problem, profile=Profile(costs))


@settings(max_examples=60)
@given(st.randoms(use_true_random=False), st.sampled_from(PACES), st.integers(0, 1))
def test_listings_time_is_the_machines_where_nothing_slows_anything(rng, pace, waits_ns):
    """If waits take no time: else a listing has them all where the first holds it up."""
    merged = steady(lagging(rng, 4), waits_ns)
    needs = Needs(merged.trace)
    limit = merged.budget_bytes or NEVER
    for kept in keep_sets(merged, needs, 2):
        choice = needs.complete(kept)
        merging = _Merging(merged_work(merged, choice), limit, pace)
        order = merging.work.text(merging.run())
        found = [(merging.clock.free_ns, step_ns(merged, Plan("", "", choice.saved, order)))]
        lone = replace(merged, trace=ahead(merged.trace, -1), phases=("F", "IW"))
        listing = Listing(backward_work(lone, choice), limit, Style(1.5, by_path=True))
        plain = tuple(op.name for op in lone.trace.ops if op.is_forward)
        order = plain + listing.work.text(listing.run())
        timeline = simulate(lone, Plan("", "", choice.saved, order))
        found.append((listing.clock.free_ns, timeline.phase_ns[1]))
        for known, true in found:
            assert known >= true
            assert known == true or waits_ns


@settings(max_examples=60)
@given(st.randoms(use_true_random=False))
def test_how_far_a_beginning_is_is_what_the_machine_says(rng):
    problem = steady(random_problem(rng, 5))
    plan = random_plan(problem, rng)
    state = _State(0, sum(problem.compute_ns[text] for text in plan.order), {}, {})
    for text in plan.order:
        state = state.after(problem, text)
    assert state.at_least() == step_ns(problem, plan)


def apart(schedule: Schedule) -> Schedule:
    """The rows with every action as a step of its own."""
    rows = [steps_of(action for step in row for action in step) for row in schedule.rows]
    return replace(schedule, rows=tuple(rows))


@settings(max_examples=100)
@given(st.randoms(use_true_random=False))
def test_a_rank_that_is_given_its_actions_one_by_one_is_that_of_the_whole(rng):
    schedule = apart(random_rows(rng))
    costs = [random_cost(rng) for _ in range(schedule.stages)]
    timeline = simulate_pipeline(schedule, costs)
    there = _arrivals(schedule, timeline)
    remade = {(a.stage, a.microbatch) for a in schedule.actions if a.kind == "R"}
    for rank, row in enumerate(timeline.ran):
        mine = Rank(costs)
        for i, ran in enumerate(row):
            (action,) = ran.step
            again = action.kind in "IB" and (action.stage, action.microbatch) in remade
            kind = "I" if action.kind == "B" else action.kind
            assert mine.during(action, again) == timeline.memory[rank][i]
            ready_ns = there.get((action.stage, kind, action.microbatch), 0)
            assert mine.run(action, ready_ns, again) == ran.end_ns
            assert mine.held == timeline.held[rank][i]


@pytest.mark.parametrize("name", SCHEDULES)
def test_rows_made_by_going_through_time_take_no_longer_than_that(name):
    """Where nothing is under way between ranks."""
    rng = Random(name)
    for patience in PATIENCE:
        given_ = make_schedule(name, 2, 4)
        costs = [replace(random_cost(rng), sent_ns=0) for _ in range(given_.stages)]
        clock = _Clock(given_, costs, [1000] * 2, patience)
        assert clock.run() is not None
        rows = Schedule(name, tuple(map(steps_of, clock.rows)))
        timeline = simulate_pipeline(rows, costs)
        for rank, row in zip(clock.ranks, timeline.ran, strict=True):
            assert row[-1].end_ns <= rank.lane.free_ns
