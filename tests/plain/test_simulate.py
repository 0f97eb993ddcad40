"""`simulate` by hand on tiny problems, and against a second simulator that shares nothing with it.

The oracles are slow and plain: `tick_by_tick` runs every rank and lane one nanosecond at a time,
`bytes_alive` asks for every issue which storages are alive, straight from the definition.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlapc.core.errors import InvalidPlan
from overlapc.core.ir import (
    Cost,
    Exposure,
    Plan,
    Problem,
    Profile,
    Slowdown,
    Trace,
    issue,
    parse_issue,
)
from overlapc.core.simulate import (
    RNG_STATE_BYTES,
    memory_curve,
    peak_bytes,
    saved_bytes,
    simulate,
    step_ns,
)
from overlapc.solvers import bound_ns, solve
from tests.plain.strategies import legal_plans, problems, random_plan, random_problem
from tests.plain.tiny import drawn, plan_of, recosted, tiny

# --- time, by hand ------------------------------------------------------------------------------

BLOCK = """
    gather  F tp | x       > raw   | 1 + 10
    wait    F    | raw     > whole
    gelu    F    | whole   > y     | 3
    grad    I    | t whole > dx    | 4
    weight  W    | t whole > dw    | 5
"""


def test_compute_stands_still_until_the_collective_has_ended():
    problem = tiny(BLOCK, "y dx dw")
    timeline = simulate(problem, plan_of(problem, saved="whole"))
    assert drawn(timeline) == {
        "compute": "gather 0-1, gelu 11-14, grad 14-18, weight 18-23",
        "tp": "gather 1-11",
    }
    assert timeline.step_ns == 23
    assert timeline.phase_ns == (14, 9)
    assert timeline.exposures == (Exposure("gather", "tp", 10, 10, ()),)
    assert timeline.recompute_ns == 0


def test_a_recomputed_collective_is_hidden_by_what_is_issued_in_its_window():
    problem = tiny(BLOCK + "pre I | t > dt | 6", "y dx dw dt")
    order = "gather wait gelu R:gather pre R:wait grad weight"
    timeline = simulate(problem, plan_of(problem, order))
    assert drawn(timeline) == {
        "compute": "gather 0-1, gelu 11-14, R:gather 14-15, pre 15-21, grad 25-29, weight 29-34",
        "tp": "gather 1-11, R:gather 15-25",
    }
    assert timeline.phase_ns == (14, 20)
    assert timeline.exposures[1] == Exposure("R:gather", "tp", 10, 4, ("pre",))
    assert (timeline.exposed_ns, timeline.comm_ns) == (14, 20)
    assert timeline.recompute_ns == 1  # its time on the compute lane: the launch


def test_a_collective_longer_than_its_window_and_one_shorter():
    text = """
        gather F tp | x     > raw   | 0 + {comm}
        other  F    | x     > o     | 6
        wait   F    | raw   > whole
        last   F    | whole > y     | 2
    """
    for comm, exposed, step in [(10, 4, 12), (6, 0, 8), (3, 0, 8), (0, 0, 8)]:
        problem = tiny(text.format(comm=comm), "y o")
        timeline = simulate(problem, plan_of(problem))
        assert timeline.exposures[0].exposed_ns == exposed
        assert timeline.step_ns == step
        assert timeline.exposures[0].hidden_by == (("other",) if comm else ())


TWO = """
    a      F {a} | x  > ra | 1 + 10
    b      F {b} | x  > rb | 1 + 10
    wait_a F     | ra > A
    f      F     | A  > y  | 5
    wait_b F     | rb > B
    g      F     | B  > z  | 5
