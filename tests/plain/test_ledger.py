"""What is alive when: all at once, and issue by issue the same."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from overlapc.core.ir import Plan, Problem
from overlapc.core.ledger import Balance, Ledger
from overlapc.core.simulate import flow_of, memory_curve
from overlapc.solvers.choose.exact import must_follow
from tests.plain.strategies import random_plan, random_problem

HOLDINGS = st.lists(st.tuples(st.integers(0, 99), st.integers(-1, 6), st.integers(-1, 7)))


@given(HOLDINGS, st.lists(st.integers(0, 9), max_size=7))
def test_alive_are_those_that_have_come_and_not_gone(holdings, works):
    ledger = Ledger(works)
    moments = range(len(works))
    for size, first, last in holdings:
        if first < len(works):
            ledger.add(size, first, max(first, min(last, len(works))))
    held = list(zip(ledger.size, ledger.first, ledger.last, strict=True))
    assert ledger.alive() == [
        works[m] + sum(size for size, first, last in held if first <= m <= last) for m in moments
    ]


def other_order(problem: Problem, plan: Plan, rng: Random) -> list[str]:
    """Any legal order of the plan's issues."""
    before = must_follow(problem, frozenset(plan.saved), frozenset(plan.recomputed))
    order: list[str] = []
    while ready := [t for t in before if t not in order and before[t] <= set(order)]:
        order.append(rng.choice(ready))
    assert len(order) == len(plan.order)
    return order


@settings(max_examples=250)
@given(st.randoms(use_true_random=False))
def test_issue_by_issue_it_is_the_whole(rng):
    """Whatever the order and whatever was taken back on the way."""
    problem = random_problem(rng, 6, lags=True)
    plan = random_plan(problem, rng)
    flow, held, idle = flow_of(problem, plan)
    number = {text: n for n, text in enumerate(plan.order)}
    for order in (plan.order, other_order(problem, plan, rng)):
        curve = memory_curve(problem, replace(plan, order=tuple(order)))
        nodes = [number[text] for text in order]
        balance = Balance(flow, held)
        at, back = 0, rng.randint(0, 9)
        while at < len(nodes):
            if at and back and rng.random() > 0.5:
                at, back = at - 1, back - 1
                balance.undo(nodes[at])
                continue
            before, more = balance.held, balance.adds(nodes[at])
            assert before + flow.allocates[nodes[at]] + (0 if at else idle) == curve[at]
            balance.run(nodes[at])
            assert balance.held == before + more
            at += 1
        again = Balance(flow, held)
        after = again.along(nodes)
        assert after[-1:] == [balance.held]
        during = flow.during(nodes, [held, *after])
        assert [during[0] + idle, *during[1:]] == curve
        most = max(during) - 1
        some = Balance(flow, held).along(nodes, most)
        assert some == after[: next(i for i, size in enumerate(during) if size > most)]
