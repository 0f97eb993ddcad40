"""`simulate_pipeline` runs a schedule's rows: times of all ranks, bubbles and memory.

A rank runs the steps of its row one after the other. When a step ends, its results for another rank
are sent on the lane between the two ranks, in order; the receiving rank waits for them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import accumulate

from overlapc.core.errors import InvalidSchedule
from overlapc.core.ledger import Ledger
from overlapc.core.machine import Lane, Tasks, timed
from overlapc.core.record import Record
from overlapc.core.schedule import Action, Schedule, Step, check_schedule, format_step

_WAYS = {"F": 1, "B": -1, "I": -1}  # results go to the next stage, or to the one before
AHEAD = 3  # steps, the running one included, for whose inputs a rank has room


@dataclass(frozen=True)
class StageCost(Record):
    """What one microbatch takes on one stage.

    Nanoseconds of each kind of action: `whole_ns` is B including its recompute; 0 means the sum of
    R, I and W. Where recompute is no action of its own, I includes it. Bytes: `saved` are held from
    the forward on, `remade` more from recompute on, both until the input gradients are done; of
    them `for_weights` stay until the weight gradients are done. `working` is the most that an
    action allocates above what is held when it begins. `sent_ns` is how long a transfer to the next
    stage takes, or of a gradient to the stage before; `coming` and `returning` are the bytes of the
    input and of the gradient that other stages send.
    """

    forward_ns: int
    input_ns: int
    weight_ns: int
    recompute_ns: int = 0
    saved: int = 0
    remade: int = 0
    for_weights: int = 0
    sent_ns: int = 0
    whole_ns: int = 0
    coming: int = 0
    returning: int = 0
    working: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        for each in fields(self)[:-1]:
            value = getattr(self, each.name)
            if not isinstance(value, int) or value < 0:
                raise ValueError(f"{each.name} is {value!r}, expected a whole number, not negative")

    def takes(self, kind: str, remade: bool = False) -> int:
        """How long an action takes. `remade`: recompute is an action of its own."""
        recompute = 0 if remade else self.recompute_ns
        if kind == "B":
            if self.whole_ns and not remade:
                return self.whole_ns
            return recompute + self.input_ns + self.weight_ns
        if kind == "I":
            return recompute + self.input_ns
        return {"F": self.forward_ns, "R": self.recompute_ns, "W": self.weight_ns}[kind]

    def holds(self, kind: str, remade: bool = False) -> int:
        """How many bytes more (or less) are held after an action than before it. `remade`: the
        microbatch's recompute is an action of its own."""
        ends = self.saved + remade * self.remade
        return {
            "F": self.saved,
            "R": self.remade,
            "B": -ends,
            "I": self.for_weights - ends,
            "W": -self.for_weights,
        }[kind]

    @cached_property
    def works(self) -> Mapping[str, int]:
        return dict(self.working)

    def allocates(self, kind: str, remade: bool = False) -> int:
        """How much an action allocates at its worst moment, above what is held when it begins.
        `remade`: recompute is an action of its own, and done."""
        works = self.works
        if kind == "I" and not remade:
            return max(works.get("R", 0), self.remade + works.get("I", 0))
        if kind == "B" and remade:
            rest = self.for_weights - self.saved - self.remade
            return max(works.get("I", 0), works.get("W", 0) + rest)
        return works.get(kind, 0)


@dataclass(slots=True)
class Rank:
    """A rank that runs actions one by one. It has the times and memory of `simulate_pipeline`, if
    its caller says when each action's inputs arrive."""

    costs: Sequence[StageCost]  # by stage
    lane: Lane = field(default_factory=Lane)
    held: int = 0

    def during(self, action: Action, remade: bool = False) -> int:
        """How many bytes the rank would hold while it runs the action, without transfers."""
        cost = self.costs[action.stage]
        more = {"F": cost.saved, "R": cost.remade}.get(action.kind, 0)
        return self.held + max(more, cost.allocates(action.kind, remade))

    def run(self, action: Action, ready_ns: int = 0, remade: bool = False) -> int:
        """Run the action and return when it ends. `remade`: recompute is an action of its own."""
        cost = self.costs[action.stage]
        self.held += cost.holds(action.kind, remade)
        return self.lane.put(cost.takes(action.kind, remade), ready_ns)


@dataclass(frozen=True, slots=True)
class Ran:
    """One step of a rank, or a transfer between two: `rank` sends to `to`."""

    step: Step
    rank: int
    start_ns: int
    end_ns: int
    to: int | None = None


@dataclass(frozen=True, slots=True)
class Reduction:
    """The reduction of a stage's gradients over the replicas of its rank."""

    stage: int
    rank: int
    start_ns: int
    end_ns: int


