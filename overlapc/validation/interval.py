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
# Within how many such widths four of five steps of the tables that calibrate are, if each kind of
# block is left out in turn (`benchmarks/intervals.py`): of steps in general, and where the host
# takes half of a microbatch's time or more to launch it, so that GPUs wait now and then.
_STEADY, _LAUNCHING = 1.5, 2.2
_HALF = 0.5


@dataclass(frozen=True)
class Interval:
    """Of a step, in nanoseconds; and whose figures are guessed."""

    low_ns: int
    high_ns: int
    guessed: tuple[str, ...] = ()
    launching: bool = False  # does the host need half of the time or more to launch kernels?


def interval(found: Found, cluster: Cluster) -> Interval:
    """A measured step is as many times longer than predicted as another is shorter."""
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
    launching = found.launching >= _HALF
    times = 1 + math.sqrt(width) * (_LAUNCHING if launching else _STEADY)
    unknown = tuple(name for name, (_, _, known) in parts.items() if not known)
    low, high = round(found.step_ns / times), round(found.step_ns * times)
    return Interval(low, high, unknown, launching)


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
