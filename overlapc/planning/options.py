"""What a user asks of planning: `Options`, a memory budget, a solver, a schedule."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from overlapc.errors import OptionError
from overlapc.files import StrPath
from overlapc.ir import Plan
from overlapc.schedule import Schedule, check_schedule
from overlapc.solvers import SOLVERS
from overlapc.solvers.schedules import make_schedule

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


@dataclass(frozen=True)
class Options:
    """What `optimize` was asked for. See its docstring for the meaning of each."""

    memory_budget: int | float | str | None = None
    solver: str = "overlap"
    backend: str = "eager"
    profile: str = "measure"
    hardware: str = "cpu-gloo"
    plan: Plan | None = None
    timeout_s: float = 7.0
    cache: bool | StrPath | None = None
    # What was measured and planned, so that the same graph met again is not paid for again.
    known: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        if isinstance(self.timeout_s, bool) or not isinstance(self.timeout_s, (int, float)):
            raise OptionError(f"timeout_s={self.timeout_s!r}: expected a number of seconds")
        if not self.timeout_s > 0:
            raise OptionError(f"timeout_s={self.timeout_s!r}: expected more than 0 seconds")
        if not isinstance(self.hardware, (str, os.PathLike)):
            raise OptionError(f"hardware={self.hardware!r}: expected a preset or a file's path")
        if not isinstance(self.cache, (bool, str, os.PathLike, type(None))):
            raise OptionError(f"cache={self.cache!r}: expected True, False, None or a file's path")


def check_solver(name: str) -> None:
    if name not in SOLVERS:
        raise OptionError(f"solver={name!r}: expected one of {', '.join(SOLVERS)}")


def schedule_of(schedule: Schedule | str, ranks: int, microbatches: int) -> Schedule:
    """A schedule, or the one of that name."""
    if isinstance(schedule, str):
        schedule = make_schedule(schedule, ranks, microbatches)
    check_schedule(schedule)
    return schedule


def parse_budget(budget: int | float | str | None, eager_bytes: int, lasting_bytes: int) -> int:
    """A budget in bytes for one step's peak.

    None keeps eager's peak. A float is a fraction of eager's activation memory: of what its peak
    holds beyond `lasting_bytes`, the gradients and results that no plan can avoid. Text has a
    unit.
    """
    if budget is None:
        return eager_bytes
    if isinstance(budget, bool) or not isinstance(budget, (int, float, str)):
        raise OptionError(
            f"memory_budget={budget!r}: expected bytes (an int), a fraction of eager's "
            'activation memory (a float), text like "8GB", or None'
        )
    if isinstance(budget, str):
        number = budget.strip().upper()
        unit = number.lstrip("0123456789._ ").strip()
        try:
            amount = float(number[: len(number) - len(unit)].strip() or "x")
            parsed = int(amount * _UNITS[unit])
        except (ValueError, KeyError, OverflowError):
            raise OptionError(
                f'memory_budget={budget!r}: expected a number and a unit, as "8GB" or "512MiB"'
            ) from None
    elif isinstance(budget, float):
        if not 0 < budget <= 1e6:
            raise OptionError(
                f"memory_budget={budget!r}: a float is a fraction of eager's activation memory "
                "and must be positive; bytes are given as an int"
            )
        parsed = lasting_bytes + int(budget * (eager_bytes - lasting_bytes))
    else:
        parsed = budget
    if parsed <= 0:
        raise OptionError(f"memory_budget={budget!r}: expected more than 0 bytes")
    return parsed