@dataclass(frozen=True)
class PipelineTimeline:
    """The result of `simulate_pipeline`: what all ranks do, in the order of their rows, and the
    time and memory that this takes."""

    ran: tuple[tuple[Ran, ...], ...]  # by rank
    transfers: tuple[Ran, ...]
    step_ns: int
    memory: tuple[tuple[int, ...], ...]  # by rank, at the worst moment of each of its steps
    held: tuple[tuple[int, ...], ...]  # by rank, behind each of its steps
    reductions: tuple[Reduction, ...] = ()

    @property
    def peak_bytes(self) -> tuple[int, ...]:
        """The most that each rank holds."""
        return tuple(max(levels, default=0) for levels in self.memory)

    def peaks_with(self, gradients: Sequence[int]) -> list[int]:
        """Peaks by rank if each rank also holds its gradients, so many bytes, from its first
        backward on."""
        found = []
        for row, levels, size in zip(self.ran, self.memory, gradients, strict=True):
            first = next(
                (i for i, ran in enumerate(row) if any(a.kind in "BW" for a in ran.step)), len(row)
            )
            found.append(
                max((level + size * (i > first) for i, level in enumerate(levels)), default=0)
            )
        return found

    def busy_ns(self, rank: int) -> int:
        return sum(ran.end_ns - ran.start_ns for ran in self.ran[rank])

    def bubble_ns(self, rank: int) -> int:
        """How long the rank runs nothing, from the start to the end of the step."""
        return self.step_ns - self.busy_ns(rank)

    def picture(self, columns: int = 100) -> str:
        """Draw one line for each rank: letters for actions, dots for idle time."""
        lines = []
        for rank, row in enumerate(self.ran):
            line = ["."] * columns
            for ran in row:
                first = ran.start_ns * columns // max(1, self.step_ns)
                last = max(first + 1, ran.end_ns * columns // max(1, self.step_ns))
                for i in range(first, min(columns, last)):
                    line[i] = ran.step[0].kind if len(ran.step) == 1 else "M"
            lines.append(f"rank {rank}: {''.join(line)}")
        return "\n".join(lines)


def simulate_pipeline(
    schedule: Schedule,
    costs: Sequence[StageCost],
    merged_ns: Callable[[Step], int] | None = None,
    resident: Sequence[int] | None = None,
    trusted: bool = False,
) -> PipelineTimeline:
    """Run a legal schedule. `costs` are by stage; `merged_ns` gives the time of a merged step, by
    default the sum of its actions; each rank holds `resident` bytes throughout. `trusted`: the
    schedule is known to be legal."""
    if not trusted:
        check_schedule(schedule)
    if len(costs) != schedule.stages:
        raise InvalidSchedule(
            f"costs of {len(costs)} stages for a schedule of {schedule.stages}: give one of each"
        )
    remade = {
        (a.stage, a.microbatch) for row in schedule.rows for s in row for a in s if a.kind == "R"
    }
    tasks, sent = _tasks(schedule, costs, merged_ns, remade)
    begin_ns, end_ns, ended = timed(tasks)
    if len(ended) < len(end_ns):
        check_schedule(schedule)  # says who waits for what
    steps = iter(zip(begin_ns, end_ns, strict=False))
    ran = tuple(
        tuple(Ran(step, rank, *next(steps)) for step in row)
        for rank, row in enumerate(schedule.rows)
    )
    first = tasks.first[len(ran)]
    sends = sorted(zip(begin_ns[first:], sent, end_ns[first:], strict=False))
    transfers = tuple(
        Ran((action,), rank, begin, end, other)
        for begin, (_, _, action, rank, other), end in sends
        if begin < end
    )
    levels = [
        _ledger(schedule, rank, costs, remade, beside).alive()
        for rank, beside in enumerate(resident or [0] * len(schedule.rows))
    ]
    return PipelineTimeline(
        ran=ran,
        transfers=transfers,
        step_ns=max((row[-1].end_ns for row in ran if row), default=0),
        memory=tuple(tuple(row[::2]) for row in levels),
        held=tuple(tuple(row[1::2]) for row in levels),
    )


def reduced(timeline: PipelineTimeline, takes_ns: Sequence[int]) -> PipelineTimeline:
    """Add the reduction of each stage's gradients, which takes `takes_ns`, on a lane of the stage's
    rank. It begins when the stage's last gradient is made and the rank's later stages are reduced,
    as in `Pipeline`. The step ends when the last reduction ends."""
    found = []
    for rank, row in enumerate(timeline.ran):
        there = {a.stage: ran.end_ns for ran in row for a in ran.step if a.kind in "BW"}
        lane = Lane()
        for stage in sorted(there, reverse=True):
            end = lane.put(takes_ns[stage], there[stage])
            if takes_ns[stage]:
                found.append(Reduction(stage, rank, end - takes_ns[stage], end))
    end = max((reduction.end_ns for reduction in found), default=0)
    return replace(timeline, step_ns=max(timeline.step_ns, end), reductions=tuple(found))


def _tasks(
    schedule: Schedule,
    costs: Sequence[StageCost],
    merged_ns: Callable[[Step], int] | None,
    remade: Collection[tuple[int, int]],
) -> tuple[Tasks, list[tuple[int, int, Action, int, int]]]:
    """Make a lane for each rank, which runs its row, and a lane for each pair of ranks, which
    carries transfers. Also return the transfers: (task that makes it, place in its step, action,
    sender, receiver)."""
    work_ns: list[int] = []
    after: dict[int, list[int]] = {}
    links: dict[tuple[int, int], list[tuple[int, int, Action]]] = {}
    reader: dict[tuple[int, int, int], int] = {}  # stage, way, microbatch -> step that needs it
    for rank, row in enumerate(schedule.rows):
        for task, step in enumerate(row, len(work_ns)):
            for place, action in enumerate(step):
                if way := _WAYS.get(action.kind):
                    reader[action.stage, way, action.microbatch] = task
                    other = schedule.rank_of.get(action.stage + way, rank)
                    if other != rank:
                        links.setdefault((rank, other), []).append((task, place, action))
            work_ns.append(_takes(step, costs, merged_ns, remade))
    sizes = [*map(len, schedule.rows), *map(len, links.values())]
    sent = [(*made, *link) for link, results in links.items() for made in results]
    for task, (made, _, action, _, _) in enumerate(sent, len(work_ns)):
        way = _WAYS[action.kind]
        after[task] = [made]
        after.setdefault(reader[action.stage + way, way, action.microbatch], []).append(task)
        work_ns.append(costs[action.stage].sent_ns)
    return Tasks(work_ns, list(accumulate(sizes, initial=0)), after), sent


def _takes(
    step: Step,
    costs: Sequence[StageCost],
    merged_ns: Callable[[Step], int] | None,
    remade: Collection[tuple[int, int]],
) -> int:
    if len(step) > 1 and merged_ns is not None:
        return merged_ns(step)
    return sum(costs[a.stage].takes(a.kind, (a.stage, a.microbatch) in remade) for a in step)


def _ledger(
    schedule: Schedule,
    rank: int,
    costs: Sequence[StageCost],
    remade: Collection[tuple[int, int]],
    resident: int,
) -> Ledger:
    """What a rank holds. Moment 2i is while its step i runs: the step's results are allocated,
    nothing that it frees is free yet, the results of the step before are still being sent, and the
    inputs of the next steps have room. Moment 2i + 1 is when the step has ended."""
    row = schedule.rows[rank]
    end = 2 * len(row)
    works = [0] * end
    ledger = Ledger(works)
    ledger.add(resident, -1, end)
    read: dict[
        tuple[int, int], int
    ] = {}  # stage, microbatch -> when what its forward saved is last read
    late: dict[tuple[int, int], int] = {}  # the same of what its weight gradients read
    for i, step in enumerate(row):
        for action in step:
            if action.kind in "BI":
                read[action.stage, action.microbatch] = 2 * i
            elif action.kind == "W":
                late[action.stage, action.microbatch] = 2 * i
    travels = [[_travels(schedule, a, costs[a.stage]) for a in step] for step in row]
    asked = [sum(get for get, _ in step) for step in travels]
    sent = [sum(send for _, send in step) for step in travels]
    for i, step in enumerate(row):
        beside = 0  # bytes that the actions allocate beside holdings
        for action in step:
            cost, part = costs[action.stage], (action.stage, action.microbatch)
            beside += cost.allocates(action.kind, part in remade)
            if action.kind in "FR":
                more = cost.saved if action.kind == "F" else cost.remade
                ledger.add(more, 2 * i, read.get(part, end))
                beside -= more
            elif action.kind == "I":
                ledger.add(cost.for_weights, 2 * i + 1, late.get(part, end))
        coming, going = asked[i + 1 : i + AHEAD], sent[max(0, i - 1) : i]
        works[2 * i] = max(0, beside) + sum(coming) + sum(going)
    return ledger


def _travels(schedule: Schedule, action: Action, cost: StageCost) -> tuple[int, int]:
    """Bytes that an action receives from another rank, and bytes that it sends to one."""
    before, behind = (
        schedule.rank_of.get(action.stage + way) not in (None, schedule.rank_of[action.stage])
        for way in (-1, 1)
    )
    if action.kind == "F":
        return before * cost.coming, behind * cost.returning
    if action.kind in "BI":
        return behind * cost.returning, before * cost.coming
    return 0, 0


def describe(timeline: PipelineTimeline) -> str:
    """Draw the picture, and write each rank's time and memory below it."""
    lines = [timeline.picture(), f"step {timeline.step_ns / 1e6:.3f} ms"]
    for rank, row in enumerate(timeline.ran):
        share = timeline.bubble_ns(rank) / max(1, timeline.step_ns)
        lines.append(
            f"rank {rank}: {len(row)} steps, first {format_step(row[0].step) if row else '-'}, "
            f"bubble {share:.1%}, peak {timeline.peak_bytes[rank]:,} bytes"
        )
    return "\n".join(lines)
