"""Windows filled in place: plans stay legal, within memory, and memory is what `simulate` says."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from overlapc.check import check
from overlapc.ir import Plan, parse_issue
from overlapc.simulate import memory_curve, simulate
from overlapc.solvers.choice import Needs, on_demand
from overlapc.solvers.filling import PASSES, Taste, _Filling, filled
from overlapc.solvers.keep import keep_sets
from overlapc.solvers.work import NEVER, backward_work
from tests.plain.strategies import random_problem


def plans_on_demand(seeds):
    """(seed, problem, work, plan) of random problems with two phases."""
    for seed in seeds:
        problem = random_problem(Random(seed), 7)
        if len(problem.phases) == 1:
            continue
        needs = Needs(problem.trace)
        for kept in keep_sets(problem, needs, 4):
            choice = needs.complete(kept)
            plan = Plan(problem.trace.digest, "test", choice.saved, on_demand(problem, choice))
            yield seed, problem, backward_work(problem, choice), plan


def test_filled_plans_are_legal_and_fit():
    moved = 0
    for seed, problem, work, plan in plans_on_demand(range(150)):
        budget = max(memory_curve(problem, plan))
        for passes in PASSES:
            found = filled(plan, work, budget, passes)
            check(problem, found)
            moved += found.order != plan.order
            if not any(problem.trace.op[name].random for name in plan.recomputed):
                assert simulate(problem, found).peak_bytes <= budget, seed
    assert moved > 100


def test_memory_on_the_way_is_that_of_simulate():
    compared = 0
    for seed, problem, work, plan in plans_on_demand(range(150)):
        if any(problem.trace.op[name].random for name in plan.recomputed):
            continue  # generators' states are not followed on the way
        filling = _Filling(filled(plan, work, NEVER, PASSES[0]), work, NEVER, PASSES[0][0])
        expected = memory_curve(problem, filling.plan)[len(filling.head) :]
        found = work.flow.during(filling.order, filling.held)
        # What is saved and never read is let go by the forward, and held on the way.
        assert all(a >= b for a, b in zip(found, expected, strict=True)), seed
        compared += found == expected
    assert compared > 100


def kind(problem, text):
    name, again = parse_issue(text)
    return "R" if again else problem.trace.op[name].piece.letter


def test_only_what_may_move_moves():
    for seed, problem, work, plan in plans_on_demand(range(150)):
        for letter, moves in (("W", "R"), ("R", "W")):
            found = filled(plan, work, NEVER, (Taste(True, True, moves),))

            orders = (plan.order, found.order)
            still = [[t for t in order if kind(problem, t) == letter] for order in orders]
            assert still[0] == still[1], seed


def test_a_full_window_is_left_alone():
    for _, problem, _, plan in plans_on_demand(range(20)):
        costs = {n: replace(c, comm_ns=0) for n, c in problem.profile.costs.items()}
        silent = replace(problem, profile=replace(problem.profile, costs=costs))
        needs = Needs(problem.trace)
        kept = frozenset(problem.trace.value[name].storage for name in plan.saved)
        work = backward_work(silent, needs.complete(kept))
        if set(work.choice.saved) == set(plan.saved):
            assert filled(plan, work, NEVER, PASSES[0]).order == plan.order
