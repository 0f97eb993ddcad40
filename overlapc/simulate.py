"""What a plan does: the only definition of time and memory in overlapc.

`simulate(problem, plan)` issues the plan's order on one compute lane and one in-order lane per
process group and returns the Timeline. With `ranks`, the profiles of all ranks, every rank runs
the same plan at its own speed and a collective starts when the last of them has launched it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from math import ceil

from overlapc.errors import InvalidPlan
from overlapc.ir import (
    Exposure,
    Plan,
    Problem,
    Profile,
    Slowdown,
    Span,
    Timeline,
    issue,
    issues,
)

# What PyTorch keeps to draw the same numbers again: the state of a CPU generator. (A CUDA
# generator's is 16 bytes.)
RNG_STATE_BYTES = 5056


def simulate(problem: Problem, plan: Plan, ranks: Sequence[Profile] | None = None) -> Timeline:
    """Time, exposure and memory of a legal plan. The Timeline's exposures are rank 0's."""
    profiles = list(ranks) if ranks is not None else [problem.profile]
    spans, blocked, phase_end = _run(problem, plan, profiles)
    memory = memory_curve(problem, plan)
    step_ns = max((span.end_ns for span in spans), default=0)
    borders = [0, *accumulate(phase_end, max)]  # a phase without issues ends with the one before
    return Timeline(
        spans=tuple(spans),
        step_ns=step_ns,
        phase_ns=tuple(b - a for a, b in pairwise(borders)),
        exposures=_exposures(spans, blocked),
        memory=tuple(memory),
        peak_bytes=max(memory, default=0),
        recompute_ns=sum(problem.cost(name).compute_ns for name in plan.recomputed),
    )


def peak_bytes(problem: Problem, plan: Plan) -> int:
    """The peak of `simulate`, without the rest."""
    return max(memory_curve(problem, plan), default=0)


def step_ns(problem: Problem, plan: Plan) -> int:
    """The step of `simulate` on one rank, without the rest: for solvers, which ask it often."""
    trace, costs = problem.trace, problem.costs
    number = trace.numbered.op
    lanes: dict[str, deque[_Collective]] = {lane: deque() for lane in trace.lanes}
    launched: dict[str, _Collective] = {}
    now = 0

    def go_on(work: int) -> int:
        """Run until the first of all lanes ends its work; what is left of the compute's `work`."""
        nonlocal now
        rank = _Rank((), work=work)
        active = [lane[0] for lane in lanes.values() if lane]
        now += _progress([rank] if work else [], active, problem.profile.slowdown)
        land()
        return rank.work

    def land() -> None:
        for lane in lanes.values():
            while lane and lane[0].work == 0:
                lane.popleft().done = True

    for text in plan.order:
        i, repeated = number[text]
        op, work = trace.ops[i], costs[i].compute_ns
        if op.role == "wait":
            awaited = launched[issue(trace.start_of[op.name], repeated)]
            while not awaited.done:
                go_on(0)
        while work and any(lanes.values()):
            work = go_on(work)
        now += work
        if op.role == "start":
            launched[text] = _Collective(text, op.lane, costs[i].comm_ns)
            lanes[op.lane].append(launched[text])
            land()
    while any(lanes.values()):
        go_on(0)
    return now


# --------------------------------------------------------------------------- time


@dataclass(slots=True)
class _Collective:
    issue: str
    lane: str
    work: int
    launched: int = 0
    begun_ns: int = -1
    done: bool = False


@dataclass(slots=True)
class _Rank:
    """Progress of one compute lane: `work` left of the issue at `at`, begun at `since`."""

    costs: Sequence[int]
    at: int = -1
    work: int = 0
    since: int = 0
    blocked_on: _Collective | None = None
    blocked_since: int = 0
    blocked: dict[str, int] = field(default_factory=dict)


