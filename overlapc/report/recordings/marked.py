"""`of_last_step` finds the ranges of a recording that say their direction; `Twins` finds the
backward of ranges that mark a forward alone."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from overlapc.report.recordings.kineto import Event, Recording

_WORDS = {
    "F": ("forward", "fwd", "f"),
    "W": ("weight", "weights", "wgrad", "w"),
    "I": ("backward", "bwd", "b"),
}
_NODE = "autograd::engine::evaluate_function"


@dataclass(frozen=True)
class Range:
    """A marked piece of the host's time, in microseconds."""

    event: Event
    letter: str  # F, I or W
    stem: str  # the name without its direction


def of_last_step(recording: Recording) -> list[Range]:
    """The ranges with a direction: all, or those of the last marked step that has as many
    directions."""
    found = [each for event in recording.marked if (each := direction(event)) is not None]
    letters = {each.letter for each in found} & {"F", "I"}
    for step in sorted(recording.steps, key=lambda event: -event.start):
        inside = [each for each in found if step.start <= each.event.start <= step.end]
        if letters <= {each.letter for each in inside}:
            return inside
    return found


def direction(event: Event) -> Range | None:
    """The range of an event whose name says a direction, else None."""
    words = re.findall(r"[a-z0-9]+", event.name.lower())
    found = {
        letter
        for letter, known in _WORDS.items()
        for place, word in enumerate(words)
        if word in known and (len(word) > 1 or place == len(words) - 1)
    }
    if "W" in found:
        found.discard("I")  # "backward weight"
    if len(found) != 1:
        return None
    (letter,) = found
    known = {word for each in _WORDS.values() for word in each}
    stem = "_".join(word for word in words if word not in known)
    return Range(event, letter, stem)


class Twins:
    """For each range of a forward a range of its backward. An op that makes a node of autograd has
    its sequence number, and so has that node when it runs: of several ops with one number the last
    has made it. A node without a number adds a gradient up, right behind the one that made it."""

    def __init__(self, recording: Recording, ranges: Sequence[Range]) -> None:
        forward = [each for each in ranges if each.letter == "F"]
        twins = [Range(each.event, "I", each.stem) for each in forward]
        makers: dict[int, Event] = {}
        nodes: dict[str, list[Event]] = {}
        for event in sorted(recording.called, key=lambda event: event.start):
            if event.name.startswith(_NODE):
                nodes.setdefault(event.lane, []).append(event)
            elif event.sequence >= 0 and not event.is_backward:
                makers[event.sequence] = event
        self.nodes = nodes
        self.starts = {lane: [node.start for node in each] for lane, each in nodes.items()}
        self.twin: dict[Event, Range | None] = {}
        for each in nodes.values():
            last: Range | None = None
            for node in each:
                maker = makers.get(node.sequence)
                if maker is not None:
                    around = [
                        (range_.event.took, place)
                        for place, range_ in enumerate(forward)
                        if range_.event.start <= maker.start <= range_.event.end
                    ]
                    last = twins[min(around)[1]] if around else None
                self.twin[node] = last

    def of(self, launch: Event) -> Range | None:
        """The backward range of what was launched then, if a node of autograd launched it."""
        place = bisect_right(self.starts.get(launch.lane, []), launch.start) - 1
        if place < 0:
            return None
        node = self.nodes[launch.lane][place]
        return self.twin[node] if launch.start <= node.end else None
