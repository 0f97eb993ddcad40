"""Merged pieces: orders are legal and keep to memory, and small ones are near the best there is."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from overlapc.core.check import check
from overlapc.core.errors import Infeasible, InvalidPlan, InvalidProblem, OptionError
from overlapc.core.ir import Problem
from overlapc.core.ledger import Balance
from overlapc.core.merge import ADD, accumulate, ahead, merge
from overlapc.core.simulate import RNG_STATE_BYTES, memory_curve, simulate, step_ns
from overlapc.core.valid import validate_trace, validated
from overlapc.solvers import bound_ns, solve
from overlapc.solvers import step as step_solver
from overlapc.solvers.choose.choice import Needs
from overlapc.solvers.choose.keep import keep_sets
from overlapc.solvers.order import merging
from overlapc.solvers.order.merging import PACES, merged_order
from overlapc.solvers.order.work import NEVER, merged_work
from overlapc.solvers.step import solve_step
from tests.plain.brute_force import TooMany, brute_force
from tests.plain.strategies import random_problem
from tests.plain.tiny import plan_of, tiny

# Alone a microbatch takes 60; in each collective's time another one could compute.
WAITING = """
first   F    | x     > a     | 10
gather  F tp | a     > raw   | 0 + 10
wait    F    | raw   > whole
last    F    | whole > z     | 10
back    I    | g z   > d     | 10
push    I tp | d     > sent  | 0 + 10
wait2   I    | sent  > e
end     I    | e     > dx    | 10
"""
SLOW = [pytest.mark.slow, pytest.mark.timeout(3600)]


def lagging(rng: Random, max_ops: int, lag: int = 1) -> Problem:
    problem = random_problem(rng, max_ops)
    return replace(problem, phases=("FIW",), trace=ahead(problem.trace, lag))


@settings(max_examples=60)
@given(st.randoms(use_true_random=False), st.integers(1, 2), st.sampled_from(PACES))
def test_orders_are_legal_and_known_in_memory(rng, lag, pace):
    problem = lagging(rng, 4, lag)
    needs = Needs(problem.trace)
    for kept in keep_sets(problem, needs, 4):
        choice = needs.complete(kept)
        work = merged_work(problem, choice)
        number = dict(zip(work.text(work.nodes), work.nodes, strict=True))
        for limit in (NEVER, problem.budget_bytes or 100):
            order = merged_order(work, limit, pace)
            plan = plan_of(problem, " ".join(order), " ".join(choice.saved))
            curve = memory_curve(problem, plan)
            nodes = [number[text] for text in order]
            held = Balance(work.flow, work.held_bytes).along(nodes)
            during = work.flow.during(nodes, [work.held_bytes, *held])
            states = sum(problem.trace.op[name].has_state for name in choice.recomputed)
            room = RNG_STATE_BYTES * ((problem.copies + 2) * states + 1)
            for text, known, true in zip(order, during, curve, strict=True):
                assert 0 <= known - true <= room, text


@pytest.mark.parametrize("seeds", [range(16), pytest.param(range(16, 1000), marks=SLOW)])
def test_small_ones_are_near_the_best_there_is(seeds):
    """Never better than brute force, most often as good."""
    as_good = seen = 0
    for seed in seeds:
        rng = Random(seed)
        problem = lagging(rng, 2)
        try:
            best = brute_force(problem, 4000)
        except TooMany:
            continue
        try:
            plan = solve(problem)
        except Infeasible:
            continue
        check(problem, plan)
        timeline = simulate(problem, plan)
        assert best is not None, seed
        assert timeline.step_ns >= best, seed
        assert bound_ns(problem) <= best, seed
        assert problem.budget_bytes is None or timeline.peak_bytes <= problem.budget_bytes
        seen += 1
        as_good += timeline.step_ns == best
    assert seen >= len(seeds) // 5
    assert as_good >= 0.8 * seen, (as_good, seen)


def test_what_one_waits_for_runs_under_the_other():
    """Alone the microbatch takes 60; here each collective has the other chain's compute."""
    problem = tiny(WAITING, outputs="dx")
    assert simulate(problem, solve(problem)).step_ns == 60
    merged = merge(problem)
    plan = solve(merged)
    assert simulate(merged, plan).step_ns == 40
    assert bound_ns(merged) == 40
    assert simulate(merged, plan).exposed_ns == 0


def test_a_lagging_problem_has_one_phase():
    with pytest.raises(InvalidProblem, match="one phase"):
        replace(lagging(Random(0), 2), phases=("F", "IW"))


def test_a_step_may_hold_several_microbatches():
    """Two a step: the backward of microbatch 1 is in its own step, that of 2 in the next one, in
    the place that 0 has here."""
    problem = tiny(
        """
        f1 F | x1    > h1 | 1
        f2 F | x2    > h2 | 1
        b0 I | t0 h2 > d0 | 1
        b1 I | t1 h1 > d1 | 1
        """,
        outputs="d0 d1",
        phases=("FIW",),
    )
    ops = tuple(
        replace(op, piece=replace(op.piece, microbatch=int(op.name[1]))) for op in problem.trace.ops
    )
    problem = validated(replace(problem, trace=replace(problem.trace, ops=ops)))
    assert problem.trace.ahead == {2: 0}
    assert problem.trace.lag == 1
    plan = plan_of(problem, "b0 f1 b1 f2", "h1 h2")
    # The step before left h2, which b0 reads; this one leaves another, and d0 and d1.
    assert memory_curve(problem, plan) == [16, 16, 24, 24]
    with pytest.raises(InvalidPlan, match="b1 reads h1 of f1, which is not issued before it"):
        check(problem, replace(plan, order=("b0", "b1", "f1", "f2")))


