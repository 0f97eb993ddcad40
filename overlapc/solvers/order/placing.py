"""`placed` moves collectives that nothing holds in their places to where they cost least.

    gather      reads inputs alone: it begins as late as its lane allows, so that it has ended when
                the first op needs it and its result is held no longer than it must be
    reduction   only results of the step read it: it begins when its lane is free, before or behind
                gathers that are not yet due (before them it soon frees a gradient's memory)

All other ops keep their order. A plan's forward and backward are placed by themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, product

from overlapc.core.ir import Plan, Problem
from overlapc.core.machine import Lane
from overlapc.solvers.choose.choice import choice_of
from overlapc.solvers.order.work import Work, backward_work, forward_work

# How many times a gather's time it begins before it is needed: memory decides which.
EARLY = (1.5, 1.1, 0.5, 0.0)


def can_place(problem: Problem) -> bool:
    """Is there a gather in the forward, or one of a reduction and a gather that may run again?"""
    return len(problem.phases) == 2 and any(
        moved.is_gather for moved in Placing(forward_work(problem)).moved
    )


def placed(problem: Problem, plan: Plan) -> Iterator[Plan]:
    """Plans with what this one keeps, whose gathers and reductions are placed."""
    both = forward_work(problem), backward_work(problem, choice_of(problem, plan))
    placings = [Placing(work, plan) for work in both]
    seen = {plan.order}
    for early, sums_first in product(EARLY, (False, True)):
        order = tuple(text for each in placings for text in each.order(early, sums_first))
        if order not in seen:
            seen.add(order)
            how = f"{early:g}{' sums first' if sums_first else ''}"
            yield replace(plan, order=order, found_by=f"{plan.found_by}, placed {how}")


@dataclass(eq=False)
class Moved:
    """A collective that moves, with the nodes that move along."""

    start: int
    wait: int
    is_gather: bool
    before: list[int]  # nodes that only the start needs
    behind: list[int]  # nodes that only read what it brings
    ready: int = 0  # places in the order of what stays: it may begin there,
    due: int = 0  # and must have ended there
    latest_ns: float = 0.0  # when a gather begins at the latest, in time of compute


class Placing:
    """What moves of a phase of a plan, and what stays."""

    def __init__(self, work: Work, plan: Plan | None = None) -> None:
        self.work = work
        texts = work.text(work.nodes) if plan is None else plan.order
        self.all = [work.number[text] for text in texts if text in work.number]
        self.at = {n: i for i, n in enumerate(self.all)}
        self.took = work.compute * 2
        self.fed = self._fed()
        self.taken: set[int] = set()
        starts = [n for n in self.all if work.roles[n] == "start"]
        self.moved = [moved for n in starts if (moved := self._moved(n)) is not None]
        self.stay = [n for n in self.all if n not in self.taken]
        self.at_ns = list(accumulate((self.took[n] for n in self.stay), initial=0))
        self._limit()

    def _fed(self) -> set[int]:
        """Nodes that inputs alone feed, without a collective or a saved value between."""
        work, fed = self.work, set[int]()
        for n in self.all:
            given = work.ops[n % work.count].inputs
            apart = work.roles[n] != "wait" and work.saved.isdisjoint(given)
            if apart and fed.issuperset(work.before[n]):
                fed.add(n)
        return fed

    def _moved(self, start: int) -> Moved | None:
        """The collective as one that moves, or None if it stays."""
        work = self.work
        if len(work.after[start]) != 1:
            return None
        wait, is_gather = work.after[start][0], start in self.fed
        if not is_gather and not self._ends(wait):
            return None
        before = self._before(start, wait, is_gather)
        behind = self._behind(wait, {start, *before})
        mine = {start, wait, *before, *behind}
        beside = {other for n in mine for other in (*work.before[n], *work.after[n])}
        if not self.taken.isdisjoint(beside):
            return None  # another that moves needs it, or is needed
        if not is_gather and any(not mine.issuperset(work.after[n]) for n in (wait, *behind)):
            return None
        self.taken |= mine
        place = self.at.__getitem__
        return Moved(start, wait, is_gather, sorted(before, key=place), sorted(behind, key=place))

    def _ends(self, wait: int) -> bool:
        """Do only results of the step read what the collective brings?"""
        front, seen, comm = (
            [wait],
            {wait},
            self.work.comm_beside[self.work.start_of(wait) % self.work.count],
        )
        while front:
            for user in self.work.after[front.pop()]:
                if self.work.roles[user] in ("start", "wait"):
                    return False
                if user not in seen:
                    seen.add(user)
                    front.append(user)
        return sum(self.took[n] for n in seen) <= comm

    def _before(self, start: int, wait: int, is_gather: bool) -> set[int]:
        """What only the start needs: of a gather all, of a reduction views."""
        found, front, work = set[int](), [start], self.work
        while front:
            for n in work.before[front.pop()]:
                if n in found or n in self.taken or work.roles[n] in ("start", "wait"):
                    continue
                if not (found | {start, wait}).issuperset(work.after[n]):
                    continue
                if n in self.fed if is_gather else not self.took[n]:
                    found.add(n)
                    front.append(n)
        return found

    def _behind(self, wait: int, group: set[int]) -> set[int]:
        """What reads the collective's result, and nothing else that is made in this phase."""
        found, front, work = {wait}, [wait], self.work
        while front:
            for n in work.after[front.pop()]:
                if n in found or n in self.taken or work.roles[n] in ("start", "wait"):
                    continue
                given = work.ops[n % work.count].inputs
                if (found | group).issuperset(work.before[n]) and work.saved.isdisjoint(given):
                    found.add(n)
                    front.append(n)
        return found - {wait}

    def _limit(self) -> None:
        """Find where each may begin and must end."""
        place = {n: i for i, n in enumerate(self.stay)}
        for moved in self.moved:
            mine = [moved.start, moved.wait, *moved.before, *moved.behind]
            needs = [place[n] for m in mine for n in self.work.before[m] if n in place]
            users = [place[n] for m in mine for n in self.work.after[m] if n in place]
            moved.ready = max(needs, default=-1) + 1
            moved.due = min(users, default=len(self.stay))

    def _latest(self, gathers: Sequence[Moved], early: float) -> None:
        """Find when gathers of one lane begin at the latest, so that each is in time."""
        next_ns = float("inf")
        for moved in reversed(gathers):
            ends_ns = min(self.at_ns[moved.due], next_ns)
            moved.latest_ns = next_ns = ends_ns - early * self._comm(moved)

    def _comm(self, moved: Moved) -> int:
        return self.work.comm_beside[moved.start % self.work.count]

    def order(self, early: float, sums_first: bool = False) -> tuple[str, ...]:
        return self.work.text(_Placed(self, early, sums_first).run())


