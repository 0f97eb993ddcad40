"""`check` accepts what is legal, says what is wrong with what is not, and means it.

The oracle is `execute`: it runs a plan on terms instead of tensors, so that any plan that reads
what is not there, or computes something else than the trace, shows.
"""

from collections import Counter
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlapc.core.check import check
from overlapc.core.errors import InvalidPlan
from overlapc.core.ir import (
    COMPUTE,
    Cost,
    Op,
    Piece,
    Plan,
    Problem,
    Profile,
    Role,
    Trace,
    Value,
    issues,
)
from overlapc.core.valid import validate_trace
from tests.plain.strategies import (
    BREAKS,
    break_plan,
    legal_plans,
    problems,
    random_plan,
    random_problem,
)


def small_problem(phases: tuple[str, ...] = ("F", "IW")) -> Problem:
    """y = gelu(gather(x)) and its gradient, which reads the gathered x."""

    def op(name: str, role: Role, letter: str, inputs: str, output: str) -> Op:
        lane = "tp" if role == "start" else COMPUTE
        return Op(
            name, role, lane, Piece(0, letter, 0), tuple(inputs.split()), (output,), "[8]",
            recomputable=name != "gelu",
        )  # fmt: skip

    ops = (
        op("gather", "start", "F", "x", "raw"),
        op("wait", "wait", "F", "raw", "whole"),
        op("gelu", "forward", "F", "whole", "y"),
        op("grad", "input_grad", "I", "t whole", "dx"),
    )
    values = tuple(
        Value(name, 8, name, producer)
        for name, producer in [
            ("x", ""), ("t", ""), ("raw", "gather"), ("whole", "wait"), ("y", "gelu"),
            ("dx", "grad"),
        ]
    )  # fmt: skip
    trace = Trace(ops, values, ("x", "t"), ("y", "dx"))
    validate_trace(trace)
    return Problem(trace, Profile({op.name: Cost(1) for op in ops}), phases=phases)


def small_plan(saved: str, order: str) -> Plan:
    return Plan(small_problem().trace.digest, "by hand", tuple(saved.split()), tuple(order.split()))


@pytest.mark.parametrize("phases", [("F", "IW"), ("FIW",)])
@pytest.mark.parametrize(
    ("saved", "order"),
    [
        ("whole", "gather wait gelu grad"),
        ("", "gather wait gelu R:gather R:wait grad"),
        ("y", "gather wait gelu R:gather R:wait grad"),
        ("whole y", "gather wait gelu grad"),
    ],
)
def test_small_plans(phases: tuple[str, ...], saved: str, order: str) -> None:
    check(small_problem(phases), small_plan(saved, order))


def test_one_phase_mixes_forward_and_backward() -> None:
    plan = small_plan("whole", "gather wait grad gelu")
    check(small_problem(("FIW",)), plan)
    with pytest.raises(InvalidPlan, match="gelu of phase F is issued after grad of phase IW"):
        check(small_problem(), plan)


@pytest.mark.parametrize(
    ("saved", "order", "message"),
    [
        (
            "",
            "gather wait gelu grad",
            "grad reads whole, which is neither saved nor recomputed; expected one of the two: "
            "save whole or issue R:wait before grad",
        ),
        (
            "",
            "gather wait gelu grad R:gather R:wait",
            "grad reads whole of R:wait, which is not issued before it; expected values to be "
            "made before they are read: move R:wait before grad",
        ),
        (
            "y",  # an output of the trace, but not saved work of the backward
            "gather wait gelu R:gelu grad",
            "R:gelu recomputes an op that may run only once; expected its results to be saved: "
            "save them and drop the recompute",
        ),
        (
            "raw",
            "gather wait gelu R:wait grad",
            "raw is saved, but the collective gather that makes it is unfinished; expected "
            "finished values: save what wait returns",
        ),
        (
            "whole",
            "gather wait gelu R:gather R:wait grad",
            "R:wait is issued, but all that wait makes is saved already; expected either to "
            "save or to recompute: drop one of the two",
        ),
        (
            "whole",
            "gather wait gelu R:gather grad",
            "R:gather is started and never waited for; expected a wait after each start: issue "
            "R:wait",
        ),
        (
            "whole",
            "wait gather gelu grad",
            "wait waits for gather, which is not issued before it; expected a start, then its "
            "wait: move gather before wait",
        ),
        (
            "",
            "",
            "gather is never issued (nor are 3 other ops); expected every op of the trace once: "
            "put it into the order",
        ),
    ],
)
def test_messages_say_found_expected_and_what_to_do(saved: str, order: str, message: str) -> None:
    with pytest.raises(InvalidPlan) as error:
        check(small_problem(), small_plan(saved, order))
    assert str(error.value) == message