def _run(
    problem: Problem, plan: Plan, profiles: Sequence[Profile]
) -> tuple[list[Span], dict[str, int], list[int]]:
    """Issue the order on every rank. Returns spans, rank 0's blocked time by collective, and
    when rank 0 finished each phase."""
    trace = problem.trace
    order = list(issues(plan.order))
    ops = [trace.op[name] for name, _ in order]
    slowdown = profiles[0].slowdown
    collectives: dict[int, _Collective] = {}  # position of start or wait -> collective
    by_issue: dict[str, _Collective] = {}
    for i, ((name, recomputed), op) in enumerate(zip(order, ops, strict=True)):
        if op.role == "start":
            work = max(profile.costs[name].comm_ns for profile in profiles)
            collectives[i] = by_issue[issue(name, recomputed)] = _Collective(
                issue(name, recomputed), op.lane, work
            )
        elif op.role == "wait":
            start = issue(trace.start_of[name], recomputed)
            if start not in by_issue:
                raise InvalidPlan(f"{issue(name, recomputed)} waits for {start}, not yet issued")
            collectives[i] = by_issue[start]
    lanes: dict[str, deque[_Collective]] = {lane: deque() for lane in trace.lanes}
    phases = [problem.phase_of(op, rec) for op, (_, rec) in zip(ops, order, strict=True)]
    phase_end = [0] * len(problem.phases)
    ranks = [_Rank([profile.costs[name].compute_ns for name, _ in order]) for profile in profiles]
    spans: list[Span] = []
    now = 0

    def finish(index: int, rank: _Rank) -> None:
        """The compute part of the issue at rank.at has ended now."""
        if rank.at < 0:
            return
        op = ops[rank.at]
        if rank.costs[rank.at]:
            spans.append(Span("compute", plan.order[rank.at], rank.since, now, index))
        if op.role == "start":
            collective = collectives[rank.at]
            collective.launched += 1
            if collective.launched == 1:
                lanes[op.lane].append(collective)
        if index == 0:
            phase_end[phases[rank.at]] = now

    def advance(index: int, rank: _Rank) -> None:
        """Move on until the rank has work, is blocked, or is through."""
        while rank.work == 0:
            if rank.blocked_on is not None:
                if not rank.blocked_on.done:
                    return
                key = rank.blocked_on.issue
                rank.blocked[key] = rank.blocked.get(key, 0) + now - rank.blocked_since
                rank.blocked_on = None
            else:
                if rank.at >= len(order):
                    return
                finish(index, rank)
                rank.at += 1
                if rank.at >= len(order):
                    return
                if ops[rank.at].role == "wait" and not collectives[rank.at].done:
                    rank.blocked_on = collectives[rank.at]
                    rank.blocked_since = now
                    rank.since = now
                    continue
            rank.work = rank.costs[rank.at]
            rank.since = now

    while True:
        for index, rank in enumerate(ranks):
            advance(index, rank)
        active = []
        ended = False
        for queue in lanes.values():
            # A finished or zero-length collective leaves its lane at once.
            while queue and queue[0].launched == len(ranks):
                head = queue[0]
                if head.begun_ns < 0:
                    head.begun_ns = now
                if head.work > 0:
                    active.append(head)
                    break
                head.done = ended = True
                spans.append(Span(head.lane, head.issue, head.begun_ns, now))
                queue.popleft()
        if ended:  # before time goes on, who waited for it goes on
            continue
        busy = [rank for rank in ranks if rank.work > 0]
        if not busy and not active:
            if all(rank.at >= len(order) for rank in ranks):
                return spans, ranks[0].blocked, phase_end
            raise InvalidPlan("the plan waits for a collective that never starts")
        now += _progress(busy, active, slowdown)


