"""`placed` places recompute and weight gradients in a pipeline's rows, by what its stages take.

Stages stay on their ranks. Forwards and backwards keep their order in the given rows, or take the
order of rows that are made by going through time: input gradients first, then forwards as memory
allows. Recompute and weight gradients go where a rank would wait: first recompute for its next
backward, then weight gradients that are left. The rows are simulated, their stalls filled, and the
result simulated again; then single moves are tried.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from random import Random

from overlapc.core.pipeline import PipelineTimeline, Rank, StageCost, simulate_pipeline
from overlapc.core.schedule import Action, Schedule, Step, steps_of
from overlapc.solvers.constants import ACTIONS

_ROUNDS = 8
_POLISHED = 2  # so many of the rows found are polished
# shares of the limits: less memory may give better rows
_SHARES = (1.0, 0.93, 0.86, 0.78, 0.68, 0.55)
PATIENCE = (0.0, 0.5, 2.0)  # a weight gradient may exceed its stall by so many parts of it
_LARGE = 300  # rows are made from scratch up to so many stages times microbatches


def placed(
    schedule: Schedule,
    costs: Sequence[StageCost],
    limits: Sequence[int] | None = None,
    keep_order: bool = False,
) -> Schedule:
    """Return the fastest rows found in which no rank holds more than its limit, by default the most
    that any rank holds under the given schedule. Rows with merged steps do not change, and
    gradients add up in the same order of microbatches. `keep_order` fixes the order of all forwards
    and backwards."""
    given = simulate_pipeline(schedule, costs)
    if any(len(step) > 1 for row in schedule.rows for step in row):
        return schedule
    if limits is None:
        limits = [max(given.peak_bytes)] * len(schedule.rows)
    search = _RowSearch(schedule.name, costs, limits)
    found = [rows for rows in [schedule] if search.offer(rows, given)]
    for start in [schedule, *(() if keep_order else _through_time(schedule, costs, limits))]:
        timeline = simulate_pipeline(start, costs, trusted=True)
        if search.offer(start, timeline):
            found.append(start)
        for split, early in product((True, False), repeat=2):
            found += search.refill(start, timeline, split, early)
    found.sort(key=lambda rows: search.known[rows.rows])
    for rows in found[:_POLISHED]:
        search.polish(rows)
    return search.best or schedule


def through_time(
    schedule: Schedule, costs: Sequence[StageCost], limits: Sequence[int], patience: float
) -> Schedule | None:
    """Make rows for the same stages on the same ranks from scratch, in the time of one simulation;
    None if memory blocks all ranks, or a rank would exceed its limit."""
    rows = _Clock(schedule, costs, limits, patience).run()
    if rows is None:
        return None
    made = Schedule(schedule.name, rows)
    peaks = simulate_pipeline(made, costs, trusted=True).peak_bytes
    return made if all(p <= limit for p, limit in zip(peaks, limits, strict=True)) else None


def _through_time(
    schedule: Schedule, costs: Sequence[StageCost], limits: Sequence[int]
) -> Iterator[Schedule]:
    """Make a few rows for the same stages on the same ranks from scratch."""
    if schedule.stages * schedule.microbatches > _LARGE:
        return
    for patience, share in product(PATIENCE, _SHARES):
        shared = [int(limit * share) for limit in limits]
        rows = _Clock(schedule, costs, shared, patience).run()
        if rows is not None:
            yield Schedule(schedule.name, rows)


class _Clock:
    """Makes rows by going through time: a free rank takes input gradients, a forward that fits, or
    a weight gradient, unless a better action arrives within what `patience` allows.

    Its times are a guess: a transfer waits for no earlier transfer, and begins when I ends, even if
    W joins that I.
    """

    def __init__(
        self,
        schedule: Schedule,
        costs: Sequence[StageCost],
        limits: Sequence[int],
        patience: float,
    ) -> None:
        self.schedule, self.costs, self.limits = schedule, costs, limits
        self.patience = patience
        self.stages = [
            [s for s, owner in schedule.rank_of.items() if owner == rank]
            for rank in range(len(schedule.rows))
        ]
        self.rows: list[list[Action]] = [[] for _ in schedule.rows]
        self.ranks = [Rank(costs) for _ in schedule.rows]
        self.next = {(s, kind): 0 for s in schedule.rank_of for kind in "FIW"}
        self.there: dict[tuple[int, str, int], int] = {}  # when an action's inputs have arrived
        # by rank: a heap of arrival times
        self.coming: list[list[int]] = [[] for _ in schedule.rows]

    def run(self) -> tuple[tuple[Step, ...], ...] | None:
        """Return the rows; None if memory blocks all ranks."""
        schedule = self.schedule
        for microbatch in range(schedule.microbatches):
            self.there[0, "F", microbatch] = 0
        total = 3 * schedule.stages * schedule.microbatches
        wake = [(0, rank) for rank in range(len(self.rows))]
        while wake:
            now, rank = heapq.heappop(wake)
            if now < self.ranks[rank].lane.free_ns:
                continue
            action = self.choose(rank, now)
            if action is None:
                continue
            self.rows[rank].append(action)
            self.next[action.stage, action.kind] += 1
            end = self.ranks[rank].run(action, now)
            heapq.heappush(wake, (end, rank))
            for stage, kind in self.leads_to(action):
                other = schedule.rank_of[stage]
                at = end + (self.costs[action.stage].sent_ns if other != rank else 0)
                self.there[stage, kind, action.microbatch] = at
                heapq.heappush(self.coming[other], at)
                heapq.heappush(wake, (at, other))
        if sum(map(len, self.rows)) < total:
            return None
        return tuple(steps_of(joined(row)) for row in self.rows)

    def leads_to(self, action: Action) -> Iterator[tuple[int, str]]:
        stage, last = action.stage, self.schedule.stages - 1
        if action.kind == "F":
            yield (stage + 1, "F") if stage < last else (stage, "I")
        elif action.kind == "I" and stage > 0:
            yield stage - 1, "I"

    def choose(self, rank: int, now: int) -> Action | None:
        ready = [
            action
            for kind in "IF"
            for stage in reversed(self.stages[rank])
            if (action := self.first(stage, kind)) is not None
            and self.comes(action) <= now
            and self.fits(rank, action)
        ]
        if ready:
            return ready[0]
        late = [w for stage in self.stages[rank] if (w := self.first(stage, "W")) is not None]
        if not late:
            return None
        oldest = min(late, key=lambda w: w.microbatch)
        # The actions that other ranks run now tell when the next input arrives.
        coming = self.coming[rank]
        while coming and coming[0] <= now:
            heapq.heappop(coming)
        starved = all(
            self.comes(action) > now
            for stage in self.stages[rank]
            if (action := self.first(stage, "F")) is not None
        )
        takes = self.costs[oldest.stage].weight_ns
        if starved and coming and takes > (coming[0] - now) * (1 + self.patience):
            return None
        return oldest if self.fits(rank, oldest) else None

    def first(self, stage: int, kind: str) -> Action | None:
        """The stage's next action of that kind, if the rank has done its own earlier actions."""
        microbatch = self.next[stage, kind]
        before = {"F": self.schedule.microbatches, "I": self.next[stage, "F"]}
        if microbatch >= before.get(kind, self.next[stage, "I"]):
            return None
        return Action(stage, kind, microbatch)

    def comes(self, action: Action) -> float:
        return self.there.get((action.stage, action.kind, action.microbatch), math.inf)

    def fits(self, rank: int, action: Action) -> bool:
        during = self.ranks[rank].during(action)
        if action.kind == "F":  # leave room for the later stages of this rank
            during += sum(self.costs[s].saved for s in self.stages[rank] if s > action.stage)
        return during <= self.limits[rank]