def test_only_the_forward_hands_values_across_a_border() -> None:
    trace = small_problem().trace
    ops = tuple(
        replace(op, piece=Piece(0, "W", 0), inputs=("y",)) if op.name == "grad" else op
        for op in trace.ops
    )
    ops = tuple(replace(op, piece=Piece(0, "I", 0)) if op.name == "gelu" else op for op in ops)
    problem = replace(small_problem(), trace=replace(trace, ops=ops), phases=("F", "I", "W"))
    plan = replace(small_plan("whole", "gather wait gelu grad"), digest=problem.trace.digest)
    with pytest.raises(InvalidPlan, match="grad of phase W reads y, which gelu of another phase"):
        check(problem, plan)
    check(replace(problem, phases=("F", "IW")), plan)


def test_plan_of_another_trace() -> None:
    problem = small_problem()
    plan = replace(small_plan("whole", "gather wait gelu grad"), digest="8c1f")
    with pytest.raises(InvalidPlan) as error:
        check(problem, plan)
    assert str(error.value) == (
        f"the plan was made for trace 8c1f, this model traces to {problem.trace.digest}; "
        "plan again for this model, these input shapes, and what is to take the plan: TrainStep "
        "takes the plan of `step.report`, optimize the plan of `overlapc.predict` (with "
        "dynamic=False if models of its class have met other shapes)"
    )


@given(st.data())
def test_legal_plans_are_accepted(data: st.DataObject) -> None:
    problem = data.draw(problems(lags=True))
    validate_trace(problem.trace)
    plan = data.draw(legal_plans(problem))
    check(problem, plan)
    if not problem.trace.lag:  # merged pieces are executed in tests/torch/test_train_step.py
        assert execute(problem, plan) == eager(problem)


@pytest.mark.parametrize("rule", BREAKS)
def test_each_rule_is_enforced(rule: str) -> None:
    applied = 0
    for seed in range(3000):
        rng = Random(seed)
        problem = random_problem(rng)
        broken = BREAKS[rule](problem, random_plan(problem, rng), rng)
        if broken is None:
            continue
        with pytest.raises(InvalidPlan) as error:
            check(problem, broken.plan)
        assert broken.message in str(error.value), seed
        applied += 1
        if applied == 40:
            break
    assert applied == 40


@given(st.data())
def test_broken_plans_are_rejected(data: st.DataObject) -> None:
    problem = data.draw(problems(lags=True))
    broken = data.draw(break_plan(problem))
    with pytest.raises(InvalidPlan):
        check(problem, broken.plan)


def test_what_is_accepted_computes_the_trace() -> None:
    """Random damage to legal plans: whatever `check` lets pass computes the same results."""
    verdicts: Counter[str] = Counter()
    for seed in range(4000):
        rng = Random(seed)
        problem = random_problem(rng, max_ops=4)
        plan = random_plan(problem, rng)
        for _ in range(rng.randint(1, 2)):
            plan = damage(problem, plan, rng)
        try:
            check(problem, plan)
        except InvalidPlan:
            verdicts["rejected"] += 1
            continue
        assert execute(problem, plan) == eager(problem), seed
        verdicts["accepted"] += 1
    assert min(verdicts["accepted"], verdicts["rejected"]) > 500


def test_problems_show_every_feature() -> None:
    seen: Counter[str] = Counter()
    for seed in range(300):
        rng = Random(seed)
        problem = random_problem(rng)
        trace, plan = problem.trace, random_plan(problem, rng)
        features = {
            "two phases": len(problem.phases) == 2,
            "one phase": len(problem.phases) == 1,
            "two microbatches": len({op.piece.microbatch for op in trace.ops}) == 2,
            "no collective": not trace.lanes,
            "several lanes": len(trace.lanes) > 1,
            "collective of W": any(o.role == "start" and o.piece.letter == "W" for o in trace.ops),
            "several waits": len(trace.start_of) > len(trace.wait_of),
            "work between": any(
                one.role == "start" and two.role == "forward"
                for one, two in zip(trace.ops, trace.ops[1:], strict=False)
            ),
            "alias": len({v.storage for v in trace.values if v.producer}) < len(trace.values),
            "view of an input": any(
                v.producer and v.storage in trace.resident for v in trace.values
            ),
            "several outputs": any(len(op.outputs) > 2 for op in trace.ops),
            "no output": any(not op.outputs for op in trace.ops),
            "random forward": any(op.random and op.is_forward for op in trace.ops),
            "random backward": any(op.random and not op.is_forward for op in trace.ops),
            "runs once": any(not op.recomputable for op in trace.ops),
            "workspace": any(cost.workspace_bytes for cost in problem.profile.costs.values()),
            "in flight": problem.in_flight > 1,
            "slowdown": problem.profile.slowdown.compute_permille > 1000,
            "no budget": problem.budget_bytes is None,
            "resident": problem.resident_bytes > 0,
            "input is output": bool(set(trace.inputs) & set(trace.outputs)),
            "forward output": any(
                v.producer and trace.op[v.producer].is_forward
                for v in map(trace.value.__getitem__, trace.outputs)
            ),
            "recomputed collective": any(trace.op[n].role == "start" for n in plan.recomputed),
            "recomputed random": any(trace.op[n].random for n in plan.recomputed),
            "partly saved op": any(
                set(trace.op[n].outputs) & set(plan.saved) for n in plan.recomputed
            ),
        }
        seen.update({feature: int(shown) for feature, shown in features.items()})
    assert {feature for feature, count in seen.items() if count < 5} == set()


