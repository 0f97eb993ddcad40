"""`Options` holds the user's options of planning, the same at every front door."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from math import ceil
from typing import Any

from overlapc.core.errors import Infeasible, OptionError
from overlapc.core.files import StrPath, load_plan
from overlapc.core.ir import Plan
from overlapc.core.schedule import Schedule, check_schedule
from overlapc.core.text import format_plan, parse_plan
from overlapc.solvers import SOLVERS
from overlapc.solvers.pipeline.schedules import make_schedule

Budget = int | float | str | None
_GIVEN = re.compile(r'(\w+)=((?:"(?:[^"\\]|\\.)*"|[^\s"])*)(?:\s+|$)')
UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_PLANS = "expected a Plan or the path of a saved one"
_ITSELF = "runs the ops of its graphs itself"
_ONE_SHAPE = "plans each shape for itself"
_VERIFIED = "does not compare steps, overlapc.optimize does"
_UNCUT = "cuts no batch; optimize, TrainStep and Pipeline do"
_WITH_SLICES = "with slices optimize"  # a front door of its own
_RUNS = {"backend": _ITSELF, "dynamic": _ONE_SHAPE, "verify": _VERIFIED}
# Front door -> the options that it refuses, and the reason it gives.
REFUSED: dict[str, dict[str, str]] = {
    "optimize": {},
    "torch.compile": {
        "dynamic": "takes it as an argument of its own, not among the options",
        "verify": _VERIFIED,
        "slices": _UNCUT,
    },
    _WITH_SLICES: _RUNS | {"verify": "compares slices with the uncut batch in any case"},
    "TrainStep": _RUNS,
    "Pipeline": _RUNS,
    "megatron": _RUNS,
    "megatron.TrainStep": _RUNS,
    "torchtitan": {
        "backend": "runs a step by torchtitan's own compile passes",
        "dynamic": "plans the one shape that torchtitan traces",
        "verify": _VERIFIED,
        "slices": _UNCUT,
    },
}
# Keywords of a front door that are no options.
_OF_ITS_OWN = {
    "TrainStep": ("schedule", "results", "reduce"),
    "Pipeline": ("place", "tied", "data_parallel"),
    "megatron": ("merge", "fill", "schedule", "search"),
    "megatron.TrainStep": ("schedule",),
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of `optimize`, `TrainStep`, `Pipeline` and `torch.compile(..., backend="overlapc")`.

    memory_budget   the most that one step may allocate: bytes (int), text with a unit
                    ("8GB"), a fraction of eager's activation memory with all saved (float;
                    gradients and results come on top), or None for eager's own peak, with the
                    model's own checkpoints if it has any
    solver          "overlap"; "heu", the quickest; "opt", the best that a minute finds, with a
                    proven bound; or a baseline, docs/using.md lists them
    backend         "eager" runs the graph's ops in the plan's order; "inductor" compiles them
    profile         "measure" times the ops and links on this machine; "estimate" uses `hardware`
    hardware        a preset's name, or a file of `overlapc profile`
    plan            a Plan, or the path of a saved one, instead of solving; refused for other
                    graphs. Of several microbatches that of one, and behind it, in a list, that
                    of two merged: without it they run one after the other
    timeout_s       how long ranks wait for one that lives and is late; None: as long as their
                    process group does (`init_process_group(timeout=...)`)
    cache           a file in which measured costs are kept and found again, with plans in a folder
                    beside it; True for the one in ~/.cache/overlapc (or the folder OVERLAPC_CACHE
                    names)
    dynamic         as in torch.compile
    verify          at the first call, compare a step by eager and one by the plan bit by bit:
                    `explain()` says what was found, and what differs is warned of
    slices          how many pieces a batch is cut into, along dimension 0 (Megatron's: along its
                    samples), that hide each other's communication; "auto": 1, 2 or 4, as is
                    predicted to be fastest

    Options print as `memory_budget=8GB solver=heu`, without those at their defaults, and
    `Options.parse` reads that text.
    """

    memory_budget: Budget = None
    solver: str = "overlap"
    backend: str = "eager"
    profile: str = "measure"
    hardware: StrPath = "cpu-gloo"
    plan: Plan | StrPath | Sequence[Plan | StrPath] | None = field(default=None, compare=False)
    timeout_s: float | None = None
    cache: bool | StrPath | None = None
    dynamic: bool | None = None
    verify: bool = False
    slices: Any = 1  # a number, or "auto"
    plans: tuple[Plan, ...] = field(init=False, repr=False)  # `plan`, read
    # Costs and plans so far: a graph that comes again is not measured or planned again.
    known: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        parse_budget(self.memory_budget, 1, 1)
        self._expect("solver", SOLVERS)
        self._expect("backend", ("eager", "inductor"))
        self._expect("profile", ("measure", "estimate"))
        if not isinstance(self.hardware, (str, os.PathLike)):
            raise OptionError(f"hardware={self.hardware!r}: expected a preset or a file's path")
        seconds = self.timeout_s
        number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
        if seconds is not None and not (number and seconds > 0):
            raise OptionError(f"timeout_s={seconds!r}: expected more than 0 seconds, or None")
        if not isinstance(self.cache, (bool, str, os.PathLike, type(None))):
            raise OptionError(f"cache={self.cache!r}: expected True, False, None or a file's path")
        if not isinstance(self.dynamic, (bool, type(None))):
            raise OptionError(f"dynamic={self.dynamic!r}: expected True, False or None")
        if not isinstance(self.verify, bool):
            raise OptionError(f"verify={self.verify!r}: expected True or False")
        number = isinstance(self.slices, int) and not isinstance(self.slices, bool)
        if self.slices != "auto" and not (number and int(self.slices) >= 1):
            raise OptionError(
                f'slices={self.slices!r}: expected a number of slices, 1 or more, or "auto"'
            )
        object.__setattr__(self, "plans", _plans(self.plan))

    def _expect(self, name: str, known: Collection[str]) -> None:
        if getattr(self, name) not in known:
            raise OptionError(f"{name}={getattr(self, name)!r}: expected one of {', '.join(known)}")

    @classmethod
    def parse(cls, given: Mapping[str, Any] | str, door: str = "optimize") -> Options:
        """Read the options of a front door, from keywords or from text."""
        given = dict(_read(given)) if isinstance(given, str) else given
        for name in given:
            if name not in DEFAULTS:
                known = [each for each in DEFAULTS if each not in REFUSED[door]]
                known += _OF_ITS_OWN.get(door, ())
                owners = [other for other, own in _OF_ITS_OWN.items() if name in own]
                whose = f" ({name} is of {' and '.join(owners)})" if owners else ""
                raise OptionError(f"option {name!r}: expected one of {', '.join(known)}{whose}")
        options = cls(**given)
        sliced = door == "optimize" and options.slices != 1
        who = _WITH_SLICES if sliced else door
        for name, instead in REFUSED[who].items():
            if getattr(options, name) != DEFAULTS[name]:
                raise OptionError(
                    f"{name}={given[name]!r}: {who} {instead}; expected it left out here"
                )
        if door in ("optimize", "torch.compile", "torchtitan") and len(options.plans) > 1:
            raise OptionError(f"plan={given['plan']!r}: {door} merges nothing; {_PLANS}")
        return options

    def __str__(self) -> str:
        return self.text(DEFAULTS)

    def text(self, names: Collection[str]) -> str:
        """Write the options that differ from their defaults, as `name=value`."""
        given = [(name, getattr(self, name)) for name in names if name != "plan"]
        given.append(("plan", [format_plan(plan) for plan in self.plans] or None))
        return " ".join(f"{n}={_word(value)}" for n, value in given if value != DEFAULTS[n])


