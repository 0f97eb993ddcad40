"""Order the forward of one microbatch together with the backward of an earlier one.

    merged_order   an issue order of both for one choice and one memory limit
    merged_plans   the best plans for many choices: orders, then their windows filled

Two chains, the forward and the way to the input gradients, take turns on the compute lane: while
one waits for a collective, the other runs. They advance together, because the forward fills memory
with saved values and the backward frees them. Weight gradients run when both chains wait.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from overlapc.core.ir import Plan, Problem
from overlapc.core.simulate import peak_bytes, step_ns
from overlapc.solvers.bound.bounds import Least
from overlapc.solvers.choose.choice import Choice, plan_of
from overlapc.solvers.constants import FEW, GAP, MERGED, OVERSHOOT, RUNGS
from overlapc.solvers.order.filling import Taste, filled_by
from overlapc.solvers.order.listing import Listing, Style
from overlapc.solvers.order.room import Room
from overlapc.solvers.order.work import NEVER, Work, merged_work


@dataclass(frozen=True)
class Pace:
    """How two chains advance. `lead`: how far the forward runs ahead of the backward, as a share of
    its work. `hurry`: when a lane is about to become idle, the chain that reaches a collective
    first goes on. `ahead`: up to this share of the limit recompute may run before its turn.
    `overshoot`: a weight gradient may be this many times longer than the time left to wait."""

    lead: float = 0.0
    hurry: bool = True
    ahead: float = 0.9
    overshoot: float = OVERSHOOT

    def __str__(self) -> str:
        return f"lead {self.lead:g} ahead {self.ahead:g}{' in a hurry' if self.hurry else ''}"


PACES = tuple(
    Pace(lead, hurry)
    for lead, hurry in product((0.0, 0.06, -0.06, 0.15, -0.15, 0.3), (True, False))
)
_FEW = (Pace(), Pace(hurry=False), Pace(hurry=False, ahead=0.5), Pace(lead=-0.06))
_SHARES = (1.0, 0.97, 0.93)  # shares of the budget to aim at, since an order may exceed its aim
_TASTES = tuple(Taste(r, pull, "FRW") for r, pull in product((False, True), repeat=2))
LEFT = (0.0, 0.03, 0.06, 0.1, 0.14, 0.18, 0.23, 0.28, 0.34, 0.4, 0.48)  # of it, to the other one
_LONG = 1000  # from so many ops on each schedule is slower to make
_TRIED = 2 * FEW  # so many choices are filled from their best order, half of these from more
_STARTS = 4  # so many orders
_CLOSE = 1 + 2 * FEW * GAP  # times the fastest: choices so close to it are filled again and again
_MOVES = RUNGS // 2  # count as one plan more: many where ops are short beside communication
_IDLE = 2 * RUNGS  # it ends after so many seeded fillings in a row without gain


def merged_order(work: Work, limit: int, pace: Pace) -> tuple[str, ...]:
    """Return an order of all nodes of a merged work. It aims at `limit` bytes; only `simulate` says
    how many it takes."""
    return work.text(_Merging(work, limit, pace).run())


@dataclass(frozen=True)
class Merged:
    """A choice and its best plan, with its simulated `step_ns`."""

    step_ns: int
    choice: Choice
    plan: Plan


def merged_plans(problem: Problem, choices: Iterable[Choice]) -> list[Merged]:
    """The best plans that fit for a problem whose backward is of an earlier microbatch, one for
    each choice, the fastest first."""
    search = _MergeSearch(problem)
    found = search.listed_each(list(dict.fromkeys(choices)))
    if search.budget < NEVER:  # the fewer are left, the more is tried with each
        for improved, count in ((search.tried_out, _TRIED), (search.filled, FEW)):
            found = [*map(improved, found[:count]), *found[count:]]
            found.sort(key=_step)
        close = [merged for merged in found[:FEW] if merged.step_ns <= found[0].step_ns * _CLOSE]
        found = [*map(search.polished, close), *found[len(close) :]]
        found.sort(key=_step)
    effort = f"; of {search.offered} plans"
    plans = [replace(merged.plan, found_by=merged.plan.found_by + effort) for merged in found]
    return [replace(merged, plan=plan) for merged, plan in zip(found, plans, strict=True)]


def _step(merged: Merged) -> int:
    return merged.step_ns


def _how(plan: Plan) -> str:
    """How the plan's order was found."""
    return plan.found_by.partition(", ")[2]