# --- the oracle ---------------------------------------------------------------------------------


def eager(problem: Problem) -> dict[str, int]:
    """What the trace computes, run as it stands: a term for each of its outputs."""
    env = {name: hash(name) for name in problem.trace.inputs}
    draws: Counter[int] = Counter()
    for op in problem.trace.ops:
        _run(problem, op, env, env, draws, {})
    return {name: env[name] for name in problem.trace.outputs}


def execute(problem: Problem, plan: Plan) -> dict[str, int]:
    """What the plan computes. KeyError where it reads what is not there."""
    trace = problem.trace
    inputs = {name: hash(name) for name in trace.inputs}
    forward, later = dict(inputs), dict(inputs)  # what ops of the forward read; what others read
    results = dict(inputs)
    draws: Counter[int] = Counter()
    drawn: dict[str, int] = {}
    running: set[tuple[str, bool]] = set()
    phase = 0
    for name, again in issues(plan.order):
        op = trace.op[name]
        if problem.phase_of(op, again) != phase:
            phase += 1
            assert problem.phase_of(op, again) == phase
            forward = dict(inputs)
            later = {name: term for name, term in later.items() if name in (*inputs, *plan.saved)}
        if again:
            assert op.is_forward
            assert op.recomputable
            made: dict[str, int] = {}
            _run(problem, op, later, made, Counter(), {name: drawn.get(name, -1)})
            later |= {name: term for name, term in made.items() if name not in plan.saved}
        else:
            made = {}
            drawn[name] = draws[phase]
            _run(problem, op, forward if op.is_forward else later, made, draws, {})
            (forward if op.is_forward else later).update(made)
            later |= {name: term for name, term in made.items() if name in plan.saved}
            assert not results.keys() & made.keys()
            results |= made
        if op.role == "start":
            running.add((name, again))
        elif op.role == "wait":
            running.discard((trace.start_of[name], again))
    assert not running
    assert len(results) == len(trace.values)
    return {name: results[name] for name in trace.outputs}


def _run(
    problem: Problem,
    op: Op,
    read: dict[str, int],
    write: dict[str, int],
    draws: Counter[int],
    drawn: dict[str, int],
) -> None:
    """One op on terms: its results follow from what it is, reads and draws."""
    draw = -1
    if op.random:
        phase = problem.phase_of(op)
        draw = drawn.get(op.name, draws[phase])
        draws[phase] += 1
    term = (op.name, draw, *(read[name] for name in op.inputs))
    write.update({name: hash((*term, name)) for name in op.outputs})


def damage(problem: Problem, plan: Plan, rng: Random) -> Plan:
    order, saved = list(plan.order), list(plan.saved)
    kind = rng.choice(("swap", "move", "move", "drop", "repeat", "recompute", "save", "forget"))
    if not order:
        return plan
    at = rng.randrange(len(order))
    if kind == "swap":
        other = rng.randrange(len(order))
        order[at], order[other] = order[other], order[at]
    elif kind == "move":
        order.insert(rng.randint(max(0, at - 3), min(at + 3, len(order) - 1)), order.pop(at))
    elif kind == "drop":
        del order[at]
    elif kind == "repeat":
        order.insert(rng.randint(0, len(order)), order[at])
    elif kind == "recompute":
        order.insert(rng.randint(0, len(order)), "R:" + rng.choice(problem.trace.ops).name)
    elif kind == "save":
        saved.append(rng.choice(problem.trace.values).name)
    elif saved:
        saved.pop(rng.randrange(len(saved)))
    return replace(plan, order=tuple(order), saved=tuple(saved))
