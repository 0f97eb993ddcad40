"""Slices of one batch: their problem, and plans of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from overlapc.core.check import check
from overlapc.core.errors import Infeasible, InvalidPlan, InvalidProblem
from overlapc.core.ir import Op, Problem
from overlapc.core.merge import (
    ADD,
    ADDS,
    BEFORE,
    TOTAL,
    accumulate,
    at,
    in_slices,
    of_slice,
    one_by_one,
    with_bytes,
)
from overlapc.core.simulate import RNG_STATE_BYTES, memory_curve, peak_bytes, simulate, step_ns
from overlapc.planning import road
from overlapc.planning.options import Options
from overlapc.solvers import BASELINES
from overlapc.solvers.choose.choice import Needs, choice_of, plan_on_demand
from overlapc.solvers.order.listing import Style
from overlapc.solvers.order.slices import (
    TURNS,
    Turns,
    across_border,
    crosses_border,
    slice_order,
    solve_slices,
)
from overlapc.solvers.order.work import NEVER, backward_work, forward_work
from tests.plain.strategies import random_problem
from tests.plain.tiny import plan_of, tiny

COPY = """
    first   F    | x p   > a     | 10
    gather  F tp | a     > raw   | 0 + 10
    wait    F    | raw   > whole
    last    F    | whole > z     | 10
    back    I    | g z   > d     | 10
    push    I tp | d     > sent  | 0 + 10
    wait2   I    | sent  > e
    end     W    | e x   > dp    | 10
    """


def one_copy() -> Problem:
    lone = tiny(COPY, outputs="dp")
    kinds = {"p": "parameter", "x": "batch", "g": "gradient"}
    return accumulate(replace(lone, trace=replace(lone.trace, kinds=kinds)), ["dp"])


def copied(count: int) -> Problem:
    return in_slices(one_copy(), count)


def lone_problem(rng, count: int) -> Problem:
    """Now and then with ops that ask for a total, and with random ones that slices draw together,
    `draws_of(it)`."""
    problem = random_problem(rng, 4)
    assume(not any(op.piece.microbatch for op in problem.trace.ops))
    often = rng.choice((0.0, 0.3))

    def varied(op: Op) -> Op:
        op = replace(op, random=False, seeded=op.random)
        if op.role in ("start", "wait") or not op.inputs or not op.outputs or rng.random() > often:
            return op
        if op.is_forward and rng.random() < 0.5:
            return replace(op, random=True, recomputable=False)
        signature, given = f"{TOTAL}default", op.inputs[:1]
        return replace(op, inputs=given, signature=signature, recomputable=False)

    ops = tuple(varied(op) for op in problem.trace.ops)
    lone = replace(problem, phases=("F", "IW"), trace=replace(problem.trace, ops=ops))
    return replace(lone, in_flight=count)


def draws_of(problem: Problem) -> list[str]:
    return [op.name for op in problem.trace.ops if op.random]


def test_slices_share_parameters_and_add_up_in_order():
    problem = copied(3)
    assert problem.trace.inputs == ("x@0", "p", "g", "x@1", "x@2")
    adds = [op for op in problem.trace.ops if ADD in op.name]
    assert [op.inputs for op in adds] == [
        ("dp@0",),
        ("dp@1", "dp_add@0"),
        ("dp@2", "dp_add@1"),
    ]
    plain = plan_on_demand(problem, Needs(problem.trace).storages, "none")
    check(problem, plain)
    order = [text for text in plain.order if text != "dp_add@0"]
    with pytest.raises(InvalidPlan, match=r"dp_add@1 reads dp_add@0 of dp_add@0, which is not"):
        check(problem, replace(plain, order=(*order, "dp_add@0")))


def test_slices_of_a_stage_have_incoming_gradients_of_their_own():
    lone = tiny(COPY, outputs="dp")
    kinds = {"p": "parameter", "x": "batch", "g": "gradient"}
    lone = replace(lone, trace=replace(lone.trace, kinds=kinds))
    problem = in_slices(accumulate(lone, ["dp"]), 2, loss=False)
    assert problem.trace.of_kind("gradient") == ("g@0", "g@1")
    assert problem.trace.op["back@1"].inputs == ("g@1", "z@1")


def test_a_slice_asks_the_one_before_it_what_it_counted():
    lone = tiny("count F | x > n | 1\nask F | n > m | 1\nuse F | x m > y | 1", outputs="y")
    ops = tuple(
        replace(op, signature=f"{BEFORE}default", recomputable=False) if op.name == "ask" else op
        for op in lone.trace.ops
    )
    problem = in_slices(replace(lone, trace=replace(lone.trace, ops=ops)), 3)
    asked = [problem.trace.op[f"ask@{k}"].inputs for k in range(3)]
    assert asked == [("n@0",), ("n@0", "m@0"), ("n@1", "m@1")]
    plain = plan_on_demand(problem, Needs(problem.trace).storages, "none")
    check(problem, plain)
    late = ("count@1", "ask@1", *(t for t in plain.order if t not in ("count@1", "ask@1")))
    with pytest.raises(InvalidPlan, match="ask@1"):
        check(problem, replace(plain, order=late))
    assert "ask@2" in slice_order(forward_work(problem), NEVER, Style(1.0, False), TURNS[0])


def test_a_total_reads_all_slices_and_a_draw_is_the_first_slices():
    lone = tiny("draw F | x > r | 1\ncount F | r > n | 1\nsum F | n > m | 1\nuse F | m > y | 1")
    changed = {
        "sum": {"signature": f"{TOTAL}default", "recomputable": False},
        "draw": {"random": True, "recomputable": False},
    }
    ops = tuple(replace(op, **changed.get(op.name, {})) for op in lone.trace.ops)
    lone = replace(lone, trace=replace(lone.trace, ops=ops, outputs=("y",)))
    problem = in_slices(lone, 2, draws=["draw"])
    op = problem.trace.op
    assert op["sum@0"].inputs == op["sum@1"].inputs == ("n@0", "n@1")
    assert op["draw@0"].outputs == ("r@0", "draw_drawn@0")
    assert op["draw@1"].inputs == ("x@1", "draw_drawn@0")
    assert [op[f"draw@{k}"].random for k in range(2)] == [True, False]
    plain = one_by_one(problem, plan_on_demand(lone, (), "none"))
    assert plain.order == (
        *("draw@0", "count@0", "draw@1", "count@1"),
        *("sum@0", "use@0", "sum@1", "use@1"),
    )
    check(problem, plain)
    early = ("draw@0", "count@0", "sum@0", "use@0", "draw@1", "count@1", "sum@1", "use@1")
    with pytest.raises(InvalidPlan, match="sum@0 reads n@1"):
        check(problem, replace(plain, order=early))


def test_what_slices_do_not_draw_together_needs_no_order_but_keeps_its_states():
    """Each of the four ops keeps a state until it has run again; while it does, another is put
    aside."""
    lone = tiny(
        "one F | x > a | 1\ntwo F | a > y | 1\nend I | g y > e | 1\nback I | e a > d | 1", "d"
    )
    ops = tuple(replace(op, random=op.name in ("one", "two")) for op in lone.trace.ops)
    problem = in_slices(replace(lone, trace=replace(lone.trace, ops=ops)), 2, loss=False)
    assert all(op.seeded and not op.random for op in problem.trace.ops if op.is_forward)
    order = "one@1 two@1 one@0 two@0 R:one@0 R:two@0 end@0 back@0 R:one@1 R:two@1 end@1 back@1"
    plan = plan_of(problem, order, "")
    stateless = tuple(replace(op, seeded=False) for op in problem.trace.ops)
    less = replace(problem, trace=replace(problem.trace, ops=stateless))
    curves = (memory_curve(each, plan) for each in (problem, less))
    states = [(more - few) // RNG_STATE_BYTES for more, few in zip(*curves, strict=True)]
    assert states == [1, 2, 3, 4, 5, 4, 2, 2, 3, 2, 0, 0]


def test_what_one_slice_waits_for_runs_under_the_other():
    """One after the other each slice takes 60; here every collective has the other's compute."""
    problem = copied(2)
    lone = replace(accumulate(tiny(COPY, outputs="dp"), ["dp"]), in_flight=2)
    alone = plan_on_demand(lone, ["z"], "none")
    assert step_ns(problem, one_by_one(problem, alone)) == 120
    plan = solve_slices(problem, lone, alone)
    timeline = simulate(problem, plan)
    assert timeline.step_ns == 80
    assert timeline.exposed_ns == 0
    assert "turns" in plan.found_by


