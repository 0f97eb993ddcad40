"""The machine, and the two that make tasks for it, against a plain one that shares nothing with it.

`by_event` goes from event to event and asks every lane at each what it can do.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from math import ceil, floor
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlapc.core.errors import InvalidSchedule
from overlapc.core.ir import Plan, Problem, Profile, Slowdown, issue, parse_issue
from overlapc.core.machine import Lane, Tasks, run, timed
from overlapc.core.pipeline import StageCost, simulate_pipeline
from overlapc.core.schedule import Action, Schedule, check_schedule, parse_schedule, steps_of
from overlapc.core.simulate import simulate, step_ns
from overlapc.solvers.pipeline.schedules import SCHEDULES, make_schedule
from tests.plain.strategies import random_plan, random_problem
from tests.plain.test_simulate import few_ns

Name = Hashable


@dataclass
class Ran:
    begin: dict[Name, int]
    end: dict[Name, int]  # in the order of ending


def by_event(
    lanes: Mapping[Name, Sequence[Name]],
    work: Mapping[Name, int],
    after: Mapping[Name, Sequence[Name]],
    computes: Sequence[Name] = (),
    slowdown: Slowdown = Slowdown(),  # noqa: B008 (frozen)
) -> Ran:
    """Lanes by name, in the order in which they go on; those of `computes` compute."""
    ran = Ran({}, {})
    left: dict[Name, int] = {}
    todo = {lane: list(tasks) for lane, tasks in lanes.items()}
    now = 0
    while True:
        moved = True
        while moved:
            moved = False
            for tasks in todo.values():
                while tasks:
                    head = tasks[0]
                    if head not in left:
                        if not all(other in ran.end for other in after.get(head, ())):
                            break
                        ran.begin[head], left[head] = now, work[head]
                    if left[head]:
                        break
                    ran.end[head] = now
                    tasks.pop(0)
                    moved = True
        running = {lane: tasks[0] for lane, tasks in todo.items() if tasks and left.get(tasks[0])}
        if not running:
            return ran
        sides = {lane in computes for lane in running}
        both = len(sides) == 2
        slow = {
            True: Fraction(slowdown.compute_permille if both else 1000, 1000),
            False: Fraction(slowdown.comm_permille if both else 1000, 1000),
        }
        step = min(ceil(left[task] * slow[lane in computes]) for lane, task in running.items())
        now += step
        for lane, task in running.items():
            left[task] = max(0, left[task] - floor(step / slow[lane in computes]))


# --- the machine --------------------------------------------------------------------------------

PERMILLES = ((1000, 1000), (1500, 1000), (1000, 2000), (1176, 1333), (3000, 1001))
SLOWDOWNS = [Slowdown(*each) for each in PERMILLES]


def random_tasks(rng: Random) -> Tasks:
    """Tasks that can all be done: each is put after some that were there before it."""
    lanes: list[list[int]] = [[] for _ in range(rng.randint(1, 6))]
    some, tasks = rng.choice((3, 9, 40)), rng.choice((0, 1, 5, 20))
    needs: list[list[int]] = []
    for made in range(tasks):
        lane = rng.choice(lanes)
        others = [n for n in range(made) if n not in lane]
        needs.append(rng.sample(others, min(len(others), rng.choice((0, 0, 1, 1, 3)))))
        lane.append(made)
    number = {made: task for task, made in enumerate(n for lane in lanes for n in lane)}
    first = [0]
    for lane in lanes:
        first.append(first[-1] + len(lane))
    return Tasks(
        [max(0, rng.randint(-some // 3, some)) for _ in range(tasks)],
        first,
        {number[made]: [number[n] for n in before] for made, before in enumerate(needs) if before},
        rng.randint(0, len(lanes)),
        rng.choice(SLOWDOWNS),
    )


@settings(max_examples=500)
@given(st.randoms(use_true_random=False))
def test_lanes_go_on_from_event_to_event(rng):
    tasks = random_tasks(rng)
    lanes = [range(a, b) for a, b in pairwise(tasks.first)]
    computes = range(tasks.computes)
    work = dict(enumerate(tasks.work_ns))
    ran = by_event(dict(enumerate(lanes)), work, tasks.after, computes, tasks.slowdown)
    begin_ns, end_ns, ended = timed(tasks)
    assert ended == list(ran.end)
    assert {task: end_ns[task] for task in work} == ran.end
    assert {task: begin_ns[task] for task in work} == ran.begin
    # Less is written down, of the same.
    some_ns, some = run(tasks)
    assert [task for task in ended if some_ns[task] >= 0] == some
    assert [end_ns[task] for task in some] == [some_ns[task] for task in some]
    assert max(some_ns, default=0) == max(end_ns, default=0)


@settings(max_examples=300)
@given(st.randoms(use_true_random=False))
def test_lanes_that_are_given_their_tasks_one_by_one_go_on_alike(rng):
    """Where nothing slows anything, in any order in which what a task waits for comes before."""
    tasks = replace(random_tasks(rng), slowdown=Slowdown())
    end_ns, ended = run(tasks, whole=True)
    lanes = [Lane() for _ in tasks.first[1:]]
    put: dict[int, int] = {}
    while len(put) < len(ended):
        free = [t for t in range(len(end_ns)) if t not in put and put.keys() >= needs(tasks, t)]
        task = rng.choice(free)
        ready_ns = max((put[need] for need in tasks.after.get(task, ())), default=0)
        put[task] = lanes[bisect_right(tasks.first, task) - 1].put(tasks.work_ns[task], ready_ns)
    assert put == dict(enumerate(end_ns))


def needs(tasks: Tasks, task: int) -> set[int]:
    before = set() if task in tasks.first else {task - 1}
    return before.union(tasks.after.get(task, ()))


def test_what_waits_for_what_never_ends_has_no_end():
    #                  lane 0: 0, 1   lane 1: 2, 3    1 waits for 3, 2 for 1
    tasks = Tasks([5, 5, 5, 5], [0, 2, 4], {1: [3], 2: [1]})
    assert run(tasks) == ([5, -1, -1, -1], [0])


# --- plans --------------------------------------------------------------------------------------


def assert_as_by_event(problem: Problem, plan: Plan, profiles: Sequence[Profile]) -> None:
    trace = problem.trace
    ranks = range(len(profiles))
    lanes: dict[Name, list[Name]] = {rank: [(rank, text) for text in plan.order] for rank in ranks}
    lanes |= {lane: [] for lane in trace.lanes}
    work: dict[Name, int] = {}
    after: dict[Name, list[Name]] = {}
    for text in plan.order:
        name, again = parse_issue(text)
        op = trace.op[name]
        for rank in ranks:
            work[rank, text] = profiles[rank].costs[name].compute_ns
            if op.role == "wait":
                after[rank, text] = [issue(trace.start_of[name], again)]
        if op.role == "start":
            lanes[op.lane].append(text)
            work[text] = max(profile.costs[name].comm_ns for profile in profiles)
            after[text] = [(rank, text) for rank in ranks]
    ran = by_event(lanes, work, after, ranks, profiles[0].slowdown)
    assert len(ran.end) == len(work)
    timeline = simulate(problem, plan, profiles)
    assert [
        (s.issue if s.lane != "compute" else (s.rank, s.issue), s.start_ns, s.end_ns)
        for s in timeline.spans
    ] == [
        (task, ran.begin[task], end)
        for task, end in ran.end.items()
        if isinstance(task, str) or work[task]
    ]
    assert timeline.step_ns == max(ran.end.values(), default=0)
    stood = dict.fromkeys((e.issue for e in timeline.exposures), 0)
    ended = 0
    for task in lanes[0]:
        for start in after.get(task, ()):
            stood[start] += ran.begin[task] - ended
        ended = ran.end[task]
    assert stood == {e.issue: e.exposed_ns for e in timeline.exposures}
    ends = [0]
    for phase in range(len(problem.phases)):
        mine = [
            ran.end[0, text]
            for text in plan.order
            for name, again in [parse_issue(text)]
            if problem.phase_of(trace.op[name], again) == phase
        ]
        ends.append(max(mine, default=ends[-1]))
    assert timeline.phase_ns == tuple(b - a for a, b in pairwise(ends))
    if len(profiles) == 1:
        assert step_ns(problem, plan) == timeline.step_ns


@settings(max_examples=150)
@given(st.randoms(use_true_random=False))
def test_plans_run_from_event_to_event(rng):
    """Of several ranks, on several lanes, slowed down, with ops and collectives of no time."""
    problem = random_problem(rng, rng.choice((3, 6, 10)), lags=True)
    plan = random_plan(problem, rng)
    slowdown = rng.choice((*SLOWDOWNS, problem.profile.slowdown))
    profiles = [
        replace(rng.choice((few_ns(problem, rng), problem.profile)), slowdown=slowdown)
        for _ in range(rng.randint(1, 4))
    ]
    assert_as_by_event(replace(problem, profile=profiles[0]), plan, profiles)


# --- rows ---------------------------------------------------------------------------------------


def random_rows(rng: Random) -> Schedule:
    """Any legal rows: stages on any ranks, actions in any order, now and then two merged."""
    stages, microbatches = rng.randint(1, 5), rng.randint(1, 4)
    ranks = rng.randint(1, stages)
    rank_of = [*range(ranks), *(rng.randrange(ranks) for _ in range(stages - ranks))]
    rng.shuffle(rank_of)
    kinds = {
        (stage, m): rng.choice(("FB", "FIW", "FRB", "FRIW"))
        for stage in range(stages)
        for m in range(microbatches)
    }
    todo = [Action(s, kind, m) for (s, m), letters in kinds.items() for kind in letters]
    whole = Schedule("all", (steps_of(todo),))
    done: set[Action] = set()
    rows: list[list[tuple[Action, ...]]] = [[] for _ in range(ranks)]
    while todo:
        ready = [action for action in todo if done.issuperset(whole.needs(action))]
        action = rng.choice(ready)
        rows[rank_of[action.stage]].append((action,))
        done.add(action)
        todo.remove(action)
    schedule = Schedule("random", tuple(map(tuple, rows)))
    for _ in range(3):
        rank = rng.randrange(ranks)
        row, at = schedule.rows[rank], rng.randrange(len(schedule.rows[rank]))
        joined = (*row[:at], sum(row[at : at + 2], ()), *row[at + 2 :])
        merged = Schedule("random", (*schedule.rows[:rank], joined, *schedule.rows[rank + 1 :]))
        try:
            check_schedule(merged)
        except InvalidSchedule:
            continue
        schedule = merged
    return schedule


def random_cost(rng: Random) -> StageCost:
    return StageCost(*(max(0, rng.randint(-2, 9)) for _ in range(11)))


def assert_rows_as_by_event(schedule: Schedule, costs: Sequence[StageCost]) -> None:
    lanes: dict[Name, list[Name]] = {rank: [] for rank in range(len(schedule.rows))}
    work: dict[Name, int] = {}
    after: dict[Name, list[Name]] = {}
    made_by = {a: step for row in schedule.rows for step in row for a in step}
    readers: dict[Action, set[int]] = {action: set() for action in made_by}
    for rank, row in enumerate(schedule.rows):
        for step in row:
            after[step] = []
            for need in (need for action in step for need in schedule.needs(action)):
                if schedule.rank_of[need.stage] == rank:
                    after[step].append(made_by[need])
                else:
                    after[step].append((need, rank))
                    readers[need].add(rank)
            lanes[rank].append(step)
            work[step] = sum(
                costs[a.stage].takes(a.kind, Action(a.stage, "R", a.microbatch) in made_by)
                for a in step
            )
    for action, step in made_by.items():
        for other in sorted(readers[action]):
            rank = schedule.rank_of[action.stage]
            lanes.setdefault((rank, other), []).append((action, other))
            work[action, other] = costs[action.stage].sent_ns
            after[action, other] = [step]
    ran = by_event(lanes, work, after)
    assert len(ran.end) == len(work)
    timeline = simulate_pipeline(schedule, costs)
    for rank, row in enumerate(timeline.ran):
        assert [(r.step, r.start_ns, r.end_ns, r.rank) for r in row] == [
            (step, ran.begin[step], ran.end[step], rank) for step in lanes[rank]
        ]
    sends = [
        (ran.begin[send], rank, action, other, ran.end[send])
        for action in made_by
        for other in sorted(readers[action])
        for send, rank in [((action, other), schedule.rank_of[action.stage])]
        if work[send]
    ]
    sends.sort(key=lambda send: send[:2])
    assert [(t.start_ns, t.rank, *t.step, t.to, t.end_ns) for t in timeline.transfers] == sends
    assert timeline.step_ns == max(ran.end[step] for row in schedule.rows for step in row)


@settings(max_examples=200)
@given(st.randoms(use_true_random=False))
def test_rows_run_from_event_to_event(rng):
    schedule = random_rows(rng)
    assert_rows_as_by_event(schedule, [random_cost(rng) for _ in range(schedule.stages)])


@pytest.mark.parametrize("name", SCHEDULES)
def test_known_rows_run_from_event_to_event(name):
    rng = Random(name)
    for ranks, microbatches in [(1, 2), (2, 4), (4, 4), (3, 6)]:
        schedule = make_schedule(name, ranks, microbatches)
        assert_rows_as_by_event(schedule, [random_cost(rng) for _ in range(schedule.stages)])


def test_rows_that_are_trusted_wrongly_are_refused():
    stuck = parse_schedule("overlapc schedule 1\nname x\nrank 0: 0B0 0F0\nrank 1: 1F0 1B0\n")
    with pytest.raises(InvalidSchedule, match="never ends"):
        simulate_pipeline(stuck, [StageCost(1, 1, 1)] * 2, trusted=True)
