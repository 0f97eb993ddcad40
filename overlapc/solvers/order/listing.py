"""List scheduling of one phase: `list_schedule(work, limit, style)` -> issue order.

Ops on the way to the result come first. When all of them wait for a collective, its *window* takes
recompute, nearest deadline first, as far as the memory ahead allows, and then weight gradients.
Near the memory limit, weight gradients that free memory run at once.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from dataclasses import dataclass

from overlapc.core.errors import InvalidProblem
from overlapc.core.ledger import Balance
from overlapc.core.machine import Lane
from overlapc.solvers.constants import RUNGS
from overlapc.solvers.order.work import NEVER, Work

_LOOK = 2 * RUNGS  # how many spare ops are compared for a window, or to free memory


@dataclass(frozen=True)
class Style:
    """The choices of a list scheduler. `overshoot`: a filler may be so many times longer than what
    is left of its window. `by_path`: among ready ops take the one with the longest path to the end,
    else the first in the trace. `fills`: the kinds that windows may take, of "R" (recompute) and
    "W" (weight gradients)."""

    overshoot: float
    by_path: bool
    fills: str = "RW"

    def __str__(self) -> str:
        return f"listed {self.overshoot:g} by {'path' if self.by_path else 'trace'}"


def list_schedule(work: Work, limit: int, style: Style) -> tuple[str, ...]:
    """Return an order of all nodes of the work. It aims at `limit` bytes; only `simulate` says how
    many it takes."""
    return work.text(Listing(work, limit, style).run())


class Listing:
    """The state of one scheduling: time, lanes, bytes alive, and what could run now.

    Its times are the machine's where nothing slows anything. Else they are a guess: an op that
    begins beside a collective is slowed from begin to end, and collectives are not slowed. With
    `look`, the memory of the backward's plain order limits how far recompute may run ahead.
    """

    def __init__(self, work: Work, limit: int, style: Style, look: bool = True) -> None:
        self.work = work
        self.limit = limit
        self.style = style
        self.order: list[int] = []
        self.done: set[int] = set()
        self.clock = Lane()  # of compute
        self.missing = dict(work.needs)
        self.asked: set[int] = set()  # lazy recompute whose weight gradient needs nothing else
        self.flow = work.flow
        self.balance = Balance(self.flow, work.held_bytes)
        self.ends: dict[int, int] = {}  # start node -> when its collective ends
        self.lanes: dict[str, Lane] = {}  # of collectives
        self.quiet_ns = 0  # when the last collective issued so far ends
        self.slow_permille = work.problem.profile.slowdown.compute_permille
        # What could run now, by kind:
        self.views: list[int] = []  # spare ops that allocate nothing
        self.ready: list[tuple[int, int]] = []  # (rank, node) on the way to the result
        self.refill: list[tuple[int, int]] = []  # (deadline, node) recompute
        self.spare: list[
            tuple[tuple[int, bool], int]
        ] = []  # (age, node) weight gradients and their recompute
        self.largest = 0  # the most that a spare op allocates
        self.flying: list[tuple[int, int]] = []  # (end, node) waits
        backward = any(n >= work.count or not work.ops[n].is_forward for n in work.nodes)
        self.ahead = _Ahead(work) if look and backward and limit < NEVER else None

    def run(self) -> list[int]:
        for n in self.work.nodes:
            self.consider(n)
        while len(self.order) < len(self.work.nodes):
            if self.flying:
                self.land()
            if self.views:
                self.issue(self.views.pop())
            else:
                self.advance()
        return self.order

    def advance(self) -> None:
        """Issue the next op, or advance the clock."""
        if self.ready:
            _, n = heapq.heappop(self.ready)
            self.relieve(self.flow.allocates[n])
            if self.ahead is not None:
                self.ahead.passed = n
            self.issue(n)
        elif window := [end for end, n in self.flying if self.work.deadline[n] < NEVER]:
            filler = self.filler(min(window) - self.clock.free_ns)
            if filler is None:
                self.clock.put(0, min(window))
            else:
                self.issue(filler)
        elif self.refill:
            _, n = heapq.heappop(self.refill)
            self.relieve(self.flow.allocates[n])
            self.issue(n)
        elif self.spare:
            self.issue(heapq.heappop(self.spare)[1])
        elif self.flying:
            self.clock.put(0, self.flying[0][0])
        else:
            self.finish()

    def finish(self) -> None:
        """Nothing can run: there must be nothing left."""
        work = self.work
        if len(self.order) == len(work.nodes):
            return
        left = [n for n in work.nodes if n not in self.done]
        first = min(left, key=lambda n: (self.missing[n], n))
        name, *others = work.text([first, *(n for n in left if first in work.after[n])])
        raise InvalidProblem(
            f"{name} can never run, and {len(left)} of {len(work.nodes)} ops are left: it waits "
            f"for {', '.join(others) or 'an op that is no part of the work'}; expected ops that do "
            "not wait for each other. This is a defect of overlapc: report it"
        )

    def consider(self, n: int) -> None:
        """Note that one of the node's inputs is done."""
        if self.missing[n] == 0:
            if not self.work.is_lazy(n) or n in self.asked:
                self.arrive(n)
        elif not self.work.is_lazy(n) or n in self.asked:
            self.ask(n)

    def ask(self, n: int) -> None:
        """If the node lacks only lazy recompute, let that recompute run."""
        wanted = [other for other in self.work.asks[n] if other not in self.done]
        if not wanted or len(wanted) < self.missing[n]:
            return
        for other in wanted:
            if other not in self.asked:
                self.asked.add(other)
                self.consider(other)

    def arrive(self, n: int) -> None:
        """All that the node needs has been issued."""
        work = self.work
        queue = work.queues[n]
        if queue == "ready":
            heapq.heappush(self.ready, self.ranked(n))
        elif queue == "views":
            self.views.append(n)
        elif queue == "refill":
            heapq.heappush(self.refill, (work.deadline[n], n))
        elif queue == "spare":
            heapq.heappush(self.spare, ((work.age[n], n < work.count), n))
            self.largest = max(self.largest, self.flow.allocates[n])
        else:
            heapq.heappush(self.flying, (self.ends.get(work.start_of(n), 0), n))

    def ranked(self, n: int) -> tuple[int, int]:
        """The node behind its rank among those that are ready."""
        return -self.work.tail[n] if self.style.by_path else n, n

    def issue(self, n: int) -> None:
        work, missing = self.work, self.missing
        took = work.compute[n % work.count]
        if self.quiet_ns > self.clock.free_ns:
            took = took * self.slow_permille // 1000
        self.clock.put(took)
        self.balance.run(n)
        self.order.append(n)
        self.done.add(n)
        if work.roles[n] == "start":
            lane = self.lanes.setdefault(work.ops[n % work.count].lane, Lane())
            self.ends[n] = lane.put(work.comm_beside[n % work.count], self.clock.free_ns)
            self.quiet_ns = max(self.quiet_ns, self.ends[n])
        for user in work.after[n]:
            missing[user] -= 1
            if user in work.wary:
                self.consider(user)
            elif not missing[user]:
                self.arrive(user)

    def land(self) -> None:
        """Issue waits whose collective has ended: they cost nothing."""
        while self.flying and self.flying[0][0] <= self.clock.free_ns:
            self.issue(heapq.heappop(self.flying)[1])

    def relieve(self, more: int) -> None:
        """Run weight gradients until `more` bytes and the largest allocation of the remaining ones
        fit, or until none is left that helps."""
        while self.spare:
            if self.balance.held + more > self.limit:
                oldest = heapq.nsmallest(_LOOK, self.spare)
                growth, key, n = min((self.balance.adds(n), key, n) for key, n in oldest)
                if growth >= 0:
                    key, n = oldest[0]
                    if n < self.work.count:
                        return
            elif self.balance.held + self.largest > self.limit:
                key, n = max(self.spare, key=lambda item: self.flow.allocates[item[1]])
            else:
                return
            self.take_spare(key, n)
            self.issue(n)

    def take_spare(self, key: tuple[int, bool], n: int) -> None:
        if self.spare[0][1] == n:
            heapq.heappop(self.spare)
        else:
            self.spare.remove((key, n))
            heapq.heapify(self.spare)
        if self.flow.allocates[n] == self.largest:
            self.largest = max((self.flow.allocates[other] for _, other in self.spare), default=0)

    def filler(self, gap_ns: int) -> int | None:
        """Choose what to run while the result waits `gap_ns` for a collective: recompute that is
        due soon, else a weight gradient, else recompute that is due later."""
        soon = bool(self.refill) and (self.ahead is None or self.ahead.soon(self.refill[0][0]))
        longest = gap_ns * self.style.overshoot
        if "R" not in self.style.fills:
            soon = False
        if soon and (found := self.take_refill(longest)) is not None:
            return found
        best: tuple[tuple[int, bool], int] | None = None
        for key, n in heapq.nsmallest(_LOOK if self.style.by_path else 1, self.spare):
            took = self.compute(n)
            if took > longest or self.balance.held + self.flow.allocates[n] > self.limit:
                continue
            if best is None or took > self.compute(best[1]):
                best = (key, n)
        if best is not None:
            self.take_spare(*best)
            return best[1]
        return None if soon or "R" not in self.style.fills else self.take_refill(longest)

    def compute(self, n: int) -> int:
        return self.work.compute[n % self.work.count]

    def take_refill(self, longest_ns: float) -> int | None:
        """Take the recompute that is due first, if it is short enough and there is room to hold
        it."""
        if not self.refill:
            return None
        deadline, n = self.refill[0]
        if self.compute(n) > longest_ns and self.spare:
            return None
        if not self.has_room(n, deadline):
            return None
        heapq.heappop(self.refill)
        return n

    def has_room(self, n: int, deadline: int) -> bool:
        """May the node's result be held until its deadline?"""
        if self.ahead is None:
            return True
        if self.balance.held + self.flow.allocates[n] > self.limit:
            return False
        return self.ahead.most(deadline, self.balance.held) + self.balance.adds(n) <= self.limit


class _Ahead:
    """The memory that the plain order holds from here to a deadline: it limits how far recompute
    may run ahead."""

    def __init__(self, work: Work) -> None:
        self.at, self.need = work.needed
        self.here = dict(zip(self.at, self.need, strict=True))
        self.passed = self.at[0] if self.at else 0  # the op issued last
        self.starts = [n for n in self.at if work.ops[n].role == "start"]

    def soon(self, deadline: int) -> bool:
        """Is the deadline at the window after the next, or before it?"""
        window = bisect_right(self.starts, self.passed) + 1
        return window >= len(self.starts) or deadline <= self.starts[window]

    def most(self, deadline: int, memory: int) -> int:
        """The plain order's most, plus the bytes that are held now beyond what it would hold
        here."""
        first = bisect_right(self.at, self.passed)
        last = bisect_left(self.at, deadline)
        extra = max(0, memory - self.here.get(self.passed, memory))
        return max(self.need[first:last], default=0) + extra
