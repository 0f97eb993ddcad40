"""`filled` moves work into the windows of an order that fits memory, so that it still fits.

`list_schedule` is quick but guesses at memory: it exceeds a tight budget. Filling starts from an
order that fits, mostly recompute on demand, and changes it a little at a time; a change that would
exceed the budget is not made. A window takes:

    pushed   work before the collective that nothing needs before the collective's end
    pulled   work behind the collective, with whatever else it needs
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random

from overlapc.ir import Plan
from overlapc.ledger import Balance
from overlapc.solvers.constants import OVERSHOOT, REACH, RUNGS
from overlapc.solvers.work import Work


@dataclass(frozen=True)
class Taste:
    """Which work a window takes first: `recompute` or weight gradients; and whether it takes work
    from before the collective or from behind it (`pull`). Only kinds in `moves` leave their places:
    of "R", "W" and, in merged problems, "F". A `seed` other than 0 deviates at random."""

    recompute: bool
    pull: bool
    moves: str = "RW"
    seed: int = 0

    def __str__(self) -> str:
        first = "R" if self.recompute else "W"
        return f"{first} {'pulled' if self.pull else 'pushed'}"


# A node, a bit for each node that moves with it, the place in the order of the lowest bit, and the
# most time that they all take:
Move = tuple[int, int, int, int]
Passes = tuple[Taste, ...]  # each pass goes through all windows in order
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
    """Return the plan with its windows filled as far as the budget and `until` allow."""
    return filled_by(plan, work, budget, passes, until)[0]


def filled_by(
    plan: Plan, work: Work, budget: int, passes: Passes, until: float = float("inf")
) -> tuple[Plan, int]:
    """The same, and how many moves it took."""
    how = "refilled" if passes[0].seed else f"filled {' then '.join(map(str, passes))}"
    found_by = plan.found_by.removesuffix(f", {how}") + f", {how}"
    moves = 0
    for taste in passes:
        filling = _Filling(plan, work, budget, taste)
        plan = filling.run(until)
        moves += filling.moved
    return replace(plan, found_by=found_by), moves


class _Filling:
    def __init__(self, plan: Plan, work: Work, budget: int, taste: Taste) -> None:
        self.plan, self.work, self.budget, self.taste = plan, work, budget, taste
        self.random = Random(taste.seed)
        self.moved = 0  # how often
        self.flow, self.before = work.flow, work.before
        self.head = tuple(text for text in plan.order if text not in work.number)
        self.order = [work.number[text] for text in plan.order if text in work.number]
        kinds = list(zip(work.letters, work.roles, strict=True))
        # By node: may it be pulled, and pushed?
        self.pulls = [letter in "I" + taste.moves for letter in work.letters]
        self.pushes = [
            moves and role not in ("start", "wait")
            for moves, (_, role) in zip(self.pulls, kinds, strict=True)
        ]
        # Nodes that are not pulled along with others:
        self.stays = [role == "wait" or letter == "I" for letter, role in kinds]
        self.took = work.compute * 2
        self.at = [-1] * (2 * work.count)  # node -> its place in the order
        for i, n in enumerate(self.order):
            self.at[n] = i
        # held before the i-th issue of the order:
        self.held = [work.held_bytes, *Balance(self.flow, work.held_bytes).along(self.order)]

    def run(self, until: float) -> Plan:
        starts = [n for n in self.order if self.work.roles[n] == "start"]
        for start in starts:
            if time.monotonic() > until:
                break
            self.fill(start)
        return replace(self.plan, order=self.head + self.work.text(self.order))

    def fill(self, start: int) -> None:
        """Move work into one window until it is full or nothing fits."""
        wait = next(n for n in self.work.after[start] if self.work.roles[n] == "wait")
        refused: set[int] = set()
        while True:
            begin, end = self.at[start], self.at[wait]
            left = self.work.comm[start % self.work.count]
            left -= sum([self.took[n] for n in self.order[begin:end]])
            if left <= 0:
                return
            moves = [m for m in self.moves(begin, end) if m[0] not in refused]
            moves.sort(key=lambda m: self.rank(m, left, begin))
            for n, group, low, _ in moves[:RUNGS]:
                if self.move(self.nodes(group, low), end):
                    break
                refused.add(n)
            else:
                return

    def moves(self, begin: int, end: int) -> Iterator[Move]:
        """For each node that may run in the window, the nodes that must move with it."""
        at, order, took = self.at, self.order, self.took
        after, before = self.work.after, self.before
        pulls, pushes, stays = self.pulls, self.pushes, self.stays
        low = max(0, begin - REACH + 1)
        pushed: dict[int, tuple[int, int]] = {}  # with the nodes that need it before the end
        for i in range(begin - 1, low - 1, -1):
            n = order[i]
            if not pushes[n]:
                continue
            group, most = 1 << i - low, took[n]
            for user in after[n]:
                if at[user] <= end:
                    if (needed := pushed.get(user)) is None:
                        break
                    group, most = group | needed[0], most + needed[1]
            else:
                pushed[n] = group, most
                if took[n]:
                    yield n, group, low, most
        pulled: dict[int, tuple[int, int]] = {}  # with the nodes that it needs
        for i in range(end + 1, min(len(order), end + REACH)):
            n = order[i]
            if not pulls[n]:
                continue
            group, most = 1 << i - end, took[n]
            for other in before[n]:
                if at[other] >= end:
                    if stays[other] or (needed := pulled.get(other)) is None:
                        break
                    group, most = group | needed[0], most + needed[1]
            else:
                pulled[n] = group, most
                if took[n]:
                    yield n, group, end, most

    def nodes(self, group: int, low: int) -> list[int]:
        """The nodes of a move, in order."""
        found = []
        while group:
            bit = group & -group
            found.append(self.order[low + bit.bit_length() - 1])
            group ^= bit
        return found

    def takes_more(self, group: int, low: int, limit: float) -> bool:
        """Do the nodes of a move take more than the limit?"""
        while group and limit >= 0:
            bit = group & -group
            limit -= self.took[self.order[low + bit.bit_length() - 1]]
            group ^= bit
        return limit < 0

    def rank(self, move: Move, left: int, begin: int) -> tuple[bool, bool, bool, float]:
        n, group, low, most = move
        limit = OVERSHOOT * left
        long = self.took[n] > limit or (most > limit and self.takes_more(group, low, limit))
        recompute, pull = self.taste.recompute, self.taste.pull
        far = 1.0
        if self.taste.seed:
            recompute ^= self.random.random() < 0.5
            pull ^= self.random.random() < 0.5
            far = self.random.uniform(0.3, 3.0)
        wanted = (n >= self.work.count) == recompute
        pulled = self.at[n] > begin
        return long, not wanted, pulled != pull, abs(self.at[n] - begin) * far

    def move(self, group: list[int], end: int) -> bool:
        """Put these nodes right before place `end` of the order, if memory allows."""
        going = set(group)
        low = min(end, self.at[group[0]])
        high = max(end, self.at[group[-1]] + 1)
        early = [n for n in self.order[low:end] if n not in going]
        late = [n for n in self.order[end:high] if n not in going]
        part = [*early, *group, *late]
        readers = _Readers(self.flow.users, self.at, low)
        held = Balance(self.flow, self.held[low], readers).along(part, self.budget)
        if len(held) < len(part):
            return False
        self.moved += 1
        self.order[low:high] = part
        self.held[low + 1 : high + 1] = held
        for i in range(low, high):
            self.at[self.order[i]] = i
        return True


class _Readers(dict[int, int]):
    """How many readers of each holding stand at place `low` of the order or behind; counted on
    demand."""

    def __init__(self, users: Sequence[Sequence[int]], at: Sequence[int], low: int) -> None:
        self.users, self.at, self.low = users, at, low

    def __missing__(self, holding: int) -> int:
        at, low = self.at, self.low
        return sum([at[user] >= low for user in self.users[holding]])