"""


def test_one_lane_runs_its_collectives_one_after_the_other():
    problem = tiny(TWO.format(a="tp", b="tp"), "y z")
    timeline = simulate(problem, plan_of(problem))
    assert drawn(timeline) == {
        "compute": "a 0-1, b 1-2, f 11-16, g 21-26",
        "tp": "a 1-11, b 11-21",
    }
    assert [e.exposed_ns for e in timeline.exposures] == [9, 5]
    assert [e.hidden_by for e in timeline.exposures] == [("b",), ("f",)]


def test_two_lanes_run_side_by_side():
    problem = tiny(TWO.format(a="tp", b="dp"), "y z")
    timeline = simulate(problem, plan_of(problem))
    assert drawn(timeline) == {
        "compute": "a 0-1, b 1-2, f 11-16, g 16-21",
        "tp": "a 1-11",
        "dp": "b 2-12",
    }
    assert [e.exposed_ns for e in timeline.exposures] == [9, 0]


def test_a_lane_keeps_the_order_of_launches_whoever_is_waited_for_first():
    problem = tiny(TWO.format(a="tp", b="tp"), "y z")
    timeline = simulate(problem, plan_of(problem, "a b wait_b g wait_a f"))
    assert drawn(timeline)["compute"] == "a 0-1, b 1-2, g 21-26, f 26-31"
    # All of the time stood still is b's, though half of it went by under a.
    assert {e.issue: e.exposed_ns for e in timeline.exposures} == {"a": 0, "b": 19}


def test_who_waits_goes_on_at_once_while_another_collective_runs():
    """Whether the one that ended took time or none."""
    for comm, begins in [(10, 10), (0, 0)]:
        problem = tiny(TWO.format(a="tp", b="tp"), "y z")
        costs = [("a", Cost(0, comm)), ("b", Cost(0, 50))]
        problem = replace(problem, profile=recosted(problem, costs))
        timeline = simulate(problem, plan_of(problem))
        assert drawn(timeline)["compute"].startswith(f"f {begins}-{begins + 5}")


def test_ops_without_cost_take_no_time_and_leave_no_span():
    problem = tiny(BLOCK, "y dx dw")
    free = replace(problem, profile=Profile({op.name: Cost() for op in problem.trace.ops}))
    timeline = simulate(free, plan_of(free, saved="whole"))
    assert drawn(timeline) == {"tp": "gather 0-0"}
    assert timeline.step_ns == 0
    assert timeline.phase_ns == (0, 0)


def test_a_wait_may_cost_compute_time_after_the_collective():
    problem = tiny(BLOCK.replace("> whole\n", "> whole | 2\n", 1), "y dx dw")
    timeline = simulate(problem, plan_of(problem, saved="whole"))
    assert drawn(timeline)["compute"].startswith("gather 0-1, wait 11-13, gelu 13-16")
    assert timeline.exposures[0].exposed_ns == 10


def test_a_phase_without_issues_takes_no_time():
    problem = tiny("f F | x > y | 5", "y")
    assert simulate(problem, plan_of(problem)).phase_ns == (5, 0)
    problem = tiny("g I | x > y | 5", "y")
    assert simulate(problem, plan_of(problem)).phase_ns == (0, 5)
    merged = replace(problem, phases=("FIW",))
    assert simulate(merged, plan_of(merged)).phase_ns == (5,)


def test_an_empty_trace():
    problem = Problem(Trace((), (), (), ()), Profile({}))
    timeline = simulate(problem, Plan("", "by hand", (), ()))
    assert (timeline.step_ns, timeline.phase_ns, timeline.peak_bytes) == (0, (0, 0), 0)


def test_a_wait_before_its_start_is_refused():
    problem = tiny(BLOCK, "y dx dw")
    with pytest.raises(InvalidPlan, match="wait waits for gather, not yet issued"):
        simulate(problem, Plan("", "by hand", (), ("wait", "gather")))


# --- slowdown, by hand --------------------------------------------------------------------------

BESIDE = """
    c    F tp | x > raw   | 0 + {comm}
    f    F    | x > y     | {compute}
    wait F    | raw > whole