DEFAULTS: dict[str, Any] = {one.name: one.default for one in fields(Options)[:-2]}
ALIKE = tuple(  # options that must be equal on all ranks; paths and waiting times may differ
    name for name in DEFAULTS if name not in ("hardware", "timeout_s", "cache")
)


def _plans(given: Any) -> tuple[Plan, ...]:
    """The plans, given as Plans, as their text, or as paths of files."""
    several = given if isinstance(given, (list, tuple)) else [] if given is None else [given]
    if given is not None and not several:
        raise OptionError(f"plan={given!r}: found no plan, {_PLANS}; None plans anew")
    found = []
    for each in several:
        if isinstance(each, str) and "\n" in each:
            found.append(parse_plan(each))
        elif isinstance(each, (str, os.PathLike)):
            found.append(load_plan(each))
        elif isinstance(each, Plan):
            found.append(each)
        else:
            raise OptionError(f"plan={each!r}: {_PLANS}")
    if len(found) > 3:
        raise OptionError(
            f"plan: found {len(found)}, expected one, one of two merged, and one of a pair"
        )
    return tuple(found)


def value_of(text: str) -> Any:
    """Read a word as a value of JSON if it is one, else as itself."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _word(value: Any) -> str:
    """Write a value so that `value_of` reads it."""
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    bare = isinstance(value, str) and not re.search(r'\s|"', value) and value_of(value) == value
    return str(value) if bare else json.dumps(value, separators=(",", ":"))


def _read(text: str) -> Iterator[tuple[str, Any]]:
    """Parse `name=value name=value`; values with spaces are quoted."""
    place, text, seen = 0, text.strip(), set[str]()
    while place < len(text):
        found = _GIVEN.match(text, place)
        if found is None:
            raise OptionError(f"options {text[place:]!r}: expected name=value, spaces between")
        if found[1] in seen:
            raise OptionError(f"options {text!r}: found {found[1]} twice, expected it once")
        seen.add(found[1])
        yield found[1], value_of(found[2])
        place = found.end()


def schedule_of(schedule: Schedule | str, ranks: int, microbatches: int) -> Schedule:
    """Return a Schedule unchanged, or make the schedule of that name."""
    if isinstance(schedule, str):
        schedule = make_schedule(schedule, ranks, microbatches)
    check_schedule(schedule)
    return schedule


def parse_budget(budget: int | float | str | None, eager_bytes: int, lasting_bytes: int) -> int:
    """Turn a budget for one step's peak into bytes.

    None gives eager's peak. A float is a fraction of eager's activation memory: of its peak less
    `lasting_bytes`, the gradients and results that no plan can avoid. Text has a unit.
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
            parsed = int(amount * UNITS[unit])
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


def as_given(error: Infeasible, budget: Budget, lasting_bytes: int) -> Infeasible:
    """The error in the terms of the budget: a fraction is answered by a fraction. Both are of what
    `parse_budget` takes them of."""
    least, given = error.smallest_bytes - lasting_bytes, error.budget_bytes - lasting_bytes
    if not isinstance(budget, float) or given <= 0:
        return error
    fraction = ceil(1000 * budget * least / given) / 1000
    return Infeasible(error.budget_bytes, error.smallest_bytes, error.where, (budget, fraction))
