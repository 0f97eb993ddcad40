"""`Room` says whether a merged forward and backward can both still reach their ends within
memory."""

from __future__ import annotations

from bisect import bisect_left

from overlapc.solvers.order.work import Place, Work


class Room:
    """A guide to the memory that both chains still need, each in its plain order.

    It looks further ahead than the balance: to what the plain order would hold it adds what delayed
    weight gradients hold, whoever else reads it. A state is safe if the forward can go on to some
    place, and the backward from there to its end. (The rest of the forward then has the memory that
    the backward has freed.)
    """

    def __init__(self, work: Work) -> None:
        self.chains = forward, _ = work.chains
        self.is_forward = set(forward)
        self.done: set[int] = set()
        self.late: set[int] = set()  # delayed weight gradients
        self.held_by: dict[Place, int] = {}  # place -> how many delayed ones hold it
        self.late_bytes = 0
        self.work, self.alone = work, work.alone
        self.at, self.back_at = 0, 0  # the first of each chain that has not run
        self.back_now = 0  # what the backward holds beyond the start

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
        backward, spare = self.chains[1], self.alone.spare
        while at < len(backward) and (backward[at] in self.done or backward[at] in spare):
            at += 1
        return at

    def held_late(self, back_at: int, n: int) -> int:
        """Bytes that delayed weight gradients hold until they run."""
        coming = self.chains[1][self.back_at : back_at]
        changes = [(other, 1) for other in coming if other not in self.done and other != n]
        if n in self.late:
            changes.append((n, -1))
        if not changes:
            return self.late_bytes
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
        alone = self.alone
        back_now = self.back_now + (0 if n in self.is_forward else growth)
        more = max(self.held_late(back_at, n), back_now - alone.back_held[back_at])
        need = alone.back_most[back_at] + more - back_now
        here = alone.held[at - 1] if at else 0
        if need <= left:
            return True
        most = 0
        begin = at
        first = bisect_left(alone.lows, at)
        for low in alone.lows[first : first + 2]:
            most = max(most, alone.most_to_low[begin])
            begin = low + 1
            if most - here > left:
                return False
            if alone.held[low] - here + need <= left:
                return True
        return False
