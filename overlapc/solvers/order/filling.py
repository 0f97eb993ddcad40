"""`filled` moves work into the windows of an order that fits memory, so that it still fits.

`list_schedule` is quick but guesses at memory: it exceeds a tight budget. Filling starts from an
order that fits, mostly recompute on demand, and changes it a little at a time; a change that would
exceed the budget is not made. A window takes:

    pushed   work before the collective that nothing needs before the collective's end
    pulled   work behind the collective, with whatever else it needs
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import nsmallest
from itertools import accumulate, islice, pairwise
from operator import add
from random import Random

from overlapc.core.ir import Plan
from overlapc.core.ledger import Balance
from overlapc.solvers.constants import OVERSHOOT, REACH, RUNGS
from overlapc.solvers.order.work import Work


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
        self.gains = [0] * (2 * work.count)  # by node: what is held more when it has run
        for n, (held, then) in zip(self.order, pairwise(self.held), strict=True):
            self.gains[n] = then - held

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
        early, late = _Side(self.at[start] - 1), _Side(self.at[wait] + 1)
        refused: set[int] = set()
        while True:
            begin, end = self.at[start], self.at[wait]
            left = self.work.comm_beside[start % self.work.count]
            left -= sum([self.took[n] for n in self.order[begin:end]])
            if left <= 0:
                return
            self.look_before(early, begin, end)
            self.look_behind(late, end)
            sides = (late, early) if self.taste.pull else (early, late)
            ranked = self.shuffled(early, late, refused, left, begin)
            if not self.taste.seed:
                ranked = self.ranked(sides, refused, left)
            for side, n in islice(ranked, RUNGS):
                moved, behind = side.groups[n], self.at[n] + 1
                group = side.members(moved)
                if self.move(group[::-1] if side is early else group, end):
                    break
                refused.add(n)
            else:
                return
            if side is early:
                early.drop(moved)
                continue
            early.drop(early.bits(other for g in group for other in self.before[g]))
            late.leave(moved)
            if self.stays[n]:  # what needs it may move now
                late.forget(moved, behind)

    def look_before(self, side: _Side, begin: int, end: int) -> None:
        """Look at work before the window, as far as it reaches: what may move there, with the nodes
        that need it before the end?"""
        at, took, after, groups, most = self.at, self.took, self.work.after, side.groups, side.most
        low = max(0, begin - REACH + 1)
        for n in self.order[low : side.next + 1][::-1]:
            if not self.pushes[n]:
                continue
            others, all_ns = 0, took[n]
            for user in after[n]:
                if at[user] <= end:
                    if (needed := groups.get(user)) is None:
                        break
                    others, all_ns = others | needed, all_ns + most[user]
            else:
                side.add(n, others, all_ns)
        side.next = low - 1

    def look_behind(self, side: _Side, end: int) -> None:
        """The same for work behind the window, with the nodes that it needs."""
        at, took, before, groups, most = self.at, self.took, self.before, side.groups, side.most
        high = min(len(self.order), end + REACH)
        for n in self.order[side.next : high]:
            if not self.pulls[n]:
                continue
            others, all_ns = 0, took[n]
            for other in before[n]:
                if at[other] >= end:
                    if self.stays[other] or (needed := groups.get(other)) is None:
                        break
                    others, all_ns = others | needed, all_ns + most[other]
            else:
                side.add(n, others, all_ns)
        side.next = high

    def is_long(self, side: _Side, n: int, limit: float) -> bool:
        """Do the nodes of a move take more than the limit?"""
        if self.took[n] > limit:
            return True
        return (
            side.most[n] > limit
            and sum([self.took[g] for g in side.members(side.groups[n])]) > limit
        )

    def ranked(
        self, sides: Sequence[_Side], refused: set[int], left: int
    ) -> Iterator[tuple[_Side, int]]:
        """Moves into a window, the best first: those that fit, of wanted work, from the side where
        the taste begins, the nearest."""
        count, limit = self.work.count, OVERSHOOT * left
        long: list[tuple[_Side, int]] = []
        for recompute in (self.taste.recompute, not self.taste.recompute):
            for side in sides:
                for n in side.groups:
                    if (n >= count) == recompute and self.took[n] and n not in refused:
                        if self.is_long(side, n, limit):
                            long.append((side, n))
                        else:
                            yield side, n
        yield from long

    def shuffled(
        self, early: _Side, late: _Side, refused: set[int], left: int, begin: int
    ) -> Iterator[tuple[_Side, int]]:
        """The same, with deviations at random."""
        count, limit, draw = self.work.count, OVERSHOOT * left, self.random
        found: list[tuple[bool, bool, bool, float, int, _Side, int]] = []
        for side in (early, late):
            for n in side.groups:
                if self.took[n] and n not in refused:
                    recompute = self.taste.recompute ^ (draw.random() < 0.5)
                    pull = self.taste.pull ^ (draw.random() < 0.5)
                    far = abs(self.at[n] - begin) * draw.uniform(0.3, 3.0)
                    unwanted, other = (n >= count) != recompute, (side is late) != pull
                    long = self.is_long(side, n, limit)
                    found.append((long, unwanted, other, far, len(found), side, n))
        for *_, side, n in nsmallest(RUNGS, found):
            yield side, n

    def move(self, group: list[int], end: int) -> bool:
        """Put these nodes right before place `end` of the order, if memory allows."""
        at, order, gains, allocates = self.at, self.order, self.gains, self.flow.allocates
        going = set(group)
        low = min(end, at[group[0]])
        high = max(end, at[group[-1]] + 1)
        early = [n for n in order[low:end] if n not in going]
        late = [n for n in order[end:high] if n not in going]
        part = [*early, *group, *late]
        passed_on = self.passed_on(group, going, end, high)
        for old, new, size in passed_on:
            gains[old] += size
            gains[new] -= size
        held = list(accumulate([gains[n] for n in part], initial=self.held[low]))
        if max(map(add, held, [allocates[n] for n in part])) > self.budget:
            for old, new, size in passed_on:
                gains[old] -= size
                gains[new] += size
            return False
        self.moved += 1
        order[low:high] = part
        self.held[low : high + 1] = held
        for i, n in enumerate(part, low):
            at[n] = i
        return True

    def passed_on(
        self, group: list[int], going: set[int], end: int, high: int
    ) -> list[tuple[int, int, int]]:
        """Which holdings another node frees when these have moved to place `end`: (the node that
        freed it, the node that will, bytes). The order changes up to place `high`."""
        at, flow = self.at, self.flow
        found = []
        for holding, new in {h: n for n in group for h in flow.frees[n]}.items():
            users = flow.users[holding]
            last = max([at[user] for user in users])
            if last >= high:
                continue  # a later node frees it
            behind = [at[user] for user in users if at[user] >= end and user not in going]
            if behind:
                new = self.order[max(behind)]
            if new != (old := self.order[last]):
                found.append((old, new, flow.size[holding]))
        return found


class _Side:
    """Work on one side of a window that could run in it. A *group* has a bit for a node, its
    highest, and one for each that must move with it; the nearer to the window, the lower. A move
    changes few of them, so they are made once for each window."""

    def __init__(self, place: int) -> None:
        self.next = place  # of the order, at which nothing has looked yet
        self.nodes: list[int] = []  # by bit
        self.groups: dict[int, int] = {}  # of what may move, the nearest first
        self.most: dict[int, int] = {}  # the most time that they take

    def add(self, n: int, others: int, most: int) -> None:
        self.groups[n] = 1 << len(self.nodes) | others
        self.nodes.append(n)
        self.most[n] = most

    def members(self, group: int) -> list[int]:
        """The nodes of a group, the nearest first."""
        found = []
        while group:
            bit = group & -group
            found.append(self.nodes[bit.bit_length() - 1])
            group ^= bit
        return found

    def bits(self, nodes: Iterable[int]) -> int:
        """The nodes' own bits, of those that may move."""
        found = 0
        for group in filter(None, map(self.groups.get, nodes)):
            found |= 1 << group.bit_length() - 1
        return found

    def drop(self, bits: int) -> None:
        """These may move no longer, nor may what takes them along."""
        if bits:
            self.groups = {n: group for n, group in self.groups.items() if not group & bits}

    def leave(self, bits: int) -> None:
        """These are in the window now: nothing takes them along."""
        for n in self.members(bits):
            del self.groups[n]
        self.groups = {n: group & ~bits for n, group in self.groups.items()}

    def forget(self, bits: int, place: int) -> None:
        """Look again at what is farther away than these: from this place on."""
        self.next, farthest = place, bits.bit_length() - 1
        del self.nodes[farthest:]
        self.groups = {n: group for n, group in self.groups.items() if not group >> farthest}
