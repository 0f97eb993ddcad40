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

from overlapc.ir import Plan
from overlapc.simulate import memory_curve
from overlapc.solvers.work import Work

_LOOK = 400  # issues before and after a collective that are looked through
_TRIES = 6  # candidates tried for one place in a window


@dataclass(frozen=True)
class Taste:
    """Which work a window takes first: `recompute` or weight gradients; and whether it takes
    what comes before the collective or what comes after (`pull`). Of "R" and "W" only `moves`
    leave their places."""

    recompute: bool
    pull: bool
    moves: str = "RW"


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
        mine = set(work.text(work.nodes))
        self.head = tuple(text for text in plan.order if text not in mine)
        number = dict(zip(work.text(work.nodes), work.nodes, strict=True))
        self.order = [number[text] for text in plan.order if text in mine]
        self.before: dict[int, list[int]] = {n: [] for n in work.nodes}
        for n in work.nodes:
            for user in work.after[n]:
                self.before[user].append(n)
        self.took = {n: work.compute[n % work.count] for n in work.nodes}

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
            at = {n: i for i, n in enumerate(self.order)}
            begin, end = at[start], at[wait]
            left = self.work.comm[start % self.work.count]
            left -= sum(self.took[n] for n in self.order[begin:end])
            if left <= 0:
                return
            moves = [m for m in self.moves(begin, end, at) if m[0] not in refused]
            moves.sort(key=lambda m: self.rank(m, left, at, begin))
            for n, group in moves[:_TRIES]:
                changed = self.moved(group, end, wait)
                if self.fits(changed):
                    self.order = changed
                    break
                refused.add(n)
            else:
                return

    def moves(self, begin: int, end: int, at: dict[int, int]) -> Iterator[tuple[int, list[int]]]:
        """(node, all that has to move with it), for each that may run in the window."""
        pushed: set[int] = set()
        for i in range(begin - 1, max(-1, begin - _LOOK), -1):
            n = self.order[i]
            if self.is_wait(n):
                continue
            users = [u for u in self.work.after[n] if at[u] <= end]
            if all(u in pushed for u in users):
                pushed.add(n)
                if self.took[n] and self.may_move(n):
                    yield n, self.users_before(n, end, at)
        for i in range(end + 1, min(len(self.order), end + _LOOK)):
            n = self.order[i]
            if self.took[n] and self.letter(n) != "I" and self.may_move(n):
                group = self.needs_after(n, end, at)
                if group:
                    yield n, group

    def may_move(self, n: int) -> bool:
        return self.letter(n) in "I" + self.taste.moves

    def users_before(self, n: int, end: int, at: dict[int, int]) -> list[int]:
        found, front = {n}, [n]
        while front:
            for user in self.work.after[front.pop()]:
                if at[user] < end and user not in found:
                    found.add(user)
                    front.append(user)
        return sorted(found, key=at.__getitem__)

    def needs_after(self, n: int, end: int, at: dict[int, int]) -> list[int]:
        """The node and what it needs of what comes after the window; none if that has to wait."""
        found, front = {n}, [n]
        while front:
            for other in self.before[front.pop()]:
                if at[other] >= end and other not in found:
                    if self.is_wait(other) or self.letter(other) == "I":
                        return []
                    found.add(other)
                    front.append(other)
        return sorted(found, key=at.__getitem__)

    def rank(
        self, move: tuple[int, list[int]], left: int, at: dict[int, int], begin: int
    ) -> tuple[bool, bool, bool, int]:
        n, group = move
        took = sum(self.took[m] for m in group)
        wanted = (self.letter(n) == "R") == self.taste.recompute
        pulled = at[n] > begin
        return took > 2 * left, not wanted, pulled != self.taste.pull, abs(at[n] - begin)

    def moved(self, group: Sequence[int], end: int, wait: int) -> list[int]:
        """The order with the group right before the wait."""
        going = set(group)
        early = [n for n in self.order[:end] if n not in going]
        late = [n for n in self.order[end:] if n not in going]
        return [*early, *group, *late]

    def fits(self, order: Sequence[int]) -> bool:
        plan = replace(self.plan, order=self.head + self.work.text(order))
        return max(memory_curve(self.work.problem, plan), default=0) <= self.budget

    def is_wait(self, n: int) -> bool:
        return self.work.ops[n % self.work.count].role == "wait"

    def letter(self, n: int) -> str:
        return "R" if n >= self.work.count else self.work.ops[n].piece.letter
