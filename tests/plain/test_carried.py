"""A plan is carried over to the traces of other shapes, which may have some ops more or less."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings

from overlapc.core.check import check
from overlapc.core.ir import Problem, Trace
from overlapc.core.stages import turns
from overlapc.planning.carried import actions_of, carried
from overlapc.planning.problem import GRAPH
from overlapc.planning.report import Report
from overlapc.planning.road import judged
from overlapc.solvers import solve
from tests.plain.strategies import problems
from tests.plain.test_problems import TEXTS, parse_problem


def planned(problem: Problem, solver: str) -> Report:
    return judged("here", problem, solve(problem, solver))


@given(problems())
@settings(max_examples=30, deadline=None)
def test_to_its_own_trace_a_plan_goes_as_it_is(problem: Problem) -> None:
    if problem.phases != ("F", "IW") or problem.trace.ahead:
        return
    here = planned(replace(problem, budget_bytes=None), "none")
    found = carried(here, {}, problem.trace, GRAPH, {})
    assert found is not None
    assert (found[0].plan.saved, found[0].plan.order) == (here.plan.saved, here.plan.order)
    actions = turns(problem.trace, here.plan.order)
    assert actions_of(*found, actions) == actions


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.stem)
@pytest.mark.parametrize("solver", ["full", "heu"])
def test_ops_may_be_missing_on_either_side(path, solver: str) -> None:
    problem = replace(parse_problem(path.read_text()), budget_bytes=None)
    fewer = problem.trace
    for op in [op for op in fewer.ops if op.is_forward and _copies(fewer, op.name)][:3]:
        fewer = without(fewer, op.name)
    assert len(fewer.ops) < len(problem.trace.ops)
    costs = {op.name: problem.cost(op.name) for op in fewer.ops}
    less = replace(problem, trace=fewer, profile=replace(problem.profile, costs=costs))
    for here, there in ((problem, less), (less, problem)):
        report = planned(here, solver)
        found = carried(report, {}, there.trace, GRAPH, {})
        assert found is not None
        check(found[0].problem, found[0].plan)
        starts = {op.name for op in here.trace.ops if op.role == "start"}
        issued = [
            [t for t in p.order if t.removeprefix("R:") in starts]
            for p in (report.plan, found[0].plan)
        ]
        assert issued[0] == issued[1]


def _copies(trace: Trace, name: str) -> bool:
    op = trace.op[name]
    made = [trace.value[value].producer for value in op.inputs]
    return (
        op.role == "forward"
        and len(op.outputs) == 1
        and not op.random
        and made.count("") < len(made) == 1
    )


def without(trace: Trace, name: str) -> Trace:
    """The trace as if the op gave what it is given."""
    gone = trace.op[name]
    (out,), given = gone.outputs, gone.inputs[0]

    def read(names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(given if each == out else each for each in names))

    ops = tuple(replace(op, inputs=read(op.inputs)) for op in trace.ops if op is not gone)
    views = {v.name for v in trace.values if v.storage == out and v.name != out}
    place = trace.value[given]
    values = tuple(
        replace(v, storage=place.storage, bytes=place.bytes) if v.name in views else v
        for v in trace.values
        if v.name != out
    )
    return replace(trace, ops=ops, values=values, outputs=read(trace.outputs))