def test_slices_hurry_but_for_the_last_layer():
    """Layers of experts: what is before the exchange may be cut in two, to hide both exchanges of
    the other slice; but at the end nothing hides the last slice's."""
    lines, last = [], "x"
    for i in range(3):
        lines.append(
            f"long{i} F | {last} > a{i} | 110\nthere{i} F ep | a{i} > b{i} | 0 + 50\n"
            f"wait{i}a F | b{i} > c{i}\nshort{i} F | c{i} > d{i} | 45\n"
            f"back{i} F ep | d{i} > e{i} | 0 + 50\nwait{i}b F | e{i} > f{i}"
        )
        last = f"f{i}"
    halves = [
        line.replace(f"> a{i} | 110", f"> h{i} | 55\nmore{i} F | h{i} > a{i} | 55")
        for i, line in enumerate(lines)
    ]
    lone = tiny("\n".join(halves), outputs=last)
    problem = in_slices(replace(lone, trace=replace(lone.trace, kinds={"x": "batch"})), 2)
    work = forward_work(problem)

    def took(turns: Turns) -> int:
        order = slice_order(work, NEVER, Style(1.0, False), turns)
        return step_ns(problem, plan_of(problem, " ".join(order), ""))

    calm = Turns("on", hurry=True, calm=2)
    assert calm in TURNS
    assert took(calm) < min(took(turns) for turns in TURNS if turns != calm)


