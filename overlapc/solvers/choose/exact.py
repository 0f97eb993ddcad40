"""The best plan of a small problem, by exhaustive search with pruning.

Every set of saved values is tried, and for each every legal order, from front to back. The
beginning of an order is given up in three cases: no continuation can beat the best plan known; its
memory is over the budget; or, where nothing slows anything else, another beginning with the same
issues was at least as early on every lane.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise

from overlapc.core.ir import Op, Plan, Problem, issue, parse_issue
from overlapc.core.ledger import Balance
from overlapc.core.machine import Lane
from overlapc.core.simulate import flow_of, simulate
from overlapc.solvers.choose.choice import Needs
from overlapc.solvers.constants import EXACT

MOST_VALUES = 10  # values that could be saved: 2**10 sets


class TooLarge(Exception):
    """The problem has more plans than the search may try; `best` is the best of those tried."""

    def __init__(self, best: Plan | None) -> None:
        super().__init__("too many plans to go through")
        self.best = best


def exact(problem: Problem, steps: int = EXACT, best: Plan | None = None) -> Plan | None:
    """The fastest plan within the budget, and among equals the one of smallest peak; None if none
    fits. The backward must be that of the same step's forward.

    Raises TooLarge after `steps` issues. `best` is a legal plan to beat, if one is known.
    """
    search = _Enumeration(problem, steps)
    if best is not None:
        search.offer(best)
    if len(search.candidates) > MOST_VALUES:
        raise TooLarge(best)
    for count in range(len(search.candidates) + 1):
        for saved in combinations(search.candidates, count):
            again = recomputed_by(problem, frozenset(saved))
            if again is not None:
                search.orders(saved, again)
    return search.best


def saveable(problem: Problem) -> tuple[str, ...]:
    """Values of the forward that may be useful to save: finished, and read by the backward or by an
    op that may run again."""
    needs, trace = Needs(problem.trace), problem.trace
    found: dict[str, None] = {}
    for op in trace.ops:
        if not op.is_forward or needs.may_rerun(op):
            for name in op.inputs:
                if needs.forward_made(name):
                    producer = trace.op[trace.value[name].producer]
                    if producer.role != "start":
                        found[name] = None
    return tuple(found)


def recomputed_by(problem: Problem, saved: frozenset[str]) -> frozenset[str] | None:
    """The ops that must run again when exactly these values are saved; None if one may not."""
    needs, trace = Needs(problem.trace), problem.trace
    found: set[str] = set()
    front: list[Op] = []

    def add(op: Op) -> None:
        if op.name not in found:
            found.add(op.name)
            front.append(op)

    for name in needs.read_by_backward:
        if name not in saved:
            add(trace.op[trace.value[name].producer])
    while front:
        op = front.pop()
        if not op.recomputable or saved.issuperset(op.outputs):
            return None
        if op.role == "wait":
            add(trace.op[trace.start_of[op.name]])
        if op.role == "start":
            add(trace.op[trace.wait_of[op.name]])
        for name in op.inputs:
            if needs.forward_made(name) and name not in saved:
                add(trace.op[trace.value[name].producer])
    return frozenset(found)


def must_follow(
    problem: Problem, saved: frozenset[str], again: frozenset[str]
) -> dict[str, set[str]]:
    """Issue -> all issues that come before it in every legal order."""
    trace = problem.trace
    repeated = [issue(op.name, True) for op in trace.ops if op.name in again]
    all_issues = [*(op.name for op in trace.ops), *repeated]
    before: dict[str, set[str]] = {text: set() for text in all_issues}
    for text in all_issues:
        name, recomputed = parse_issue(text)
        op = trace.op[name]
        if recomputed:
            before[text].add(name)
        for given in op.inputs:
            producer = trace.value[given].producer
            if not producer:
                continue
            later = trace.op[producer].is_forward and (recomputed or not op.is_forward)
            before[text].add(issue(producer, later and given not in saved))
        if op.role == "wait":
            before[text].add(issue(trace.start_of[name], recomputed))
    for phase in range(len(problem.phases)):
        random = [op.name for op in trace.ops if op.random and problem.phase_of(op) == phase]
        for one, other in pairwise(random):
            before[other].add(one)
    phase_of = {}
    for text in all_issues:
        name, recomputed = parse_issue(text)
        phase_of[text] = problem.phase_of(trace.op[name], recomputed)
    for text in all_issues:
        before[text] |= {other for other in all_issues if phase_of[other] < phase_of[text]}
    return before


@dataclass
class _Enumeration:
    problem: Problem
    steps: int
    best: Plan | None = None
    key: tuple[int, int] = (1 << 62, 1 << 62)
    candidates: tuple[str, ...] = ()
    seen: dict[frozenset[str], list[tuple[int, ...]]] = field(default_factory=dict)
    balance: Balance = field(init=False)  # memory after the issues so far
    number: dict[str, int] = field(init=False)  # issue -> its number in the balance

    def __post_init__(self) -> None:
        self.candidates = saveable(self.problem)
        slowdown = self.problem.profile.slowdown
        self.steady = slowdown.compute_permille == slowdown.comm_permille == 1000

    def offer(self, plan: Plan) -> None:
        timeline = simulate(self.problem, plan)
        budget = self.problem.budget_bytes
        if budget is not None and timeline.peak_bytes > budget:
            return
        key = (timeline.step_ns, timeline.peak_bytes)
        if key < self.key:
            self.best, self.key = plan, key

    def orders(self, saved: Sequence[str], again: frozenset[str]) -> None:
        """Try every order of the ops with this choice."""
        before = must_follow(self.problem, frozenset(saved), again)
        self.seen = {}
        left = sum(self.problem.cost(parse_issue(text)[0]).compute_ns for text in before)
        state = _State(0, left, {}, {})
        plan = Plan("", "", tuple(saved), tuple(_any_order(before)))
        self.number = {text: n for n, text in enumerate(plan.order)}
        flow, held, _ = flow_of(self.problem, plan)
        self.balance = Balance(flow, held)
        self.extend(saved, before, [], frozenset(), state)

    def extend(
        self,
        saved: Sequence[str],
        before: dict[str, set[str]],
        order: list[str],
        done: frozenset[str],
        state: _State,
    ) -> None:
        if len(order) == len(before):
            digest = self.problem.trace.digest
            self.offer(Plan(digest, "opt", tuple(saved), tuple(order), found_by="all plans"))
            return
        for text in before:
            if text in done or not before[text] <= done:
                continue
            self.steps -= 1
            if self.steps < 0:
                raise TooLarge(self.best)
            reached = state.after(self.problem, text)
            # A plan as fast as the best may still have the smaller peak.
            if reached.at_least() > self.key[0]:
                continue
            now_done = done | {text}
            if self.known(now_done, reached) or not self.fits(text):
                continue
            order.append(text)
            self.balance.run(self.number[text])
            self.extend(saved, before, order, now_done, reached)
            self.balance.undo(self.number[text])
            order.pop()

    def known(self, done: frozenset[str], state: _State) -> bool:
        """Was there a beginning with the same issues that is at least as early on every lane?

        That one may have the higher peak, so this prunes only where nothing limits memory.
        """
        if not self.steady or self.problem.budget_bytes is not None:
            return False
        point = state.point()
        others = self.seen.setdefault(done, [])
        if any(all(a <= b for a, b in zip(other, point, strict=True)) for other in others):
            return True
        others.append(point)
        return False

    def fits(self, text: str) -> bool:
        """May the issue run next within the budget?"""
        budget = self.problem.budget_bytes
        more = self.balance.flow.allocates[self.number[text]]
        return budget is None or self.balance.held + more <= budget


@dataclass(frozen=True)
class _State:
    """The times that a beginning has reached, as if nothing slowed anything else."""

    now: int
    left: int  # compute yet to be issued
    free: dict[str, int]  # lane -> when its last collective ends
    ends: dict[str, int]  # started and not waited for -> when it ends

    def after(self, problem: Problem, text: str) -> _State:
        name, recomputed = parse_issue(text)
        op, cost = problem.trace.op[name], problem.cost(name)
        free, ends, ready = self.free, self.ends, 0
        if op.role == "wait":
            # Keep the start: a collective of several outputs has several waits.
            ready = ends[issue(problem.trace.start_of[name], recomputed)]
        now = Lane(self.now).put(cost.compute_ns, ready)
        if op.role == "start":
            end = Lane(free.get(op.lane, 0)).put(cost.comm_ns, now)
            free, ends = {**free, op.lane: end}, {**ends, text: end}
        return _State(now, self.left - cost.compute_ns, free, ends)

    def at_least(self) -> int:
        return max([self.now + self.left, *self.free.values()])

    def point(self) -> tuple[int, ...]:
        return (
            self.now,
            *(self.free[lane] for lane in sorted(self.free)),
            *(self.ends[text] for text in sorted(self.ends)),
        )


def _any_order(before: dict[str, set[str]]) -> Iterator[str]:
    """A legal order of all issues."""
    reached: set[str] = set()
    while len(reached) < len(before):
        for text, needed in before.items():
            if text not in reached and needed <= reached:
                reached.add(text)
                yield text
