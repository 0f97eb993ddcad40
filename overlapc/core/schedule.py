"""A schedule gives each rank of a pipeline a row of actions; `check_schedule` raises unless rows
are legal.

Grammar (PyTorch's letters, and R):

    schedule = row*                       the n-th row is what rank n does
    row      = step*
    step     = action | (action;action…)  pieces of several actions merged into one graph
    action   = stage kind microbatch      "1F3"
    kind     = F forward | R recompute | B whole backward | I input gradients | W weight gradients

A stage lives on the rank in whose row it appears. F needs F of the stage before; B and I need the
stage behind, and R if there is one; W needs I. Text and CSV forms round-trip;
`torch.distributed.pipelining` reads the CSV, which has no R.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from overlapc.core.errors import FileError, InvalidSchedule
from overlapc.core.record import Record

KINDS = "FRBIW"
_ACTION = re.compile(rf"(\d+)([{KINDS}])(\d+)")
_VERSION = "overlapc schedule 1"


@dataclass(frozen=True, slots=True, order=True)
class Action:
    """One part of the work of one stage on one microbatch; prints as `2F0`."""

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


Step = tuple[Action, ...]  # actions that run as one graph; most steps have one


@dataclass(frozen=True)
class Schedule(Record):
    """Rows of steps, one row for each rank."""

    name: str
    rows: tuple[tuple[Step, ...], ...]

    @cached_property
    def rank_of(self) -> Mapping[int, int]:
        """Stage -> the rank that holds it."""
        return {
            action.stage: rank
            for rank, row in enumerate(self.rows)
            for step in row
            for action in step
        }

    @cached_property
    def actions(self) -> frozenset[Action]:
        return frozenset(action for row in self.rows for step in row for action in step)

    @property
    def stages(self) -> int:
        return len(self.rank_of)

    @cached_property
    def microbatches(self) -> int:
        return len({action.microbatch for action in self.actions})

    def lag(self, stage: int) -> int:
        """How many microbatches a forward is ahead of the backward that it is merged with; 0 if
        none are merged, or the distances differ."""
        found = {
            forward.microbatch - backward.microbatch
            for step in self.rows[self.rank_of[stage]]
            for forward, backward in pairwise(step)
            if forward.stage == backward.stage == stage
            and (forward.kind, backward.kind) == ("F", "B")
        }
        return found.pop() if len(found) == 1 else 0

    def in_flight(self, stage: int) -> int:
        """How many microbatches a stage holds at its worst moment."""
        return self.held(self.rank_of[stage], {stage: 1})

    def held(self, rank: int, weight: Mapping[int, int]) -> int:
        """The most microbatches in flight that a rank holds at a time, each stage counted by its
        `weight`."""
        held = most = 0
        for step in self.rows[rank]:
            for action in step:
                sign = {"F": 1, "B": -1, "W": -1}.get(action.kind, 0)
                held += sign * weight.get(action.stage, 0)
                most = max(most, held)
        return most

    def needs(self, action: Action) -> Iterator[Action]:
        """Return the actions that must be done before an action, on any rank."""
        stage, kind, microbatch = action.stage, action.kind, action.microbatch
        if kind == "F":
            if stage > 0:
                yield Action(stage - 1, "F", microbatch)
            return
        if kind == "W":
            yield Action(stage, "I", microbatch)
            return
        yield Action(stage, "F", microbatch)
        if kind in "BI":
            if (again := Action(stage, "R", microbatch)) in self.actions:
                yield again
            if stage + 1 < self.stages:
                for letter in "BI":
                    if (behind := Action(stage + 1, letter, microbatch)) in self.actions:
                        yield behind


# --------------------------------------------------------------------------- text


def format_step(step: Step) -> str:
    """Write a step: `1F3`, or `(1F3;1B2)` for several actions."""
    return str(step[0]) if len(step) == 1 else f"({';'.join(map(str, step))})"


def is_pair(step: Step) -> bool:
    """Is a step a forward and a whole backward of one stage, which may run as one graph?"""
    return [a.kind for a in step] == ["F", "B"] and step[0].stage == step[1].stage


def format_schedule(schedule: Schedule) -> str:
    """Write the text form: a line for each rank."""
    lines = [_VERSION, f"name {schedule.name}"]
    for rank, row in enumerate(schedule.rows):
        lines.append(f"rank {rank}: {' '.join(map(format_step, row))}".rstrip())
    return "\n".join(lines) + "\n"


def parse_schedule(text: str) -> Schedule:
    """Parse the text form of a schedule; FileError for anything else."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines or lines[0] != _VERSION:
        found = repr(lines[0]) if lines else "nothing"
        raise FileError(f"schedule: found {found}, expected {_VERSION!r} in the first line")
    if len(lines) < 2 or not lines[1].startswith("name "):
        raise FileError("schedule, line 2: expected `name ...`")
    rows = []
    for rank, line in enumerate(lines[2:]):
        head = f"rank {rank}:"
        if not line.startswith(head):
            raise FileError(f"schedule: found {line[:40]!r}, expected `{head} ...`")
        rows.append(tuple(parse_step(word) for word in line[len(head) :].split()))
    return Schedule(lines[1].removeprefix("name "), tuple(rows))