class _MergeSearch:
    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.budget = NEVER if problem.budget_bytes is None else problem.budget_bytes
        count = max(1, len(problem.trace.ops))
        self.effort = MERGED * min(count, _LONG) // count**2
        self.offered = 0
        self.least = Least(problem)
        self.best_ns = NEVER
        self.works: dict[Choice, Work] = {}
        self.tried: set[tuple[Choice, Pace]] = set()
        self.orders: dict[Choice, dict[tuple[str, ...], Merged]] = {}  # that fit
        self.lists: dict[Choice, list[Merged]] = {}  # of these, the schedules that are not filled
        self.filled_from: set[tuple[tuple[str, ...], Choice, Taste]] = set()

    def offer(self, choice: Choice, order: tuple[str, ...], how: str) -> Merged | None:
        """Judge one more order of the choice; keep it if it fits and is new."""
        plan = plan_of(self.problem, choice, "merged", order, how)
        self.effort -= 1
        self.offered += 1
        if order not in self.orders[choice] and peak_bytes(self.problem, plan) <= self.budget:
            merged = Merged(step_ns(self.problem, plan), choice, plan)
            self.orders[choice][order] = merged
            self.best_ns = min(self.best_ns, merged.step_ns)
            return merged
        return None

    def best(self, choice: Choice) -> Merged | None:
        return min(self.orders[choice].values(), key=_step, default=None)

    def may_win(self, choice: Choice) -> bool:
        """Could a plan of the choice fit and be faster than the plans of other choices? Without a
        budget the answer is always yes, since the caller may want the plans of all choices."""
        fits = self.least.bytes(choice) <= self.budget
        return self.budget == NEVER or (fits and self.least.ns(choice) < self.best_ns)

    def is_done(self, merged: Merged) -> bool:
        """Is no further order of the choice worth a search?"""
        return merged.step_ns <= self.least.ns(merged.choice) * (1 + GAP)

    def listed_each(self, choices: Sequence[Choice]) -> list[Merged]:
        """The best of a few schedules of each choice that may win, the fastest first."""
        for choice in sorted(choices, key=self.least.ns):
            if self.may_win(choice):
                for pace in _FEW:
                    self.listed(choice, (pace,))
                    if self.orders[choice]:
                        break
        for merged in self.fastest()[:RUNGS]:
            self.listed(merged.choice, _FEW)
        return self.fastest()

    def fastest(self) -> list[Merged]:
        return sorted(filter(None, map(self.best, self.orders)), key=_step)

    def listed(self, choice: Choice, paces: Sequence[Pace]) -> None:
        """Schedules of the choice that aim at the budget and, where one exceeds it, at less
        memory."""
        if choice not in self.works:
            self.works[choice] = merged_work(self.problem, choice)
            self.orders[choice], self.lists[choice] = {}, []
        for pace in paces:
            if (choice, pace) in self.tried:
                continue
            self.tried.add((choice, pace))
            for share in _SHARES if self.budget < NEVER else _SHARES[:1]:
                found = self.best(choice)
                if self.effort <= 0 or (found is not None and self.is_done(found)):
                    return
                limit = NEVER if self.budget == NEVER else int(self.budget * share)
                order = merged_order(self.works[choice], limit, pace)
                if (merged := self.offer(choice, order, str(pace))) is not None:
                    self.lists[choice].append(merged)
                if order in self.orders[choice]:
                    break

    def tried_out(self, merged: Merged) -> Merged:
        """The windows of the choice's best schedule filled."""
        return merged if self.is_done(merged) else self.fill_first(1, merged)

    def filled(self, merged: Merged) -> Merged:
        """More schedules of the choice, and the windows of the best of them filled."""
        if self.is_done(merged):
            return merged
        self.listed(merged.choice, PACES)
        return self.fill_first(_STARTS, merged)

    def fill_first(self, count: int, merged: Merged) -> Merged:
        choice = merged.choice
        for start, taste in product(sorted(self.lists[choice], key=_step)[:count], _TASTES):
            known = start.plan.order, choice, taste
            if self.effort > 0 and known not in self.filled_from:
                self.filled_from.add(known)
                self.fill(start, taste)
        return self.best(choice) or merged

    def polished(self, merged: Merged) -> Merged:
        """Fill windows again and again, a little differently each time."""
        seed = left = _IDLE
        while left and self.effort > 0 and not self.is_done(merged):
            seed, left = seed + 1, left - 1
            self.fill(merged, Taste(seed % FEW != 0, seed % 2 != 0, "FRW", seed))
            better = self.best(merged.choice) or merged
            if better.step_ns < merged.step_ns:
                merged, left = better, _IDLE
        return merged

    def fill(self, merged: Merged, taste: Taste) -> None:
        work = self.works[merged.choice]
        plan, moves = filled_by(merged.plan, work, self.budget, (taste,))
        self.effort -= moves // _MOVES
        self.offer(merged.choice, plan.order, _how(plan))


