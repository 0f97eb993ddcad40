"""Gathers and reductions that move stay legal, and cost less where they can."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from overlapc.core.check import check
from overlapc.core.errors import Infeasible
from overlapc.core.ir import COMPUTE, Cost, Op, Piece, Plan, Problem, Profile, Role, Trace, Value
from overlapc.core.simulate import peak_bytes, step_ns
from overlapc.core.valid import validated
from overlapc.solvers import solve
from overlapc.solvers.choose.choice import Needs, plan_on_demand
from overlapc.solvers.order.placing import can_place, placed
from tests.plain.strategies import legal_plans, problems

LAYERS = 6


@settings(max_examples=4 * settings.default.max_examples)
@given(data=st.data())
def test_what_is_placed_is_legal(data: st.DataObject) -> None:
    problem = data.draw(problems())
    if len(problem.phases) != 2:
        return
    plan = data.draw(legal_plans(problem))
    for other in placed(problem, plan):
        check(problem, other)
        assert other.saved == plan.saved
        assert sorted(other.order) == sorted(plan.order)


def sharded(compute_ns: int = 10, comm_ns: int = 8) -> Problem:
    """A chain of layers: each has a weight that is gathered, and whose gradient is reduced."""
    ops: list[Op] = []
    values = {"x": Value("x", 8, "x", "")}
    costs: dict[str, Cost] = {}

    def op(name: str, role: Role, letter: str, given: str, size: int = 8, alias: str = "") -> str:
        lane = "dp" if role == "start" else COMPUTE
        inputs = tuple(given.split())
        ops.append(
            Op(name, role, lane, Piece(0, letter, 0), inputs, (name,), name.rstrip("0123456789"))
        )
        storage = values[alias].storage if alias else name
        values[name] = Value(name, values[alias].bytes if alias else size, storage, name)
        work = 0 if role in ("start", "wait") else compute_ns
        costs[name] = Cost(work, comm_ns if role == "start" else 0)
        return name

    inputs = ["x"]
    outputs = []
    here = "x"
    for i in range(LAYERS):
        values[f"shard{i}"] = Value(f"shard{i}", 50, f"shard{i}", "")
        inputs.append(f"shard{i}")
        op(f"gather{i}", "start", "F", f"shard{i}", 100)
        op(f"full{i}", "wait", "F", f"gather{i} shard{i}", alias=f"gather{i}")
        here = op(f"layer{i}", "forward", "F", f"{here} full{i}")
    outputs.append(here)
    gradient = here
    for i in reversed(range(LAYERS)):
        before = f"layer{i - 1}" if i else "x"
        op(f"weight{i}", "weight_grad", "W", f"{gradient} {before}", 100)
        op(f"reduce{i}", "start", "W", f"weight{i}", 50)
        op(f"sum{i}", "wait", "W", f"reduce{i} weight{i}", alias=f"reduce{i}")
        outputs.append(f"sum{i}")
        gradient = op(f"back{i}", "input_grad", "I", f"{gradient} full{i}")
    kinds = {name: "parameter" if name != "x" else "batch" for name in inputs}
    trace = Trace(tuple(ops), tuple(values.values()), tuple(inputs), tuple(outputs), kinds)
    return validated(Problem(trace, Profile(costs)))


def all_saved(problem: Problem) -> Plan:
    needs = Needs(problem.trace)
    return plan_on_demand(problem, needs.storages, "none", needs)


def test_gathers_and_reductions_hide() -> None:
    problem = sharded()
    assert can_place(problem)
    plan = all_saved(problem)
    alone = 3 * LAYERS * 10
    assert step_ns(problem, plan) == alone + 8 * 2 * LAYERS  # each waits for its own
    best = min(step_ns(problem, each) for each in placed(problem, plan))
    assert best == alone + 8  # the first gather has nothing to hide under


def test_a_gather_begins_no_earlier_than_it_must() -> None:
    problem = sharded(compute_ns=100)
    plan = all_saved(problem)
    orders = [each.order for each in placed(problem, plan)]
    assert any(
        order.index("gather5") > order.index("layer3")
        and order.index("gather5") < order.index("layer4")
        for order in orders
    )


def test_solvers_place_within_the_budget() -> None:
    problem = sharded()
    most = peak_bytes(problem, all_saved(problem))
    steps = []
    for budget in range(most, most // 2, -50):
        for solver in ("overlap", "heu"):
            try:
                plan = solve(replace(problem, budget_bytes=budget), solver)
            except Infeasible:
                continue
            check(problem, plan)
            assert peak_bytes(problem, plan) <= budget
            steps.append((solver, step_ns(problem, plan)))
    assert ("overlap", 3 * LAYERS * 10 + 8) in steps