"""


@pytest.mark.parametrize(
    ("compute", "comm", "slowdown", "f_ends", "c_ends"),
    [
        # Neither slows the other.
        (100, 60, Slowdown(), 100, 60),
        # f runs at 2/3 beside c: 40 of its 100 in c's 60, the other 60 alone.
        (100, 60, Slowdown(compute_permille=1500), 120, 60),
        # c runs at half: 120 long, all of it beside f, which does not mind but is through at 100,
        # when 10 of c are left.
        (100, 60, Slowdown(comm_permille=2000), 100, 110),
        # Both: c takes 120; f has done 80 by then.
        (100, 60, Slowdown(1500, 2000), 140, 120),
        # f ends first: at 90 with 75 of c done; the other 25 at full speed.
        (60, 100, Slowdown(1500, 1200), 90, 115),
        # Both end at once.
        (80, 60, Slowdown(1500, 2000), 120, 120),
    ],
)
def test_compute_and_communication_slow_each_other(compute, comm, slowdown, f_ends, c_ends):
    problem = tiny(BESIDE.format(compute=compute, comm=comm), "y", slowdown=slowdown)
    timeline = simulate(problem, plan_of(problem))
    assert drawn(timeline) == {"compute": f"f 0-{f_ends}", "tp": f"c 0-{c_ends}"}
    assert timeline.exposed_ns == max(0, c_ends - f_ends)
    assert timeline.comm_ns == c_ends


def test_two_lanes_slow_compute_no_more_than_one():
    problem = tiny(TWO.format(a="tp", b="dp"), "y z", slowdown=Slowdown(2000, 1000))
    costs = [("a", Cost(0, 10)), ("b", Cost(0, 20)), ("f", Cost(8)), ("g", Cost(3))]
    problem = replace(problem, profile=recosted(problem, costs))
    timeline = simulate(problem, plan_of(problem))
    # f begins when a ends and does 5 of its 8 until b ends, then 3 alone.
    assert drawn(timeline) == {"compute": "f 10-23, g 23-26", "tp": "a 0-10", "dp": "b 0-20"}


# --- several ranks, by hand ---------------------------------------------------------------------


def test_a_collective_begins_when_the_last_rank_has_launched_it():
    problem = tiny(
        """
        f    F    | x > h       | 10
        c    F tp | h > raw     | 1 + 20
        g    F    | h > y       | 5
        wait F    | raw > whole
        last F    | whole > z   | 2
        """,
        "y z",
    )
    slower = recosted(problem, [("f", Cost(4)), ("c", Cost(2, 30)), ("last", Cost(9))])
    timeline = simulate(problem, plan_of(problem), [problem.profile, slower])
    assert drawn(timeline) == {
        "compute": "f 0-10, c 10-11, g 11-16, last 41-43",
        "compute 1": "f 0-4, c 4-6, g 6-11, last 41-50",
        "tp": "c 11-41",  # as long as on the slowest rank
    }
    assert timeline.step_ns == 50  # of the last rank
    assert timeline.phase_ns == (43, 0)  # of rank 0
    assert timeline.exposures == (Exposure("c", "tp", 30, 25, ("g",)),)
    # The other way round rank 0 also stands still while the collective has not begun.
    timeline = simulate(problem, plan_of(problem), [slower, problem.profile])
    assert timeline.exposures == (Exposure("c", "tp", 30, 30, ()),)


def test_equal_ranks_are_one_rank():
    problem = random_problem(Random(3))
    plan = random_plan(problem, Random(3))
    one = simulate(problem, plan)
    three = simulate(problem, plan, [problem.profile] * 3)
    assert replace(three, spans=tuple(s for s in three.spans if s.rank == 0)) == one


# --- memory, by hand ----------------------------------------------------------------------------

SIZES = {"raw": 1, "whole": 2, "y": 4, "dx": 16, "dw": 32}


def test_memory_of_saving_and_of_recomputing():
    problem = tiny(BLOCK, "dx dw", sizes=SIZES)
    saving = plan_of(problem, saved="whole")
    #                                      gather wait gelu  grad    weight
    assert memory_curve(problem, saving) == [1, 1 + 2, 2 + 4, 2 + 16, 2 + 16 + 32]
    again = plan_of(problem, "gather wait gelu R:gather R:wait grad weight")
    assert memory_curve(problem, again) == [1, 3, 6, 1, 3, 18, 50]
    timeline = simulate(problem, again)
    assert (timeline.memory, timeline.peak_bytes) == ((1, 3, 6, 1, 3, 18, 50), 50)


def test_outputs_stay_to_the_end():
    problem = tiny(BLOCK, "y dx dw", sizes=SIZES)
    curve = memory_curve(problem, plan_of(problem, saved="whole"))
    assert curve == [1, 3, 6, 4 + 2 + 16, 4 + 2 + 16 + 32]


def test_a_view_holds_its_storage_and_costs_nothing_itself():
    problem = tiny(
        """
        f  F | x   > h    | 1
        v  F | h   > v~h  | 0
        g  F | v   > y    | 1
        d  I | t v > dh   | 1
        e  I | dh  > dx   | 1
        """,
        "dx",
        sizes={"h": 1, "y": 2, "dh": 4, "dx": 8},
    )
    assert memory_curve(problem, plan_of(problem, saved="v")) == [1, 1, 1 + 2, 1 + 4, 4 + 8]
    dropped = plan_of(problem, "f v g R:f R:v d e")
    assert memory_curve(problem, dropped) == [1, 1, 3, 1, 1, 1 + 4, 4 + 8]


def test_views_of_inputs_cost_nothing():
    problem = tiny("v F | x > v~x | 0\n f F | v > y | 1", "y", sizes={"x": 100, "y": 1})
    assert memory_curve(problem, plan_of(problem)) == [0, 1]


def test_resident_bytes_workspace_and_other_microbatches_in_flight():
    problem = tiny(
        BLOCK, "dx dw", sizes=SIZES, workspace={"grad": 100}, resident_bytes=1000, in_flight=3
    )
    curve = memory_curve(problem, plan_of(problem, saved="whole"))
    assert curve == [1004 + n for n in (1, 3, 6, 18 + 100, 50)]


def test_saved_bytes_counts_each_storage_once_and_inputs_never():
    problem = tiny("v F | x > v~x\n f F | v > a\n g F | a > b~a", "b", sizes={"a": 5, "x": 7})
    assert saved_bytes(problem, ("v", "a", "b")) == 5


# --- the oracle of time -------------------------------------------------------------------------


@dataclass
class Ticks:
    """What a run did, in the terms of Timeline."""

    spans: Counter[tuple[str, str, int, int, int]]  # lane, issue, start, end, rank
    exposures: dict[str, tuple[int, int, list[str]]]  # comm, exposed, hidden by
    phase_ns: tuple[int, ...]
    step_ns: int


def tick_by_tick(problem: Problem, plan: Plan, profiles: Sequence[Profile]) -> Ticks:
    """Ranks and lanes as generators. Each yields None to run for a nanosecond, or the name of
    the collective it stands still for; those are asked again until nothing moves."""
    trace = problem.trace
    now = 0
    launched: Counter[str] = Counter()
    ended: set[str] = set()
    spans: Counter[tuple[str, str, int, int, int]] = Counter()
    running: dict[int, str] = {}  # nanosecond -> what rank 0 computes in it
    stood: Counter[str] = Counter()  # collective -> how long rank 0 stood still for it
    phase_end = [0] * len(problem.phases)

    def rank(index: int) -> Iterator[str | None]:
        for text in plan.order:
            name, again = parse_issue(text)
            op = trace.op[name]
            if op.role == "wait":
                while (start := issue(trace.start_of[name], again)) not in ended:
                    yield start
            begin = now
            for _ in range(profiles[index].costs[name].compute_ns):
                if index == 0:
                    running[now] = text
                yield None
            if now > begin:
                spans["compute", text, begin, now, index] += 1
            if op.role == "start":
                launched[text] += 1
            if index == 0:
                for phase in range(problem.phase_of(op, again), len(phase_end)):
                    phase_end[phase] = now

    def lane(lane: str) -> Iterator[str | None]:
        for text in plan.order:
            name, _ = parse_issue(text)
            if trace.op[name].lane == lane:
                while launched[text] < len(profiles):
                    yield text
                begin = now
                for _ in range(max(profile.costs[name].comm_ns for profile in profiles)):
                    yield None
                spans[lane, text, begin, now, 0] += 1
                ended.add(text)

    first, *others = [rank(index) for index in range(len(profiles))]
    workers = [first, *others, *(lane(name) for name in trace.lanes)]
    while workers:
        runs = []
        before = None
        while before != (before := (launched.total(), len(ended))):
            for worker in [w for w in workers if w not in runs]:
                said = next(worker, "through")
                if said is None:
                    runs.append(worker)
                elif said == "through":
                    workers.remove(worker)
                if worker is first:
                    waits_for = said
        assert runs or not workers, "all stand still"
        if runs:
            if first in workers and first not in runs:
                stood[waits_for] += 1
            now += 1
    exposures = {}
    for name, text, begin, end, _ in spans:
        if name != "compute":
            hidden = list(dict.fromkeys(running[t] for t in range(begin, end) if t in running))
            exposures[text] = (end - begin, stood[text], hidden)
    phase_ns = tuple(
        end - begin for begin, end in zip([0, *phase_end[:-1]], phase_end, strict=True)
    )
    return Ticks(spans, exposures, phase_ns, now)


def few_ns(problem: Problem, rng: Random) -> Profile:
    """Costs of 0 to 6 ns, often 0, without slowdown."""

    def some() -> int:
        return max(0, rng.randint(-2, 6))

    return Profile(
        {
            op.name: Cost(some(), some() if op.role == "start" else 0)
            for op in problem.trace.ops
        }
    )  # fmt: skip


@st.composite
def runs(draw: st.DrawFn, ranks: st.SearchStrategy[int]) -> tuple[Problem, Plan, list[Profile]]:
    problem = draw(problems(lags=True))
    plan = draw(legal_plans(problem))
    rng = draw(st.randoms(use_true_random=False))
    profiles = [few_ns(problem, rng) for _ in range(draw(ranks))]
    return replace(problem, profile=profiles[0]), plan, profiles


def assert_same_time(problem: Problem, plan: Plan, profiles: list[Profile]) -> None:
    expected = tick_by_tick(problem, plan, profiles)
    found = simulate(problem, plan, profiles)
    assert Counter((s.lane, s.issue, s.start_ns, s.end_ns, s.rank) for s in found.spans) == (
        expected.spans
    )
    assert {
        e.issue: (e.comm_ns, e.exposed_ns, list(e.hidden_by) if e.comm_ns else [])
        for e in found.exposures
    } == expected.exposures
    assert len(found.exposures) == len(expected.exposures)
    assert found.phase_ns == expected.phase_ns
    assert found.step_ns == expected.step_ns


@settings(max_examples=300)
@given(runs(st.just(1)))
def test_one_rank_takes_the_time_the_ticks_take(run):
    assert_same_time(*run)
    problem, plan, _ = run
    timeline = simulate(problem, plan)
    assert timeline == simulate(problem, plan, [problem.profile])
    assert step_ns(problem, plan) == timeline.step_ns
    assert peak_bytes(problem, plan) == timeline.peak_bytes


@settings(max_examples=150)
@given(runs(st.integers(2, 3)))
def test_several_ranks_take_the_time_the_ticks_take(run):
    assert_same_time(*run)


# --- the oracle of memory -----------------------------------------------------------------------


def bytes_alive(problem: Problem, plan: Plan) -> list[int]:
    """For every issue, the storages that are alive while it runs, from the definition: where the
    backward lags behind, of the last of as many runs in a row as it takes to see it at work."""
    trace = problem.trace
    kept = {trace.value[name].storage for name in trace.inputs}
    length = len(plan.order)

    @dataclass
    class Instance:
        bytes: int
        made_at: int
        alive_at: int  # the last that reads it

    of: dict[tuple[int, str, str], Instance] = {}  # (run, issue, value) -> its storage
    instances: list[Instance] = []
    for run in range(problem.trace.lag + 1):
        for i, text in enumerate(plan.order, start=run * length):
            name, again = parse_issue(text)
            op = trace.op[name]
            at_hand: dict[str, Instance] = {}  # results on the storage of an argument are views
            for given_ in op.inputs:
                value = trace.value[given_]
                if value.storage not in kept:
                    passed = trace.op[value.producer].is_forward and (again or not op.is_forward)
                    source = issue(value.producer, passed and given_ not in plan.saved)
                    late = problem.trace.lag if passed and given_ in plan.saved else 0
                    if (run - late, source, given_) in of:
                        it = at_hand[value.storage] = of[run - late, source, given_]
                        it.alive_at = max(it.alive_at, i)
            for made in op.outputs:
                value = trace.value[made]
                if value.storage not in kept:
                    if value.storage not in at_hand:
                        at_hand[value.storage] = Instance(value.bytes, i, i)
                        instances.append(at_hand[value.storage])
                    it = of[run, text, made] = at_hand[value.storage]
                    if made in trace.outputs and not again:
                        it.alive_at = max(it.alive_at, (run + 1) * length - 1)
                    if made in plan.saved and not again and problem.trace.lag:
                        it.alive_at = max(it.alive_at, (run + problem.trace.lag) * length)
        for name in plan.recomputed:
            if trace.op[name].random or trace.op[name].seeded:
                last = run * length + plan.order.index(issue(name, True))
                drawn_at = run * length + plan.order.index(name)
                until = last + length * problem.trace.lag
                instances.append(Instance(RNG_STATE_BYTES, drawn_at, until))
                instances.append(Instance(RNG_STATE_BYTES, last, last))
    saved = {trace.value[name].storage: trace.value[name].bytes for name in plan.saved}
    again = [trace.op[name] for name in plan.recomputed]
    saved["states"] = RNG_STATE_BYTES * sum(op.random or op.seeded for op in again)
    copies = problem.in_flight - 1
    each = sum(b for s, b in saved.items() if s not in kept)
    always = problem.resident_bytes + ceil(copies * each)
    return [
        always
        + problem.profile.costs[parse_issue(text)[0]].workspace_bytes
        + sum(it.bytes for it in instances if it.made_at <= i <= it.alive_at)
        for i, text in enumerate(plan.order, start=problem.trace.lag * length)
    ]


@settings(max_examples=250)
@given(st.data())
def test_memory_is_what_is_alive(data):
    problem = data.draw(problems(lags=True))
    plan = data.draw(legal_plans(problem))
    curve = memory_curve(problem, plan)
    assert curve == bytes_alive(problem, plan)
    timeline = simulate(problem, plan)
    assert timeline.memory == tuple(curve)
    assert timeline.peak_bytes == max(curve)


# --- properties ---------------------------------------------------------------------------------


@settings(max_examples=150)
@given(st.data())
def test_step_is_at_least_the_bound_and_exposed_at_most_what_communication_takes(data):
    problem = data.draw(problems(lags=True))
    timeline = simulate(problem, data.draw(legal_plans(problem)))
    limited = replace(problem, budget_bytes=timeline.peak_bytes)
    assert timeline.step_ns >= bound_ns(limited)
    assert 0 <= timeline.exposed_ns <= timeline.comm_ns
    assert sum(timeline.phase_ns) == timeline.step_ns
    assert min(timeline.phase_ns) >= 0


@settings(max_examples=100)
@given(runs(st.integers(2, 3)))
def test_no_rank_beats_its_own_bound(run):
    problem, plan, profiles = run
    timeline = simulate(problem, plan, profiles)
    limited = replace(problem, budget_bytes=timeline.peak_bytes)
    for profile in profiles:
        assert timeline.step_ns >= bound_ns(replace(limited, profile=profile))


@settings(max_examples=150)
@given(st.data())
def test_a_step_is_compute_and_standing_still(data):
    """On one rank, whatever the slowdown; without one, compute takes what it costs."""
    problem = data.draw(problems(lags=True))
    plan = data.draw(legal_plans(problem))
    timeline = simulate(problem, plan)
    busy = sum(s.end_ns - s.start_ns for s in timeline.spans if s.lane == "compute")
    assert timeline.step_ns == busy + timeline.exposed_ns
    costs = [problem.cost(parse_issue(text)[0]) for text in plan.order]
    assert busy >= sum(cost.compute_ns for cost in costs)
    assert timeline.comm_ns >= sum(cost.comm_ns for cost in costs)
    if problem.profile.slowdown == Slowdown():
        assert busy == sum(cost.compute_ns for cost in costs)
        assert timeline.comm_ns == sum(cost.comm_ns for cost in costs)


@settings(max_examples=150)
@given(st.data(), st.integers(0, 1000), st.integers(0, 1000))
def test_more_slowdown_is_never_faster_on_one_rank(data, compute_more, comm_more):
    """But for rounding: time is whole nanoseconds, and each change of speed may cost one. (Of
    several ranks, one that comes late may spare another from computing beside a collective.)"""
    problem = data.draw(problems(lags=True))
    plan = data.draw(legal_plans(problem))
    costs = {
        name: Cost(cost.compute_ns * 10**6, cost.comm_ns * 10**6)
        for name, cost in problem.profile.costs.items()
    }
    low = problem.profile.slowdown
    high = Slowdown(low.compute_permille + compute_more, low.comm_permille + comm_more)
    fast, slow = (
        simulate(replace(problem, profile=Profile(costs, slowdown)), plan).step_ns
        for slowdown in (low, high)
    )
    assert slow >= fast - 4 * len(plan.order)


def test_what_is_sent_to_another_process_is_what_was_said_not_what_was_computed():
    """Another thread may be computing it while this one is being pickled."""
    problem = random_problem(Random(1))
    before = pickle.dumps(problem)
    simulate(problem, solve(replace(problem, budget_bytes=None), "none"))
    assert "op" in vars(problem.trace)  # is computed from its fields
    assert pickle.dumps(problem) == before
    assert pickle.loads(before) == problem
