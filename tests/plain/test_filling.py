"""Windows filled in place: plans stay legal, within memory, and memory is what `simulate` says."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from overlapc.core.check import check
from overlapc.core.ir import Plan, parse_issue
from overlapc.core.ledger import Balance
from overlapc.core.simulate import memory_curve, simulate
from overlapc.solvers.choose.choice import Needs, on_demand
from overlapc.solvers.choose.keep import keep_sets
from overlapc.solvers.order import filling
from overlapc.solvers.order.filling import PASSES, Taste, _Filling, _Side, filled
from overlapc.solvers.order.work import NEVER, backward_work
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


class Afresh(_Filling):
    """Compares what it knows of a window after each move with what it would find afresh."""

    compared = 0

    def look_before(self, side, begin, end):
        super().look_before(side, begin, end)
        fresh = _Side(begin - 1)
        super().look_before(fresh, begin, end)
        self.compare(side, fresh)

    def look_behind(self, side, end):
        super().look_behind(side, end)
        fresh = _Side(end + 1)
        super().look_behind(fresh, end)
        self.compare(side, fresh)

    def compare(self, side, fresh):
        found, expected = (
            [(n, each.members(group)) for n, group in each.groups.items()] for each in (side, fresh)
        )
        assert found == expected
        took = {n: sum(self.took[other] for other in group) for n, group in expected}
        assert all(took[n] <= fresh.most[n] <= side.most[n] for n in took)
        held = Balance(self.flow, self.work.held_bytes).along(self.order)
        assert self.held == [self.work.held_bytes, *held]
        Afresh.compared += self.moved > 0


def test_what_may_move_is_what_a_new_look_finds(monkeypatch):
    tastes = [*(taste for passes in PASSES for taste in passes), Taste(True, False, seed=3)]
    for reach in (4, 120):  # a short one, so that work comes into reach move by move
        monkeypatch.setattr(filling, "REACH", reach)
        for _, problem, work, plan in plans_on_demand(range(100)):
            budget = max(memory_curve(problem, plan))
            for taste in tastes:
                Afresh(plan, work, budget, taste).run(float("inf"))
    assert Afresh.compared > 1000


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
