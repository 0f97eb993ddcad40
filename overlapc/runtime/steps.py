"""A running step of several microbatches: which forward runs with which backward.

In pairs the first two forwards are one graph, so the first needs the inputs of the second before it
has run. Both calls are begun and stopped where the graph would run (`gathers`), the graph runs, and
then both calls are made in full, which take their results from it. If the second call is found to
read what the first one changes, its forward runs again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from overlapc.passes.joint import Owner, Stop
from overlapc.runtime.given import Given
from overlapc.runtime.program import Flight, Program, State


@dataclass
class Step:
    """A running step: `pending` are microbatches whose backwards have not run, the oldest first."""

    each: Sequence[Given]
    runs: bool = True
    gathers: bool = False  # may the first two forwards be a pair?
    missed: bool = False  # did the second microbatch read what the first one changed?
    pending: list[Flight] = field(default_factory=list)
    _early: list[tuple[Program, State]] = field(default_factory=list)
    _begun: list[tuple[Flight, State]] = field(default_factory=list)  # with what they have read

    @property
    def count(self) -> int:
        return len(self.each)

    def forward(self, program: Program, state: State) -> Sequence[Any]:
        """Run what is due when the forward of a microbatch is: that, with the backward of an
        earlier one; and return its results. Stop if a pair waits for the second one."""
        if self.gathers and (self._early or program.pairs):
            self._early.append((program, state))
            raise Stop
        flight = self._taken(program, state)
        if flight is None:
            flight = self._begin(program, state)
        self.pending.append(flight)
        return flight.results()

    def begin_pair(self) -> None:
        """Run the two forwards that were gathered, if they are of one graph."""
        early, self._early, self.gathers = self._early, [], False
        programs, states = zip(*early, strict=True)
        if len(early) == 2 and programs[0] is programs[1]:
            read = [dict(state) for state in states]
            self._begun = list(zip(programs[0].begin_pair(states), read, strict=True))

    def finish_alone(self) -> None:
        """Run the pending backward now, if no graph has it together with another."""
        if any(not (f.program.pairs or f.program.merged) for f in self.pending):
            self.finish()

    def finish(self) -> None:
        """Run all backwards that are left."""
        left, self.pending, self._early, self.gathers = self.pending, [], [], False
        if len(left) == 2 and left[0].program is left[1].program and left[0].program.pairs:
            left[0].program.end_pair(left)
            return
        for flight in left:
            _end(flight)

    def _taken(self, program: Program, state: State) -> Flight | None:
        """The forward of this call, if it has run as one of a pair."""
        if not self._begun:
            return None
        flight, read = self._begun.pop(0)
        if flight.program is program and all(_same(read[name], state[name]) for name in read):
            return flight
        self.missed = True
        return None

    def _begin(self, program: Program, state: State) -> Flight:
        lag = max(1, program.report.lag)
        while len(self.pending) > lag:
            _end(self.pending.pop(0))
        before = self.pending.pop(0) if len(self.pending) == lag else None
        flight = program.begin(state, before)
        if before is not None:
            before.end()
        return flight


def _end(flight: Flight) -> None:
    flight.run("B")
    flight.end()


def _same(one: Any, other: Any) -> bool:
    """Are two inputs of a graph the same? Tensors are if they are the same memory, or one number
    that is equal."""
    if isinstance(one, Owner) and isinstance(other, Owner):
        return one.tensor is other.tensor
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return type(one) is type(other) and bool(one == other)
    if one is other:
        return True
    if one.layout != torch.strided or other.layout != torch.strided or one.dtype != other.dtype:
        return False
    if one.numel() == 1 and other.numel() == 1 and one.device == other.device:
        return torch.equal(one.reshape(()), other.reshape(()))
    place = (one.data_ptr(), one.shape, one.stride())
    return place == (other.data_ptr(), other.shape, other.stride())