def parse_step(word: str) -> Step:
    """Parse one word of a row."""
    parts = word[1:-1].split(";") if word.startswith("(") and word.endswith(")") else [word]
    found = []
    for part in parts:
        match = _ACTION.fullmatch(part)
        if match is None:
            raise FileError(
                f"schedule: found {word!r}, expected a stage, one of {', '.join(KINDS)} and a "
                "microbatch, as 1F3, or several as (1F3;1R2)"
            )
        found.append(Action(int(match[1]), match[2], int(match[3])))
    return tuple(found)


def to_csv(schedule: Schedule) -> str:
    """Write compute actions as PyTorch's pipeline runtime loads them. Recompute is left out. A
    forward merged with a whole backward becomes PyTorch's OVERLAP_F_B; other merged actions follow
    each other."""
    lines = []
    for row in schedule.rows:
        words: list[str] = []
        for step in row:
            step = tuple(action for action in step if action.kind != "R")
            if [action.kind for action in step] == ["F", "B"]:
                words.append(f"({step[0]};{step[1]})OVERLAP_F_B")
            else:
                words += map(str, step)
        lines.append(",".join(words))
    return "\n".join(lines) + "\n"


def from_csv(text: str, name: str = "csv") -> Schedule:
    """Read the CSV of PyTorch's pipeline runtime."""
    rows = []
    for line in text.splitlines():
        words = (word.strip().removesuffix("OVERLAP_F_B") for word in line.split(","))
        rows.append(tuple(parse_step(word) for word in words if word))
    return Schedule(name, tuple(rows))


# --------------------------------------------------------------------------- legality


def check_schedule(schedule: Schedule) -> None:
    """Raise InvalidSchedule unless every rank can run its row to the end, whatever the times."""
    _complete(schedule)
    done: set[Action] = set()
    at = [0] * len(schedule.rows)
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(schedule.rows):
            while at[rank] < len(row) and not _missing(schedule, row[at[rank]], done):
                done |= set(row[at[rank]])
                at[rank] += 1
                moved = True
    stuck = {rank: i for rank, i in enumerate(at) if i < len(schedule.rows[rank])}
    if stuck:
        waits = [
            f"rank {rank} at {format_step(schedule.rows[rank][i])} waits for "
            + " and ".join(map(str, _missing(schedule, schedule.rows[rank][i], done)))
            for rank, i in stuck.items()
        ]
        raise InvalidSchedule(
            f"schedule {schedule.name!r} never ends: {'; '.join(waits)}. Every action has to come "
            f"after what it needs:\n{table(schedule, stuck.items())}"
        )


def _missing(schedule: Schedule, step: Step, done: Collection[Action]) -> list[Action]:
    return [need for action in step for need in schedule.needs(action) if need not in done]


def _complete(schedule: Schedule) -> None:
    """Every microbatch passes every stage once, forward and backward, and a stage has one rank."""
    seen: dict[Action, tuple[int, int]] = {}

    def fail(problem: str, places: Collection[tuple[int, int]]) -> None:
        raise InvalidSchedule(
            f"schedule {schedule.name!r}: {problem}\n{table(schedule, places)}".rstrip()
        )

    for rank, row in enumerate(schedule.rows):
        for i, step in enumerate(row):
            for action in step:
                if action in seen:
                    fail(f"{action} is there twice, expected once", [seen[action], (rank, i)])
                if schedule.rank_of[action.stage] != rank:
                    fail(f"stage {action.stage} is on two ranks, expected one", [(rank, i)])
                seen[action] = rank, i
    stages, microbatches = schedule.stages, schedule.microbatches
    for stage in range(stages):
        if stage not in schedule.rank_of:
            fail(f"stage {stage} of {stages} is on no rank", [])
        for microbatch in range(microbatches):
            kinds = "".join(k for k in KINDS if Action(stage, k, microbatch) in seen)
            if kinds.replace("R", "") not in ("FB", "FIW"):
                places = [
                    place
                    for action, place in seen.items()
                    if (action.stage, action.microbatch) == (stage, microbatch)
                ]
                fail(
                    f"microbatch {microbatch} on stage {stage} has {kinds or 'nothing'}, expected "
                    "F and either B or I and W, with at most one R",
                    places,
                )


def table(schedule: Schedule, marked: Collection[tuple[int, int]] = ()) -> str:
    """Write rows below each other; the steps at the `marked` (rank, place) stand between > and
    <."""
    shown: list[list[str]] = []
    for rank, row in enumerate(schedule.rows):
        words = [format_step(step) for step in row]
        shown.append(
            [f">{w}<" if (rank, i) in set(marked) else f" {w} " for i, w in enumerate(words)]
        )
    width = max((len(word) for row in shown for word in row), default=0)
    return "\n".join(
        f"rank {rank}: " + "".join(word.ljust(width) for word in row).rstrip()
        for rank, row in enumerate(shown)
    )


def steps_of(actions: Sequence[Action]) -> tuple[Step, ...]:
    """Make each action a step of its own."""
    return tuple((action,) for action in actions)