class _Placed:
    """The state of one placing: the order so far, time, and what is to come on each lane."""

    def __init__(self, placing: Placing, early: float, sums_first: bool) -> None:
        self.placing, self.sums_first = placing, sums_first
        self.clock = Lane()
        self.lanes: dict[str, Lane] = {}
        self.gathers: dict[str, list[Moved]] = {}  # by lane, the first last
        self.sums: dict[str, list[Moved]] = {}
        for moved in placing.moved:
            kind = self.gathers if moved.is_gather else self.sums
            kind.setdefault(self._lane_of(moved.start), []).append(moved)
        for gathers in self.gathers.values():
            gathers.sort(key=lambda moved: (moved.due, placing.at[moved.start]))
            placing._latest(gathers, early)
            gathers.reverse()
        for sums in self.sums.values():
            sums.sort(key=lambda moved: (moved.ready, placing.at[moved.start]), reverse=True)
        self.flying: list[tuple[int, Moved]] = []  # (its end, a reduction)
        self.waits: dict[int, list[tuple[int, Moved]]] = {}  # place -> gathers due there
        self.issued: list[int] = []

    def _lane_of(self, start: int) -> str:
        return self.placing.work.ops[start % self.placing.work.count].lane

    def run(self) -> list[int]:
        placing = self.placing
        for place in range(len(placing.stay) + 1):
            for lane in dict.fromkeys([*self.gathers, *self.sums]):
                self._begin(lane, place)
            self._end(place)
            if place < len(placing.stay):
                self._issue(placing.stay[place])
        for _, moved in self.flying:
            self._behind(moved)
        return self.issued

    def _begin(self, lane: str, place: int) -> None:
        """Begin what is due on a lane before the op at this place runs, or fits there. What is not
        due begins no sooner than the lane would be idle while that op runs: it only held memory."""
        gathers, sums = self.gathers.get(lane, []), self.sums.get(lane, [])
        last = place == len(self.placing.stay)
        op_ns = 0 if last else self.placing.took[self.placing.stay[place]]
        while True:
            busy_ns = self.lanes.setdefault(lane, Lane()).free_ns - self.clock.free_ns
            first = sums[-1] if sums and sums[-1].ready <= place else None
            room_ns = max(0, busy_ns) + (self.placing._comm(first) if first else 0)
            soon_ns = self.placing.at_ns[min(place + 1, len(self.placing.stay))] + room_ns
            awaited_ns = (ends_ns for ends_ns, _ in self.waits.get(place, ()))
            idle = self.lanes[lane].free_ns <= max([self.clock.free_ns, *awaited_ns]) + op_ns
            if gathers and gathers[-1].due <= place:
                moved = gathers.pop()
            elif self.sums_first and first is not None and idle:
                moved = sums.pop()
            elif gathers and idle and self._is_time(gathers[-1], place, soon_ns):
                moved = gathers.pop()
            elif first is not None and (busy_ns <= 0 or not gathers or last):
                moved = sums.pop()
            else:
                return
            for n in moved.before:
                self._issue(n)
            ends_ns = self._issue(moved.start)
            if moved.is_gather:
                self.waits.setdefault(moved.due, []).append((ends_ns, moved))
            else:
                self.flying.append((ends_ns, moved))

    def _is_time(self, gather: Moved, place: int, soon_ns: float) -> bool:
        """Is the next place too late for a gather?"""
        return gather.ready <= place and gather.latest_ns < soon_ns

    def _end(self, place: int) -> None:
        """Wait for gathers that the op at this place needs; end reductions that have arrived."""
        over = [each for each in self.flying if each[0] <= self.clock.free_ns]
        for each in over:
            self.flying.remove(each)
            self._behind(each[1])
        for ends_ns, moved in self.waits.pop(place, ()):
            self.clock.put(0, ends_ns)
            self._behind(moved)

    def _behind(self, moved: Moved) -> None:
        for n in (moved.wait, *moved.behind):
            self._issue(n)

    def _issue(self, n: int) -> int:
        """Issue a node; return when it ends, or its collective."""
        work = self.placing.work
        self.issued.append(n)
        ends_ns = self.clock.put(self.placing.took[n])
        if work.roles[n] == "start":
            lane = self.lanes.setdefault(self._lane_of(n), Lane())
            ends_ns = lane.put(work.comm_beside[n % work.count], ends_ns)
        return ends_ns
