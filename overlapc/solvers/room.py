"""`Room` says whether a merged forward and backward can both still reach their ends within
memory."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

from overlapc.ledger import Balance
from overlapc.solvers.work import NEVER, Place, Work


class Room:
    """A guide to the memory that both chains still need, each in its plain order.

    It looks further ahead than the balance: to what the plain order would hold it adds what delayed
    weight gradients hold, whoever else reads it. A state is safe if the forward can go on to some
    place, and the backward from there to its end. (The rest of the forward then has the memory that
    the backward has freed.)
    """

    def __init__(self, work: Work, forward: Sequence[int], backward: Sequence[int]) -> None:
        self.chains = forward, backward
        self.is_forward = set(forward)
        self.done: set[int] = set()
        self.late: set[int] = set()  # delayed weight gradients
        self.held_by: dict[Place, int] = {}  # place -> how many delayed ones hold it
        self.late_bytes = 0
        self.work = work
        self.spare = {n for n in backward if work.deadline[n] == NEVER}
        self.at, self.back_at = 0, 0  # the first of each chain that has not run
        self.held = Balance(work.flow).along(forward)
        self.during = work.flow.during(forward, [0, *self.held])
        self.back_now = 0  # what the backward holds beyond the start
        self.back_held = [0, *Balance(work.flow).along(backward)]
        during = work.flow.during(backward, self.back_held)
        self.back_most = [*[*accumulate(reversed(during), max)][::-1], -NEVER]
        last = len(forward) - 1
        self.lows = [
            i
            for i in range(len(forward))
            if i == last or (self.held[i] < self.held[i + 1] and self.held[i] <= self.held[i - 1])
        ]
        self.most_to_low = list(self.during)  # the most from each place to the next low
        lows = set(self.lows)
        for i in range(last - 1, -1, -1):
            if i not in lows:
                self.most_to_low[i] = max(self.during[i], self.most_to_low[i + 1])

    def passed(self, n: int, growth: int) -> None:
        self.done.add(n)
        if n not in self.is_forward:
            self.back_now += growth
        if n in self.late:
            self.late.remove(n)
            self.count(n, -1)
        self.at, back_at = self.first(self.at), self.first_back(self.back_at)
        for other in self.chains[1][self.back_at : back_at]:
            if other not in self.done:
                self.late.add(other)
                self.count(other, 1)
        self.back_at = back_at

    def count(self, n: int, change: int) -> None:
        """Count one more (or less) delayed node that holds what the node reads."""
        for place in self.work.reads[n]:
            before = self.held_by.get(place, 0)
            self.held_by[place] = before + change
            if not before or not before + change:
                self.late_bytes += change * self.work.size[place[0]]

    def first(self, at: int) -> int:
        forward = self.chains[0]
        while at < len(forward) and forward[at] in self.done:
            at += 1
        return at

    def first_back(self, at: int) -> int:
        """The first node of the backward that has not run, passing over weight gradients, which may
        be late."""
        backward = self.chains[1]
        while at < len(backward) and (backward[at] in self.done or backward[at] in self.spare):
            at += 1
        return at

    def held_late(self, back_at: int, n: int) -> int:
        """Bytes that delayed weight gradients hold until they run."""
        coming = self.chains[1][self.back_at : back_at]
        changes = [(other, 1) for other in coming if other not in self.done and other != n]
        if n in self.late:
            changes.append((n, -1))
        for other, change in changes:
            self.count(other, change)
        held = self.late_bytes
        for other, change in changes:
            self.count(other, -change)
        return held

    def suffices(self, n: int, growth: int, left: int) -> bool:
        """Is the state safe after the node, if `left` bytes are free before it runs?"""
        self.done.add(n)
        at, back_at = self.first(self.at), self.first_back(self.back_at)
        self.done.discard(n)
        left -= growth
        back_now = self.back_now + (0 if n in self.is_forward else growth)
        more = max(self.held_late(back_at, n), back_now - self.back_held[back_at])
        need = self.back_most[back_at] + more - back_now
        here = self.held[at - 1] if at else 0
        if need <= left:
            return True
        most = 0
        begin = at
        first = bisect_left(self.lows, at)
        for low in self.lows[first : first + 2]:
            most = max(most, self.most_to_low[begin])
            begin = low + 1
            if most - here > left:
                return False
            if self.held[low] - here + need <= left:
                return True
        return False