def _progress(busy: list[_Rank], active: list[_Collective], slowdown: Slowdown) -> int:
    """Run all lanes until the first of them ends its work; returns the time that took."""
    compute = slowdown.compute_permille if active else 1000
    comm = slowdown.comm_permille if busy else 1000
    step = min(
        [-(-rank.work * compute // 1000) for rank in busy]
        + [-(-collective.work * comm // 1000) for collective in active]
    )
    for rank in busy:
        rank.work = max(0, rank.work - step * 1000 // compute)
    for collective in active:
        collective.work = max(0, collective.work - step * 1000 // comm)
    return step


def _exposures(spans: Sequence[Span], blocked: dict[str, int]) -> tuple[Exposure, ...]:
    compute = [span for span in spans if span.lane == "compute" and span.rank == 0]
    ends = [span.end_ns for span in compute]
    found = []
    for span in spans:
        if span.lane == "compute":
            continue
        hidden = []
        for other in compute[bisect_left(ends, span.start_ns + 1) :]:
            if other.start_ns >= span.end_ns:
                break
            hidden.append(other.issue)
        found.append(
            Exposure(
                span.issue,
                span.lane,
                span.end_ns - span.start_ns,
                blocked.get(span.issue, 0),
                tuple(hidden),
            )
        )
    return tuple(found)


# --------------------------------------------------------------------------- memory


def memory_curve(problem: Problem, plan: Plan) -> list[int]:
    """Bytes alive while each issue of the plan runs.

    A storage instance lives from the issue that allocates it to the last issue that reads a
    value on it, or to the end if the trace hands it out. A random op that runs again keeps its
    generator's state until then. Work on other microbatches holds `copies` more of what is saved.
    Where the backward lags behind, what it reads of the forward is there from the start, and what
    the forward saves stays to the end.
    """
    trace, names, costs = problem.trace, problem.trace.numbered, problem.costs
    end = len(plan.order)
    saved = {names.value[name] for name in plan.saved if name in names.value}
    lasting = {names.value[name] for name in trace.outputs if name in names.value}
    rerun = {names.op[name][0] for name in plan.recomputed}
    size: list[int] = []  # of storage instances
    born: list[int] = []
    dies: list[int] = []
    # Storage instance of each value as its op made it, as it was made again, as an earlier run
    # left it:
    once = [-1] * len(names.producer)
    again, left = list(once), list(once)
    if problem.lag:
        lasting |= saved
        storages: dict[int, int] = {}
        for v in saved:
            left[v] = storages.setdefault(names.storage[v], len(size))
            if left[v] == len(size):
                size.append(names.bytes[v])
                born.append(0)
                dies.append(0)
    before = left if problem.lag else once
    by_backward = [
        once if not names.forward[p] else again if p in rerun and v not in saved else before
        for v, p in enumerate(names.producer)
    ]
    order = [names.op[text] for text in plan.order]
    for i, (op, repeated) in enumerate(order):
        backward = repeated or not names.forward[op]
        reads: dict[int, int] = {}
        for v in names.reads[op]:
            found = (by_backward[v] if backward else once)[v]
            if found >= 0:
                if dies[found] < i:
                    dies[found] = i
                reads[names.storage[v]] = found
        made = again if repeated else once
        for v in names.makes[op]:
            found = reads.get(names.storage[v], -1)
            if found < 0:
                found = reads[names.storage[v]] = len(size)
                size.append(names.bytes[v])
                born.append(i)
                dies.append(i)
            made[v] = found
            if v in lasting and not repeated:
                dies[found] = end
    random = [name for name in plan.recomputed if trace.op[name].random]
    if random:
        at = {text: i for i, text in enumerate(plan.order)}
        for name in random:
            again_at = at[issue(name, True)]
            kept = [(0, again_at), (at[name], end)] if problem.lag else [(at[name], again_at)]
            for first, last in (*kept, (again_at, again_at)):  # and the one put aside meanwhile
                size.append(RNG_STATE_BYTES)
                born.append(first)
                dies.append(last)
    change = [0] * (end + 2)
    for bytes_, first, last in zip(size, born, dies, strict=True):
        change[first] += bytes_
        change[last + 1] -= bytes_
    copy = saved_bytes(problem, plan.saved) + RNG_STATE_BYTES * len(random)
    held = problem.resident_bytes + ceil(problem.copies * copy)
    curve = []
    for (op, _), more in zip(order, change, strict=False):
        held += more
        curve.append(held + costs[op].workspace_bytes)
    return curve


def saved_bytes(problem: Problem, saved: Sequence[str]) -> int:
    """Bytes of the distinct, not resident storages of the saved values."""
    trace = problem.trace
    storages = {trace.value[name].storage: trace.value[name].bytes for name in saved}
    return sum(b for storage, b in storages.items() if storage not in trace.resident)
