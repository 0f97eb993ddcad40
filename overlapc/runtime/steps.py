"""A running step of several microbatches: which forward runs with which backward.

In pairs the first two forwards are one graph, so the first needs the inputs of the second before it
has run. Both calls are begun and stopped where the graph would run (`gathers`), the graph runs, and
then both calls are made in full, which take their results from it. A graph is paired only if a call
does not depend on the one before it (`guarding.hands_on`, `draws.may_pair`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from overlapc.core.errors import OptionError
from overlapc.passes.capture.joint import Owner, Stop
from overlapc.runtime.call import Given
from overlapc.runtime.program import Flight, Program, State, begin_pair, end_pair


@dataclass
class RunningStep:
    """A running step: `pending` are microbatches whose backwards have not run, the oldest first."""

    each: Sequence[Given]
    runs: bool = True
    gathers: bool = False  # may the first two forwards be a pair?
    before_last: Callable[[], None] = lambda: None  # is called before the last backward
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
        return [one for (one,) in flight.results()]

    def begin_pair(self) -> None:
        """Run the two forwards that were gathered, if they may be one graph."""
        early, self._early, self.gathers = self._early, [], False
        programs, states = zip(*early, strict=True)
        if len(early) == 2:
            read = [dict(state) for state in states]
            flights = begin_pair(programs, states)
            self._begun = list(zip(flights, read[: len(flights)], strict=True))

    def finish_alone(self) -> None:
        """Run the pending backward now, if no graph has it together with another."""
        if any(not (f.program.pairs or f.program.merged) for f in self.pending):
            self.finish()

    def finish(self) -> None:
        """Run all backwards that are left."""
        left, self.pending, self._early, self.gathers = self.pending, [], [], False
        if len(left) == 2 and end_pair(left):
            return
        for flight in left:
            if flight is left[-1]:
                self.before_last()
            _end(flight)

    def _taken(self, program: Program, state: State) -> Flight | None:
        """The forward of this call, if it has run as one of a pair."""
        if not self._begun:
            return None
        flight, read = self._begun.pop(0)
        if flight.program is program and all(_same(read[name], state[name]) for name in read):
            return flight
        raise OptionError(
            f"pairs: microbatch {1 - len(self._begun)} reads other values than when its call was "
            'begun; expected calls that do not depend on each other, or schedule="merged"'
        )

    def _begin(self, program: Program, state: State) -> Flight:
        lag = max(1, program.report.lag)
        while len(self.pending) > lag:
            _end(self.pending.pop(0))
        before = self.pending.pop(0) if len(self.pending) == lag else None
        flight = program.begin([state], before)
        if before is not None:
            before.end()
        return flight


def _end(flight: Flight) -> None:
    flight.run("B")
    flight.end()


def _same(one: Any, other: Any) -> bool:
    """Are two inputs of a graph the same? Tensors are if they are the same memory, or one number
    that is equal (NaN is)."""
    if isinstance(one, Owner) and isinstance(other, Owner):
        return one.tensor is other.tensor
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return type(one) is type(other) and (bool(one == other) or (one != one and other != other))
    if one is other:
        return True
    if one.layout != torch.strided or other.layout != torch.strided or one.dtype != other.dtype:
        return False
    if one.numel() == 1 and other.numel() == 1 and one.device == other.device:
        return torch.allclose(one.reshape(()), other.reshape(()), 0, 0, equal_nan=True)
    place = (one.data_ptr(), one.shape, one.stride())
    return place == (other.data_ptr(), other.shape, other.stride())