def test_baselines_know_nothing_of_merged_pieces():
    with pytest.raises(OptionError, match="expected overlap, heu or opt"):
        solve(lagging(Random(0), 2), "megatron")


def test_gradients_added_up_end_where_they_are_made():
    problem = next(
        p
        for seed in range(100)
        if len((p := random_problem(Random(seed), 3)).phases) == 2 and p.in_flight == 1
    )
    trace = problem.trace
    grads = [
        n
        for n in trace.outputs
        if trace.value[n].producer and not trace.op[trace.value[n].producer].is_forward
    ]
    summed = accumulate(problem, grads, 1024.0)
    validate_trace(summed.trace)
    assert not set(grads) & set(summed.trace.outputs)
    for name in grads:
        assert summed.cost(name + ADD).compute_ns == trace.value[name].bytes
    lone = solve(replace(summed, budget_bytes=None), "none")
    check(summed, lone)
    held = summed.resident_bytes - problem.resident_bytes
    assert held == sum({trace.value[n].storage: trace.value[n].bytes for n in grads}.values())
    in_buffers = accumulate(problem, grads, 1024.0, sums=False)
    assert in_buffers == replace(summed, resident_bytes=problem.resident_bytes)


@settings(max_examples=30)
@given(st.integers(0, 10_000), st.integers(1, 5), st.sampled_from(("heu", "overlap")))
@example(554, 2, "overlap")  # merging gains less than `overlap` gains on the quick start
def test_a_step_is_never_slower_than_its_microbatches_one_by_one(seed, microbatches, solver):
    problem = replace(random_problem(Random(seed), 6), phases=("F", "IW"))
    try:
        alone = solve(problem, solver)
    except Infeasible:
        return
    lone, *others = solve_step(problem, solver, lambda: alone, microbatches)
    check(problem, lone)
    took = simulate(problem, lone).step_ns
    if not others:
        total = took * microbatches
    else:
        (merged,) = others
        check(merge(problem), merged)
        timeline = simulate(merge(problem), merged)
        assert problem.budget_bytes is None or timeline.peak_bytes <= problem.budget_bytes
        assert merged.saved == lone.saved
        assert set(merged.recomputed) == set(lone.recomputed)
        total = took + (microbatches - 1) * timeline.step_ns
    assert total <= simulate(problem, alone).step_ns * microbatches * 1.02


def test_overlap_is_asked_for_one_microbatch_only_where_one_by_one_may_be_as_fast():
    def alone():
        raise AssertionError("asked")

    problem = tiny(WAITING, outputs="dx")  # one by one each takes 60, merged ones take 40
    assert len(solve_step(problem, "overlap", alone, 4)) == 2
    with pytest.raises(AssertionError, match="asked"):
        solve_step(problem, "overlap", alone, 1)


def test_a_long_graph_with_nothing_to_hide_is_not_searched(monkeypatch):
    monkeypatch.setattr(step_solver, "merged_plans", None)
    count = 2000
    text = "".join(f"f{i} F | v{i} > v{i + 1} | 5\n" for i in range(count))
    text += "".join(f"b{i} I | v{i} > g{i} | 5\n" for i in reversed(range(count)))
    problem = replace(tiny(text, "g0"), budget_bytes=10**9)
    lone = solve(problem)
    assert solve_step(problem, "overlap", lambda: lone, 4) == (lone,)
    # So it is with collectives, where one by one is at the bound of the merged graph.
    text = text.replace("f0 F | v0 > v1 | 5", "f0 F tp | v0 > r | 5 + 0\nwait F | r > v1 | 0")
    problem = replace(tiny(text, "g0"), budget_bytes=10**9)
    (found,) = solve_step(problem, "overlap", lambda: solve(problem), 4)
    assert step_ns(problem, found) == step_ns(problem, solve(problem))


def test_what_late_gradients_hold_is_what_their_places_add_up_to(monkeypatch):
    """`Room` counts step by step; counted afresh it is the same."""
    rng, checked = Random(0), []
    go_on = merging.Room.passed

    def passed(room, n, growth):
        go_on(room, n, growth)
        other = rng.choice(room.work.nodes)
        end = rng.randint(room.back_at, len(room.chains[1]))
        late = {*room.late, *room.chains[1][room.back_at : end]} - room.done - {other}
        places = {place for each in late for place in room.work.reads[each]}
        held = sum(room.work.size[storage] for storage, _ in places)
        assert room.held_late(end, other) == held
        checked.append(held)

    monkeypatch.setattr(merging.Room, "passed", passed)
    for seed in range(60):
        problem = lagging(Random(seed), 6)
        needs = Needs(problem.trace)
        for kept in keep_sets(problem, needs, 3):
            work = merged_work(problem, needs.complete(kept))
            merged_order(work, problem.budget_bytes or 1000, PACES[0])
    assert any(checked)