class _Merging(Listing):
    """Listing with two chains: `ready` and `refill` have the backward's nodes, `front` the
    forward's."""

    def __init__(self, work: Work, limit: int, pace: Pace) -> None:
        super().__init__(work, limit, Style(pace.overshoot, by_path=False), look=False)
        self.pace = pace
        self.front: list[int] = []
        forward, self.plain = work.chains
        self.forward = set(forward)
        self.plain_at = 0  # place of the first of these that has not run
        self.share, self.distance = work.along_chains
        self.room = Room(work) if limit < NEVER else None

    def is_spare(self, n: int) -> bool:
        return self.work.deadline[n] == NEVER

    def arrive(self, n: int) -> None:
        if n in self.forward and self.work.ops[n].role != "wait":
            heapq.heappush(self.front, n)
        else:
            super().arrive(n)

    def issue(self, n: int) -> None:
        before = self.balance.held
        super().issue(n)
        if self.room is not None:
            self.room.passed(n, self.balance.held - before)

    def advance(self) -> None:
        found = self.choose()
        if found is not None:
            self.go(found)
        else:
            self.fill_or_wait()

    def go(self, n: int) -> None:
        """Remove the node from the ready heaps, and issue it."""
        if self.front and self.front[0] == n:
            heapq.heappop(self.front)
        else:
            heaps: tuple[list[Any], ...] = (self.ready, self.refill, self.spare)
            first = next((heap for heap in heaps if heap and heap[0][1] == n), None)
            if first is not None:
                heapq.heappop(first)
            else:
                self.take(n, heaps)
        self.issue(n)

    def take(self, n: int, heaps: Iterable[list[Any]]) -> None:
        """Remove the node from a heap; it is mostly at the top."""
        if n in self.front:
            self.front.remove(n)
            heapq.heapify(self.front)
        for heap in heaps:
            found = next((item for item in heap if item[1] == n), None)
            if found is not None:
                heap.remove(found)
                heapq.heapify(heap)

    def choose(self) -> int | None:
        """Choose the chain that goes on; None if neither can, or memory forbids it."""
        found = self.next_of_backward()
        if self.front:
            first = not found or self.is_fronts_turn(self.front[0], found[0])
            found.insert(0 if first else len(found), self.front[0])
        for n in found:
            if self.is_safe(n):
                return n
        return None

    def next_of_backward(self) -> list[int]:
        """The next nodes of the backward: of input gradients and recompute, the one due first, then
        the other."""
        ready = self.ready[0][1] if self.ready else None
        found = [] if ready is None else [ready]
        if self.refill:
            due, n = self.refill[0]
            early = ready is None and self.backward_waits()
            during = self.balance.held + self.flow.allocates[n]
            if not early or during <= self.limit * self.pace.ahead:
                found.insert(0 if ready is None or due < ready else 1, n)
        return found

    def backward_waits(self) -> bool:
        """Does the way to the input gradients wait for a collective?"""
        return any(n not in self.forward and not self.is_spare(n) for _, n in self.flying)

    def in_plain_order(self) -> int | None:
        """The next node of the backward's plain order, which fits if anything does; None if it
        waits for a collective."""
        while self.plain_at < len(self.plain) and self.plain[self.plain_at] in self.done:
            self.plain_at += 1
        n = self.plain[self.plain_at] if self.plain_at < len(self.plain) else None
        if n is None or self.missing[n] or self.work.ops[n % self.work.count].role == "wait":
            return None
        return n

    def is_fronts_turn(self, front: int, back: int) -> bool:
        near, other = self.distance[front], self.distance[back]
        if self.pace.hurry and near != other:
            lane_ends = min([lane.free_ns for lane in self.lanes.values()], default=0)
            if lane_ends - self.clock.free_ns <= min(near, other):
                return near < other
        return self.share[front] - self.pace.lead <= self.share[back]

    def is_safe(self, n: int) -> bool:
        """Does the node fit, and may both chains go on to their ends after it?"""
        if self.balance.held + self.flow.allocates[n] > self.limit:
            return False
        if self.room is None:
            return True
        return self.room.suffices(n, self.balance.adds(n), self.limit - self.balance.held)

    def fill_or_wait(self) -> None:
        """No chain can go on: run a weight gradient, else advance the clock, else run what memory
        forbids."""
        window = [end for end, n in self.flying if not self.is_spare(n)]
        filler = self.filler(min(window) - self.clock.free_ns) if window else None
        if filler is None and not window:
            filler = self.in_plain_order()
        if filler is not None:
            self.go(filler)
        elif self.flying:
            self.clock.put(0, self.flying[0][0])
        else:
            heaps: tuple[list[Any], ...] = (self.spare, self.ready, self.refill)
            left = [heap[0][1] for heap in heaps if heap] + self.front[:1]
            if left:
                self.go(left[0])
            else:
                self.finish()

    def take_refill(self, longest_ns: float) -> int | None:
        return None  # recompute takes its turn among the chains
