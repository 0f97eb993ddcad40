"""`interval` says within what a measured step will be in four of five runs, by what the figures
behind a prediction are: measured by somebody, or guessed.

A step is divided into what kernels take and what each kind of traffic leaves exposed. Each part is
as uncertain as its source, apart from the others; and all of it as much as steps of the tables that
calibrate still are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from overlapc.profiler.hardware import Hardware, load_hardware
from overlapc.search.evaluate import Found
from overlapc.search.layouts import Cluster

# How far off a part may be, as a part of it: one whose figures were measured, and a guessed one.
_KERNELS = 0.05, 0.15
_LINKS = 0.10, 0.30
# Of every step, whatever its parts: loading of data, clocks, kernels chosen for a shape.
_ANY = 0.05
# How many such widths a measured step is at most above the predicted one in nine of ten runs, and
# below it: calibrated by `korthikanti`, `vtrain-small-calibration` and `layouts-13b`.
_ABOVE, _BELOW = 1.6, 1.1


@dataclass(frozen=True)
class Interval:
    """Of a step, in nanoseconds; and whose figures are guessed."""

    low_ns: int
    high_ns: int
    guessed: tuple[str, ...] = ()


def interval(found: Found, cluster: Cluster) -> Interval:
    machine = load_hardware(cluster.hardware)
    across = cluster.gpus > cluster.gpus_per_node
    known = _kernels_known(machine) and not cluster.fp8  # those of FP8 nobody has measured
    exposed = {kind: ns for kind, ns in found.exposed_ns.items() if ns > 0}
    parts = {"kernels": (found.step_ns - sum(exposed.values()), _KERNELS, known)}
    for kind, ns in exposed.items():
        parts[kind] = ns, _LINKS, _link_known(machine, kind, across)
    width = _ANY**2
    for ns, (measured, guessed), known in parts.values():
        width += ((measured if known else guessed) * ns / max(1, found.step_ns)) ** 2
    width = math.sqrt(width)
    unknown = tuple(name for name, (_, _, known) in parts.items() if not known)
    return Interval(
        round(found.step_ns * (1 - _BELOW * width)),
        round(found.step_ns * (1 + _ABOVE * width)),
        unknown,
    )


def _kernels_known(machine: Hardware) -> bool:
    return machine.kernels is not None and not _guessed(machine, "kernels.tn")


def _link_known(machine: Hardware, kind: str, across: bool) -> bool:
    """Whether the figures of the link, that this traffic takes, were measured."""
    if kind == "tp":
        return bool(machine.intra.measured) or not _guessed(machine, "intra.efficiency.all_gather")
    name = "inter" if across else "intra"
    call = {"p2p": "p2p", "all-to-all": "all_to_all"}.get(kind, "all_reduce")
    keys = f"{name}.busbw.{call}", f"{name}.efficiency.{call}"
    return any(key in machine.sources and not _guessed(machine, key) for key in keys)


def _guessed(machine: Hardware, key: str) -> bool:
    return machine.sources.get(key, "guess").startswith(("guess", "unknown"))
