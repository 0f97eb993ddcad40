"""What others cut: ranges of a graph, by a dynamic program or between all-to-alls."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.papers.lancet_ranges import best_ranges, experts, groups, ordered, program, took_ns
from benchmarks.papers.ranges import Range, in_ranges
from overlapc.core.check import check
from overlapc.core.errors import OptionError
from overlapc.core.ir import Cost, Problem, Slowdown
from overlapc.core.simulate import simulate, step_ns
from overlapc.solvers.field import baselines
from tests.plain.strategies import random_problem
from tests.plain.tiny import tiny

MOE = """
    before   F    | x p    > a     | 10
    route    F    | a      > b~a   | 0
    there    F tp | b      > raw   | 0 + 20
    wait     F    | raw    > c
    expert   F    | c p    > d     | 20
    back     F tp | d      > raw2  | 0 + 20
    wait2    F    | raw2   > e
    after    F    | e a    > y     | 10
    grad     I    | g p    > de    | 10
    there2   I tp | de     > raw3  | 0 + 20
    wait3    I    | raw3   > dd
    dexpert  I    | dd p   > dc    | 20
    dp_1     W    | dd c   > dp1   | 20
    back2    I tp | dc     > raw4  | 0 + 20
    wait4    I    | raw4   > da
    end      I    | da p   > dx    | 10
    """


def moe() -> Problem:
    problem = tiny(MOE, outputs="y dp1 dx")
    kinds = {"p": "parameter", "x": "batch", "g": "gradient"}
    ops = tuple(
        replace(op, signature="_c10d_functional.all_to_all_single" if op.role == "start" else "op")
        for op in problem.trace.ops
    )
    return replace(problem, trace=replace(problem.trace, kinds=kinds, ops=ops))


def smaller(problem: Problem, count: int, more_ns: int = 0) -> Problem:
    """The problem of one of so many pieces, each of whose ops takes some time more than its
    share."""

    def piece(cost: Cost) -> Cost:
        share = cost.compute_ns // count + (more_ns if cost.compute_ns else 0)
        return replace(cost, compute_ns=share, comm_ns=cost.comm_ns // count)

    costs = {name: piece(cost) for name, cost in problem.profile.costs.items()}
    shared = {problem.trace.value[name].storage for name in problem.trace.of_kind("parameter")}
    values = tuple(
        v if v.storage in shared or v.name == "dp1" else replace(v, bytes=v.bytes // count)
        for v in problem.trace.values
    )
    trace = replace(problem.trace, values=values)
    return replace(problem, trace=trace, profile=replace(problem.profile, costs=costs))


def forward_ns(problem: Problem) -> int:
    return simulate(problem, baselines.none(problem)).phase_ns[0]


def test_a_range_is_cut_and_joined():
    problem = moe()
    places = {op.name: place for place, op in enumerate(problem.trace.ops)}
    cut = in_ranges(problem, {2: smaller(problem, 2)}, [Range(places["there"], places["after"], 2)])
    trace = cut.problem.trace
    assert trace.op["there@1"].inputs == ("b",)  # a part of what is whole
    assert trace.op["expert@1"].inputs == ("c@1", "p")
    assert trace.op["e_joined"].inputs == ("e@0", "e@1")
    assert trace.op["c_joined"].outputs == ("c",)  # which the backward reads
    assert "d" not in trace.value
    order = ordered(cut, places["there"], places["after"])
    assert took_ns(cut, order) == 40  # what the lane takes; 60 one after the other


def test_splits_and_joins_are_copies():
    """A piece does not read a part of what is whole, but of a copy; each storage is joined once."""
    problem = moe()
    places = {op.name: place for place, op in enumerate(problem.trace.ops)}
    slices, spans = {2: smaller(problem, 2)}, [Range(places["there"], places["after"], 2)]
    cut = in_ranges(problem, slices, spans, copy_ns_per_byte=0.5)
    trace, cost = cut.problem.trace, cut.problem.cost
    assert trace.op["there@1"].inputs == ("b_parts_2",)
    assert trace.op["b_parts_2_split"].inputs == ("b",)
    assert trace.op["expert@1"].inputs == ("c@1", "p")  # a parameter is no part of the batch
    size = problem.trace.value["c"].bytes
    assert cost("b_parts_2_split").compute_ns == round(0.5 * problem.trace.value["b"].bytes)
    assert cost("c_joined").compute_ns == round(0.5 * size)
    slower, plan = program(problem, slices, copy_ns_per_byte=1000)
    assert step_ns(slower, plan) == step_ns(problem, baselines.lancet(problem))  # nothing is cut


def test_experts_are_cut_where_that_is_faster():
    problem = moe()
    found, plan = experts(problem, {2: smaller(problem, 2), 4: smaller(problem, 4, 3)})
    check(found, plan)
    assert plan.solver == "experts"
    assert "expert@1" in plan.order
    assert "dexpert@1" in plan.order
    assert "expert@2" not in plan.order
    assert "before@0" not in plan.order
    whole = step_ns(problem, baselines.none(problem))
    assert step_ns(found, plan) < whole
    found, plan = experts(problem, {2: smaller(problem, 2, 100)})
    assert step_ns(found, plan) == whole  # one piece


def test_groups_lie_between_collectives():
    problem = moe()
    borders = groups(problem)
    names = [problem.trace.ops[place].name for place in borders[:-1]]
    assert names == ["before", "route", "there", "expert", "back", "after"]


def test_pieces_of_another_model_are_refused():
    problem = moe()
    with pytest.raises(OptionError, match="before is in the trace of the batch"):
        in_ranges(problem, {2: tiny("other F | x > y | 1")}, [Range(0, 3, 2)])


@settings(max_examples=20)
@given(
    st.randoms(use_true_random=False),
    st.integers(0, 6),
    st.sampled_from([Slowdown(), Slowdown(1200, 1100)]),
    st.integers(1, 4),
    st.sampled_from([0, 0.1, 1]),
)
def test_the_program_finds_the_best_ranges(rng, more_ns, slowdown, longest, copy_ns):
    """All ways to cut the forward into ranges, one after the other in a plan, are no faster."""
    problem = random_problem(rng, 5)
    kinds = {name: rng.choice(["parameter", "batch"]) for name in problem.trace.inputs}
    ops = tuple(replace(op, random=False) for op in problem.trace.ops)
    values = tuple(replace(v, bytes=16 * (v.bytes // 16)) for v in problem.trace.values)
    trace = replace(problem.trace, kinds=kinds, ops=ops, values=values)
    profile = replace(problem.profile, slowdown=slowdown)
    problem = replace(problem, trace=trace, profile=profile, phases=("F", "IW"))
    slices = {k: smaller(problem, k, more_ns) for k in (2, 4)}
    borders = groups(problem)[:5]
    found = best_ranges(problem, slices, borders, longest, copy_ns)
    assert [found[0].first, found[-1].end] == [borders[0], borders[-1]]
    assert all(a.end == b.first for a, b in pairwise(found))

    def together_ns(ranges: list[Range]) -> int:
        cut = in_ranges(problem, slices, ranges, copy_ns)
        return took_ns(cut, tuple(text for r in ranges for text in ordered(cut, r.first, r.end)))

    best = together_ns(found)
    inner = len(borders) - 2
    for chosen in product((False, True), repeat=max(0, inner)):
        edges = [0, *(i + 1 for i in range(inner) if chosen[i]), len(borders) - 1]
        spans = [(a, b) for a, b in pairwise(edges)]
        if any(b - a > longest for a, b in spans):
            continue
        for pieces in product((1, 2, 4), repeat=len(spans)):
            ranges = [
                Range(borders[a], borders[b], k) for (a, b), k in zip(spans, pieces, strict=True)
            ]
            assert best <= together_ns(ranges)


def test_the_program_is_no_slower_than_the_whole_forward():
    problem = moe()
    found, plan = program(problem, {2: smaller(problem, 2), 4: smaller(problem, 4)})
    check(found, plan)
    assert plan.solver == "lancet-program"
    assert simulate(found, plan).phase_ns[0] < forward_ns(problem)
    found, plan = program(problem, {2: smaller(problem, 2, 1000)})
    assert simulate(found, plan).phase_ns[0] == forward_ns(problem)
