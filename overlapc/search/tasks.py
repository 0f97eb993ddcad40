"""What the processes of a search run: each plans one layout."""

from __future__ import annotations

import math
import pickle
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from overlapc.core.errors import Infeasible, OptionError
from overlapc.search.evaluate import Found, Outcome, evaluate, memory_bound
from overlapc.search.layouts import Cluster, Layout
from overlapc.search.models.transformer import Model
from overlapc.search.units import Unit
from overlapc.search.whole import as_it_runs
from overlapc.tools.told import warn

_met: dict[bytes, Unit] = {}  # the units that this process has unpacked


@dataclass(frozen=True)
class Packed:
    """A unit on its way to processes. Each unpacks it once, and keeps it with all that is found of
    it."""

    data: bytes

    @staticmethod
    def of(unit: Unit) -> Packed:
        return Packed(pickle.dumps(unit, pickle.HIGHEST_PROTOCOL))

    @property
    def unit(self) -> Unit:
        if self.data not in _met:
            _met[self.data] = pickle.loads(self.data)
        return _met[self.data]


def bounded(model: Model, cluster: Cluster, layout: Layout, packed: Packed, placed: bool) -> int:
    return memory_bound(model, cluster, layout, packed.unit, placed)


def evaluated(
    model: Model,
    cluster: Cluster,
    layout: Layout,
    packed: Packed,
    solver: str,
    layers: Sequence[int] | None = None,
    time_limit_s: float = 10.0,
    below_ns: float = math.inf,
) -> Found:
    return evaluate(
        model, cluster, layout, packed.unit, solver, time_limit_s, layers, below_ns=below_ns
    ).found


def tried(
    model: Model,
    cluster: Cluster,
    layout: Layout,
    packed: Packed,
    solver: str,
    layers: Sequence[int] | None = None,
    below_ns: float = math.inf,
) -> tuple[Found, Outcome | None]:
    """Plan a layout in a worker. Its plans are sent back only if its step is below that time, since
    they are large."""
    outcome = evaluate(
        model, cluster, layout, packed.unit, solver, layers=layers, below_ns=below_ns
    )
    return outcome.found, outcome if outcome.found.step_ns < below_ns else None


def as_it_runs_or_none(
    model: Any, cluster: Cluster, found: Found, slices: int = 1
) -> Outcome | None:
    """None for what fits in no memory, or what slices are refused for."""
    try:
        return as_it_runs(model, cluster, found, slices)
    except Infeasible:
        return None
    except OptionError:
        if slices == 1:
            raise
        return None


def warn_of_uncut(
    slices: Sequence[int], layouts: Sequence[Found], planned: Collection[int]
) -> None:
    """Warn of each number of slices in which no layout was planned."""
    sizes = ", ".join(map(str, sorted({found.layout.microbatch for found in layouts})))
    for count in slices:
        if count > 1 and count not in planned:
            warn(
                f"overlapc planned no listed layout in {count} slices: microbatches of {sizes} "
                f"sequences are no multiple of {count}, slices fit in no memory, or they cannot "
                "draw the model's random numbers together"
            )