class _RowSearch:
    """Simulates rows and keeps the best that fit."""

    def __init__(self, name: str, costs: Sequence[StageCost], limits: Sequence[int]) -> None:
        self.name, self.costs, self.limits = name, costs, limits
        self.known: dict[tuple[tuple[Step, ...], ...], int] = {}
        self.best: Schedule | None = None
        self.best_ns = 0

    def offer(self, rows: Schedule, timeline: PipelineTimeline) -> bool:
        """Note the rows; return whether they fit."""
        self.known[rows.rows] = timeline.step_ns
        peaks = zip(timeline.peak_bytes, self.limits, strict=True)
        if not all(peak <= limit for peak, limit in peaks):
            return False
        if self.best is None or timeline.step_ns < self.best_ns:
            self.best, self.best_ns = rows, timeline.step_ns
        return True

    def refill(
        self, start: Schedule, timeline: PipelineTimeline, split: bool, early: bool
    ) -> list[Schedule]:
        """Fill the stalls that were simulated, again and again, and note the rows that fit."""
        rows, found = start, []
        for _ in range(_ROUNDS):
            arrivals = _arrivals(rows, timeline)
            filled = [
                _Row(mine, self.costs, limit, arrivals, split, early).run()
                for mine, limit in zip(start.rows, self.limits, strict=True)
            ]
            rows = Schedule(self.name, tuple(filled))
            if rows.rows in self.known:
                break
            timeline = simulate_pipeline(rows, self.costs)
            if self.offer(rows, timeline):
                found.append(rows)
        return found

    def polish(self, start: Schedule) -> None:
        """Move one weight gradient or recompute at a time, as long as that helps."""
        rows = [_apart(row) for row in start.rows]
        now = self.known[start.rows]
        effort = ACTIONS // max(1, sum(map(len, rows)))
        rng = Random(0)
        improved = True
        while improved and effort > 0:
            improved = False
            moves = [(rank, move) for rank, row in enumerate(rows) for move in self.moves(row)]
            rng.shuffle(moves)
            for rank, other in moves[:effort]:
                tried = [*rows[:rank], other, *rows[rank + 1 :]]
                schedule = Schedule(self.name, tuple(steps_of(joined(row)) for row in tried))
                if schedule.rows in self.known:
                    continue
                effort -= 1
                timeline = simulate_pipeline(schedule, self.costs, trusted=True)
                if self.offer(schedule, timeline) and timeline.step_ns < now:
                    rows, now, improved = tried, timeline.step_ns, True
                    break

    def moves(self, row: list[Action]) -> Iterator[list[Action]]:
        """The row with one action moved: W to a place behind its I, in the order of W's; R to a
        place between its F and its I, or removed."""
        at = {action: i for i, action in enumerate(row)}
        in_turn: dict[int, list[Action]] = {}
        for action in row:
            if action.kind == "W":
                in_turn.setdefault(action.stage, []).append(action)
        for action in row:
            first = Action(action.stage, "F", action.microbatch)
            again = Action(action.stage, "R", action.microbatch)
            main = Action(action.stage, "I", action.microbatch)
            if action.kind == "W":
                turn = in_turn[action.stage].index(action)
                before, after = in_turn[action.stage][:turn], in_turn[action.stage][turn + 1 :]
                low = max(at[main], at[before[-1]] if before else 0)
                mine, high = action, at[after[0]] if after else len(row)
            elif action.kind == "I" and self.costs[action.stage].recompute_ns:
                mine, low, high = again, at[first], at[main]
            else:
                continue
            rest = [other for other in row if other != mine]
            shift = int(mine in at and at[mine] < high)
            for place in range(low + 1, high + 1 - shift):
                yield [*rest[:place], mine, *rest[place:]]
            if mine.kind == "R" and mine in at:
                yield rest


