"""All errors that overlapc raises on purpose.

    OverlapcError
    ├── CaptureError        the model could not be captured; execution falls back unchanged
    ├── InvalidPlan         a plan breaks a rule of `check`, or is for another trace
    ├── InvalidProblem      a problem or trace contradicts itself
    ├── InvalidSchedule     rows of a pipeline that could never run to their end
    ├── Infeasible          nothing fits the memory budget; carries the smallest that does
    ├── FileError           a file is missing, truncated, corrupt or of another version
    ├── OptionError         an argument or option has a value that is not allowed
    └── RankError           ranks disagree, one is missing, or one died

A message says what was found, what was expected and what to do.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any


class OverlapcError(Exception):
    """Base of all errors of overlapc."""


class CaptureError(OverlapcError):
    """The model contains something that overlapc cannot capture. `place` names the line."""

    def __init__(self, reason: str, place: str = "") -> None:
        super().__init__(f"{reason} (at {place})" if place else reason)
        self.reason = reason
        self.place = place


class InvalidProblem(OverlapcError):
    """A trace, profile or problem contradicts itself."""


class InvalidPlan(OverlapcError):
    """A plan is not legal for the problem it is used with."""


class InvalidSchedule(OverlapcError):
    """A schedule's rows lack an action, have one twice, or wait for each other for ever."""


class Infeasible(OverlapcError):
    """No plan fits the budget; `smallest_bytes` is the least budget that is known to work."""

    def __init__(
        self,
        budget_bytes: int,
        smallest_bytes: int,
        where: str = "",
        fractions: tuple[float, float] | None = None,  # the same two, if the user gave a fraction
    ) -> None:
        given, least = f"{budget_bytes} bytes", f"{smallest_bytes}"
        if fractions is not None:
            given, least = f"{fractions[0]} ({budget_bytes} bytes)", f"{fractions[1]}"
        super().__init__(
            f"{where}{': ' if where else ''}no plan fits memory_budget={given}; the "
            f"smallest budget that works here is {smallest_bytes} bytes: pass "
            f"memory_budget={least} or more, or make the batch smaller"
        )
        self.budget_bytes = budget_bytes
        self.smallest_bytes = smallest_bytes
        self.where = where
        self.fractions = fractions

    def __reduce__(self) -> tuple[Any, ...]:
        return Infeasible, (self.budget_bytes, self.smallest_bytes, self.where, self.fractions)


class FileError(OverlapcError):
    """A file of overlapc's could not be read or written; no file was changed."""


class OptionError(OverlapcError):
    """An option has a value that overlapc does not know."""


class RankError(OverlapcError):
    """The ranks of a run do not agree, or not all of them answered."""


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """The end of a message on an unknown name: `; did you mean 'this'?`, or nothing."""
    found = get_close_matches(given.lower(), list(known), 1)
    return f"; did you mean {found[0]!r}?" if found else ""