@settings(max_examples=60)
@given(st.randoms(use_true_random=False), st.integers(2, 4), st.sampled_from(TURNS))
def test_orders_are_legal(rng, count, turns):
    lone = lone_problem(rng, count)
    problem = in_slices(replace(lone, in_flight=1), count, draws=draws_of(lone))
    choice = choice_of(problem, plan_on_demand(problem, Needs(problem.trace).storages[::2], "half"))
    for style in (Style(2.0, False), Style(1.0, True)):
        forward = slice_order(forward_work(problem), NEVER, style, turns)
        for limit in (NEVER, problem.budget_bytes or 100):
            backward = slice_order(backward_work(problem, choice), limit, style, turns)
            plan = plan_of(problem, " ".join(forward + backward), " ".join(choice.saved))
            check(problem, plan)


@settings(max_examples=40)
@given(
    st.randoms(use_true_random=False),
    st.integers(2, 3),
    st.sampled_from([None, 1.0, 1.2]),
    st.booleans(),
)
def test_a_plan_of_slices_is_never_worse_than_one_after_the_other(rng, count, room, quick):
    lone = lone_problem(rng, count)
    problem = in_slices(replace(lone, in_flight=1), count, draws=draws_of(lone))
    alone = plan_on_demand(lone, Needs(lone.trace).storages[::2], "half")
    plain = one_by_one(problem, alone)
    check(problem, plain)
    budget = None if room is None else int(peak_bytes(problem, plain) * room)
    problem, lone = (replace(each, budget_bytes=budget) for each in (problem, lone))
    plan = solve_slices(problem, lone, alone, quick)
    check(problem, plan)
    assert step_ns(problem, plan) <= step_ns(problem, plain)
    assert budget is None or peak_bytes(problem, plan) <= budget
    for k in range(count):
        check(lone, of_slice(plan, k, lone.trace.digest))


def test_a_backward_begins_before_the_last_forward_has_ended():
    """The lane idles for `last` and `back`, 20 of 160, where all forwards are done first."""
    lone = one_copy()
    costs = {
        name: replace(cost, comm_ns=3 * cost.comm_ns) for name, cost in lone.profile.costs.items()
    }
    problem = in_slices(replace(lone, profile=replace(lone.profile, costs=costs)), 2)
    forwards = "first@0 gather@0 first@1 gather@1 wait@0 last@0 wait@1 last@1"
    backwards = "back@0 push@0 back@1 push@1 wait2@0 end@0 dp_add@0 wait2@1 end@1 dp_add@1"
    plan = plan_of(problem, f"{forwards} {backwards}", "z@0 z@1")
    assert step_ns(problem, plan) == 160
    assert not crosses_border(problem, plan)
    one, crossed = across_border(problem, plan)
    check(one, crossed)
    assert one.phases == ("FIW",)
    assert crosses_border(problem, crossed)
    assert crossed.order.index("push@0") < crossed.order.index("last@1")
    assert step_ns(one, crossed) == 140
    with pytest.raises(InvalidPlan, match="expected the phases F, IW one after the other"):
        check(problem, crossed)
    assert across_border(one, crossed) == (one, crossed)  # there is no more to gain