def _apart(row: Sequence[Step]) -> list[Action]:
    """The schedule with every B split into I and W."""
    found: list[Action] = []
    for step in row:
        for a in step:
            if a.kind == "B":
                found += [Action(a.stage, kind, a.microbatch) for kind in "IW"]
            else:
                found.append(a)
    return found


def _arrivals(schedule: Schedule, timeline: PipelineTimeline) -> dict[tuple[int, str, int], int]:
    """(stage, F or I, microbatch) -> when its input from another stage arrives."""
    ends = {action: ran.end_ns for row in timeline.ran for ran in row for action in ran.step}
    # each result goes to one rank only
    ends |= {sent.step[0]: sent.end_ns for sent in timeline.transfers}
    found = {}
    for action in schedule.actions:
        if action.kind in "FBI":
            needs = [need for need in schedule.needs(action) if need.stage != action.stage]
            kind = "F" if action.kind == "F" else "I"
            there = max((ends[need] for need in needs), default=0)
            found[action.stage, kind, action.microbatch] = there
    return found


@dataclass
class _Row:
    """One rank's row, filled from its start to its end."""

    given: Sequence[Step]
    costs: Sequence[StageCost]
    limit: int
    arrivals: Mapping[tuple[int, str, int], int]
    split: bool  # weight gradients may be late
    early: bool  # recompute may come before the gradient
    row: list[Action] = field(default_factory=list)
    owed: deque[Action] = field(default_factory=deque)
    remade: set[Action] = field(default_factory=set)  # the I's whose recompute is done
    done: set[Action] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.rank = Rank(self.costs)

    def run(self) -> tuple[Step, ...]:
        main = [
            Action(a.stage, "F" if a.kind == "F" else "I", a.microbatch)
            for step in self.given
            for a in step
            if a.kind in "FBI"
        ]
        for at, action in enumerate(main):
            ready = self.arrivals[action.stage, action.kind, action.microbatch]
            backward = [a for a in main[at:] if a.kind == "I"]
            lane = self.rank.lane
            while lane.free_ns < ready and self.fill(ready - lane.free_ns, backward):
                pass
            self.make_room(action)
            self.do(action, ready)
            if action.kind == "I":
                late = Action(action.stage, "W", action.microbatch)
                if self.split:
                    self.owed.append(late)
                else:
                    self.do(late)
        while self.owed:
            self.do(self.owed.popleft())
        return tuple((action,) for action in joined(self.row))

    def fill(self, gap: int, backward: Sequence[Action]) -> bool:
        """Run an action in a stall of this length; return whether one fitted."""
        if self.early:
            for i, action in enumerate(backward[:2]):
                cost = self.costs[action.stage]
                first = Action(action.stage, "F", action.microbatch)
                again = Action(action.stage, "R", action.microbatch)
                if action in self.remade or not cost.recompute_ns or first not in self.done:
                    continue
                if (i == 0 or cost.recompute_ns <= gap) and self.fits(again):
                    self.do(again)
                    self.remade.add(action)
                    return True
        # A stage's weight gradients keep their order, so gradients add up in the same order.
        for late in {late.stage: late for late in reversed(self.owed)}.values():
            if self.costs[late.stage].weight_ns <= gap and self.fits(late):
                self.owed.remove(late)
                self.do(late)
                return True
        return False

    def make_room(self, action: Action) -> None:
        while self.owed and not self.fits(action):
            self.do(self.owed.popleft())

    def fits(self, action: Action) -> bool:
        return self.rank.during(action, action in self.remade) <= self.limit

    def do(self, action: Action, ready_ns: int = 0) -> None:
        self.rank.run(action, ready_ns, action in self.remade)
        self.done.add(action)
        self.row.append(action)


def joined(row: Sequence[Action]) -> list[Action]:
    """Join I and the W right behind it to B; an R right before it is dropped, since B
    recomputes."""
    found: list[Action] = []
    for action in row:
        last = found[-1] if found else None
        same = last is not None and (last.stage, last.microbatch) == (
            action.stage,
            action.microbatch,
        )
        if same and last is not None and (last.kind, action.kind) in (("I", "W"), ("R", "I")):
            kind = "B" if action.kind == "W" else "I"
            found[-1] = Action(action.stage, kind, action.microbatch)
        else:
            found.append(action)
    return found
