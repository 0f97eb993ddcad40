"""Windows filled one after the other in an order that fits memory, so that it still fits.

`list_schedule` is quick and guesses at memory: where the budget is tight it overshoots. Here an
order that fits, most often recompute on demand, is changed a little at a time, and a change that
would take more than the budget is not made. What a window takes:

    pushed   work that comes before the collective but that nothing needs before its end
    pulled   work that comes after, with whatever else it needs
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random

from overlapc.ir import Plan
from overlapc.solvers.work import Place, Work

_LOOK = 120  # issues before and after a collective that are looked through
_UNSURE = 0.25  # how often a seeded taste changes its mind
_TRIES = 12  # candidates tried for one place in a window


@dataclass(frozen=True)
class Taste:
    """Which work a window takes first: `recompute` or weight gradients; and whether it takes
    what comes before the collective or what comes after (`pull`). Of "R", "W" and, in merged
    pieces, "F" only `moves` leave their places. A `seed` other than 0 follows this only roughly."""

    recompute: bool
    pull: bool
    moves: str = "RW"
    seed: int = 0


Passes = tuple[Taste, ...]  # each goes through all windows, one after the other
PASSES: tuple[Passes, ...] = (
    (Taste(False, False),),
    (Taste(True, True),),
    (Taste(False, True),),
    (Taste(True, True, "R"), Taste(False, False, "W")),
    (Taste(False, False, "W"), Taste(True, True, "R")),
    (Taste(True, False),),
)


def filled(
    plan: Plan, work: Work, budget: int, passes: Passes, until: float = float("inf")
) -> Plan:
    """The plan with its windows filled as far as the budget and the clock allow."""
    for taste in passes:
        plan = _Filling(plan, work, budget, taste).run(until)
    return plan


class _Filling:
    def __init__(self, plan: Plan, work: Work, budget: int, taste: Taste) -> None:
        self.plan, self.work, self.budget, self.taste = plan, work, budget, taste
        self.random = Random(taste.seed)
        mine = set(work.text(work.nodes))
        self.head = tuple(text for text in plan.order if text not in mine)
        number = dict(zip(work.text(work.nodes), work.nodes, strict=True))
        self.order = [number[text] for text in plan.order if text in mine]
        self.before: dict[int, list[int]] = {n: [] for n in work.nodes}
        for n in work.nodes:
            for user in work.after[n]:
                self.before[user].append(n)
        self.took = {n: work.compute[n % work.count] for n in work.nodes}
        self.users: dict[Place, list[int]] = {}
        for n in work.nodes:
            for place in work.reads[n]:
                self.users.setdefault(place, []).append(n)
        self.at = {n: i for i, n in enumerate(self.order)}
        self.held = [work.held_bytes]  # before the i-th of the order, beside what it makes
        self.walk(0, self.order, self.held)

    def run(self, until: float) -> Plan:
        starts = [n for n in self.order if self.work.ops[n % self.work.count].role == "start"]
        for start in starts:
            if time.monotonic() > until:
                break
            self.fill(start)
        return replace(self.plan, order=self.head + self.work.text(self.order))

    def fill(self, start: int) -> None:
        """Move work into one window until it is full or nothing fits."""
        wait = next(n for n in self.work.after[start] if self.is_wait(n))
        refused: set[int] = set()
        while True:
            begin, end = self.at[start], self.at[wait]
            left = self.work.comm[start % self.work.count]
            left -= sum(self.took[n] for n in self.order[begin:end])
            if left <= 0:
                return
            moves = [m for m in self.moves(begin, end) if m[0] not in refused]
            moves.sort(key=lambda m: self.rank(m, left, begin))
            for n, group in moves[:_TRIES]:
                if self.move(group, end):
                    break
                refused.add(n)
            else:
                return

    def moves(self, begin: int, end: int) -> Iterator[tuple[int, list[int]]]:
        """(node, all that has to move with it), for each that may run in the window."""
        at = self.at
        pushed: set[int] = set()
        for i in range(begin - 1, max(-1, begin - _LOOK), -1):
            n = self.order[i]
            if self.work.ops[n % self.work.count].role in ("start", "wait"):
                continue
            users = [u for u in self.work.after[n] if at[u] <= end]
            if all(u in pushed for u in users):
                pushed.add(n)
                group = self.users_before(n, end) if self.took[n] else []
                if group and all(map(self.may_move, group)):
                    yield n, group
        for i in range(end + 1, min(len(self.order), end + _LOOK)):
            n = self.order[i]
            group = self.needs_after(n, end) if self.took[n] else []
            if group and all(map(self.may_move, group)):
                yield n, group

    def may_move(self, n: int) -> bool:
        return self.letter(n) in "I" + self.taste.moves

    def users_before(self, n: int, end: int) -> list[int]:
        found, front = {n}, [n]
        while front:
            for user in self.work.after[front.pop()]:
                if self.at[user] < end and user not in found:
                    found.add(user)
                    front.append(user)
        return sorted(found, key=self.at.__getitem__)

    def needs_after(self, n: int, end: int) -> list[int]:
        """The node and what it needs of what comes after the window; none if that has to wait."""
        found, front = {n}, [n]
        while front:
            for other in self.before[front.pop()]:
                if self.at[other] >= end and other not in found:
                    if self.is_wait(other) or self.letter(other) == "I":
                        return []
                    found.add(other)
                    front.append(other)
        return sorted(found, key=self.at.__getitem__)

    def rank(
        self, move: tuple[int, list[int]], left: int, begin: int
    ) -> tuple[bool, bool, bool, float]:
        n, group = move
        took = sum(self.took[m] for m in group)
        recompute, pull = self.taste.recompute, self.taste.pull
        far = 1.0
        if self.taste.seed:
            recompute ^= self.random.random() < _UNSURE
            pull ^= self.random.random() < _UNSURE
            far = self.random.uniform(0.3, 3.0)
        wanted = (self.letter(n) == "R") == recompute
        pulled = self.at[n] > begin
        return took > 2 * left, not wanted, pulled != pull, abs(self.at[n] - begin) * far

    def move(self, group: Sequence[int], end: int) -> bool:
        """Put the group right before place `end` of the order, if memory allows."""
        going = set(group)
        low = min(end, self.at[group[0]])
        high = max(end, self.at[group[-1]] + 1)
        early = [n for n in self.order[low:end] if n not in going]
        late = [n for n in self.order[end:high] if n not in going]
        part = [*early, *group, *late]
        held = self.held[: low + 1]
        if self.walk(low, part, held) > self.budget:
            return False
        self.order[low:high] = part
        self.held[low : high + 1] = held[low:]
        for i in range(low, high):
            self.at[self.order[i]] = i
        return True

    def walk(self, low: int, part: Sequence[int], held: list[int]) -> int:
        """Append to `held` what is there after each node of a part of the order that begins at
        place `low`; returns the peak on the way."""
        work = self.work
        readers: dict[Place, int] = {}  # still to come
        peak, now = 0, held[low]
        for n in part:
            peak = max(peak, now + work.allocates(n))
            now += sum(work.size[storage] for storage, _ in work.makes[n])
            for place in work.makes[n]:
                if not self.users.get(place) and not work.lasts(place):
                    now -= work.size[place[0]]
            for place in work.reads[n]:
                if place not in readers:
                    readers[place] = sum(self.at[user] >= low for user in self.users[place])
                readers[place] -= 1
                if not readers[place] and not work.lasts(place):
                    now -= work.size[place[0]]
            held.append(now)
        return peak

    def is_wait(self, n: int) -> bool:
        return self.work.ops[n % self.work.count].role == "wait"

    def letter(self, n: int) -> str:
        return "R" if n >= self.work.count else self.work.ops[n].piece.letter