@settings(max_examples=60)
@given(st.randoms(use_true_random=False), st.integers(2, 3), st.integers(0, 3))
def test_plans_across_the_border_are_legal_fit_and_are_faster(rng, count, ranks):
    """Also where ranks have other costs, by which all are then judged."""
    lone = lone_problem(rng, count)
    problem = in_slices(replace(lone, in_flight=1), count, draws=draws_of(lone))
    alone = plan_on_demand(lone, Needs(lone.trace).storages, "none")
    budget = rng.choice((None, peak_bytes(problem, one_by_one(problem, alone))))
    problem, lone = (replace(each, budget_bytes=budget) for each in (problem, lone))

    def other() -> Problem:
        costs = {
            name: replace(cost, compute_ns=rng.randint(0, 20))
            for name, cost in problem.profile.costs.items()
        }
        return replace(problem, profile=replace(problem.profile, costs=costs))

    each = [other() for _ in range(ranks)]
    profiles = [one.profile for one in each] or None
    plan = solve_slices(problem, lone, alone, quick=True, ranks=each)
    assert step_ns(problem, plan, each) == simulate(problem, plan, profiles).step_ns
    assert step_ns(problem, plan, each) <= step_ns(problem, one_by_one(problem, alone), each)
    one, crossed = across_border(problem, plan, each)
    check(one, crossed)
    assert (one.phases == ("FIW",)) == crosses_border(problem, crossed) == (crossed != plan)
    assert budget is None or peak_bytes(one, crossed) <= budget
    place = {text: i for i, text in enumerate(crossed.order)}
    last = max(place[op.name] for op in one.trace.ops if op.is_forward)
    assert all(place[op.name] > last for op in one.trace.ops if op.signature == ADDS)
    found = simulate(one, crossed, profiles).step_ns
    assert crossed == plan or found < step_ns(problem, plan, each)


@settings(max_examples=30)
@given(st.randoms(use_true_random=False), st.integers(2, 3), st.floats(0.0, 1.0))
def test_heu_in_slices_is_never_slower_than_a_baseline_in_slices(rng, count, share):
    """Although a slice's own plan is found with little effort."""
    lone = lone_problem(rng, count)
    problem = in_slices(replace(lone, in_flight=1), count, draws=draws_of(lone))
    plans = [make(lone) for make in BASELINES.values()]
    peaks = [max(peak_bytes(lone, p), peak_bytes(problem, one_by_one(problem, p))) for p in plans]
    budget = min(peaks) + int((max(peaks) - min(peaks)) * share)
    problem, lone = (replace(each, budget_bytes=budget) for each in (problem, lone))
    (plan,) = road._sliced(problem, lone, Options(solver="heu"), tuple)
    fitting = [p for p, peak in zip(plans, peaks, strict=True) if peak <= budget]
    assert step_ns(problem, plan) <= min(step_ns(problem, one_by_one(problem, p)) for p in fitting)


@settings(max_examples=20)
@given(
    st.randoms(use_true_random=False),
    st.integers(2, 4),
    st.sampled_from(["heu", "overlap", "none", "full", "uniform"]),
)
def test_what_does_not_fit_names_a_budget_that_does(rng, count, solver):
    """Also where slices draw together or wait for totals, and with other op times."""
    lone = lone_problem(rng, count)

    def planned(budget: int) -> int:
        costs = {
            name: replace(cost, compute_ns=rng.randint(0, 20))
            for name, cost in lone.profile.costs.items()
        }
        profile = replace(lone.profile, costs=costs)
        one = replace(lone, profile=profile, budget_bytes=budget)
        problem = in_slices(replace(one, in_flight=1), count, draws=draws_of(lone))
        (plan,) = road._sliced(problem, one, Options(solver=solver), tuple)
        check(problem, plan)
        return peak_bytes(problem, plan)

    eager = peak_bytes(lone, plan_on_demand(lone, Needs(lone.trace).storages, "none"))
    budget = rng.randint(1, max(1, eager))
    try:
        assert planned(budget) <= budget
    except Infeasible as infeasible:
        least = infeasible.smallest_bytes
        assert budget < least
        assert planned(least) <= least


def test_a_listing_that_cannot_go_on_names_the_op():
    work = forward_work(copied(2))
    early, late = work.number["gather@1"], work.number["last@1"]
    work.after[late].append(early)  # which waits for it
    work.needs[early] += 1
    with pytest.raises(InvalidProblem, match=r"gather@1 can never run, and 3 of 8 .* for last@1;"):
        slice_order(work, NEVER, Style(1.0, False), TURNS[0])


def test_each_slice_may_have_bytes_of_its_own() -> None:
    lone = one_copy()
    problem = copied(3)
    name = next(v.storage for v in lone.trace.values if v.bytes and v.producer)
    trace = with_bytes(problem.trace, [{name: 7}, {name: 9}])
    for k, expected in enumerate((7, 9, 9)):
        assert trace.value[at(name, k)].bytes == expected, "the last is as all that follow"
    others = [v for v in trace.values if not v.storage.startswith(name + "@")]
    assert all(v == problem.trace.value[v.name] for v in others)
    assert trace.digest == problem.trace.digest
