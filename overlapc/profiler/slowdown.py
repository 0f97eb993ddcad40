"""`measure_slowdown` measures how much compute and traffic slow each other at the same time.

A chain of collectives runs with a batch of matmuls beside each. The next is launched before one is
waited for, so the lane never idles: what a late launch or a late rank costs is the simulation's to
say, and no slowdown.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import median_low
from typing import Any

import torch

from overlapc.core.ir import Slowdown
from overlapc.profiler.clock import Clock
from overlapc.profiler.link_model import Collective, Curve
from overlapc.profiler.together import agree, ranks_in

__all__ = ["measure_slowdown"]

# A collective takes so long, if it may have so many bytes, that what is the same for any size, such
# as a thread that wakes up late, hardly counts; host, CUDA. Until it does, it is made larger, each
# time by this factor at most: times of small ones say little of the size that it takes.
_LONG_NS = (20_000_000, 2_000_000)
_MOST_BYTES = (1 << 26, 1 << 28)
_GROWS = 16
_WORST_PERMILLE = 5000
_REPEATS = 3
_WORTH = 20  # times a step's collectives is what measuring may take: a step of few is hardly slowed
_ALIKE = 1.03  # times the smaller: two runs whose slowdowns are so close need no third
_CHAIN = 5  # collectives one after the other
_AHEAD_NS = 10_000_000  # that the host needs to launch a chain, at most, on CUDA
_BATCH = 0.75  # of the collective's time alone, that matmuls take beside it

Start = Callable[[], Any]
Wait = Callable[[Any], Any]


def measure_slowdown(
    totals_ns: Mapping[Curve, int],
    functional: Callable[[Collective, int], tuple[Start, Wait]],
    clock: Clock,
    budget_ns: int,
) -> tuple[Slowdown, str]:
    """Return the slowdown and a text that says how it was measured.

    `totals_ns` says how long all collectives of each curve take. `functional` makes the functions
    that start a collective of a size and wait for it.
    """
    long_ns, most_bytes = _LONG_NS[clock.on_device], _MOST_BYTES[clock.on_device]
    timed = {curve: total for curve, total in totals_ns.items() if curve.points}
    if not timed:
        return Slowdown(), "no collective to measure with"
    curve = _longest(timed, clock.device)
    if curve is None:
        return Slowdown(), "not measured: ranks have their groups in different orders"
    call, alone_ns = _of_size(curve, long_ns)
    start, wait = functional(call, call.bytes)
    while alone_ns < long_ns and call.bytes < most_bytes:
        factor = max(2, min(_GROWS, -(-long_ns // alone_ns)))
        call = replace(call, bytes=min(most_bytes, factor * call.bytes))
        start, wait = functional(call, call.bytes)
        alone_ns = _alone_ns(call.group, clock, start, wait)
    batch = _batch(clock.device)
    # A batch ends before its collective: what is left of the collective shows how much it was
    # slowed. The less is left, the less a late end of it counts for the slowdown.
    count = 10
    for _ in range(3):  # the first run is a warm-up
        clock.ahead()
        pending = start()
        begin = clock.mark()
        batch(count)
        end = clock.mark()
        wait(pending)
        took_ns = max(1, clock.read([begin, end])[1])
        count = max(1, min(10_000, int(count * _BATCH * alone_ns / took_ns)))
    chain = _Chain(call.group, clock, start, wait, lambda: batch(count))
    affordable = min(budget_ns, _WORTH * sum(totals_ns.values())) // (3 * _CHAIN * alone_ns)
    mine = [max(1, min(_REPEATS, affordable))]
    (repeats,) = agree(mine, "min", call.group, clock.device)
    runs = []
    for _ in range(repeats):
        free_ns, _ = chain.run(traffic=False)
        _, alone_ns = chain.run(compute=False)
        runs.append((free_ns, alone_ns, *chain.run()))
        alike = len(runs) > 1 and _alike(*runs[-2:])
        if agree([alike], "min", call.group, clock.device) == [1]:
            break
    free, alone, beside, rest = zip(*runs, strict=True)
    # Waits are longer where other work is on the machine: compare the shortest. Such work lets a
    # whole run of compute take a third longer: a median leaves that run out, a mean does not.
    mine = [median_low(free), min(alone), median_low(beside), min(rest)]
    ranks = ranks_in(call.group)
    means = [n // ranks for n in agree(mine, "sum", call.group, clock.device)]
    how = f"matmuls beside a chain of {call.kind} of {call.bytes} bytes"
    return Slowdown(*_slowdown(*means)), f"measured with {how}, mean of the ranks"


def _longest(totals_ns: Mapping[Curve, int], device: torch.device) -> Curve | None:
    """The curve whose collectives take longest in all, the same on all ranks.

    Ranks of one group know the same figures of it. Those of others are told on, and the curve is
    known by its place: None if ranks have their groups in different places.
    """
    curves, totals = list(totals_ns), list(totals_ns.values())
    groups = list(dict.fromkeys(curve.group for curve in curves))
    alike = 1
    for group in groups:
        place = next(i for i, curve in enumerate(curves) if curve.group == group)
        told = [place, -place, len(curves), -len(curves)]
        alike = min(alike, int(agree(told, "max", group, device) == told))
    for group in groups * len(groups):
        (alike,) = agree([alike], "min", group, device)
    if not alike:
        return None
    for group in groups * len(groups):
        totals = agree(totals, "max", group, device)
    return curves[totals.index(max(totals))]


def _of_size(curve: Curve, long_ns: int) -> tuple[Collective, int]:
    """The smallest measured collective that takes long enough, else the largest; and its time."""
    size, ns = next((point for point in curve.points if point[1] >= long_ns), curve.points[-1])
    return Collective(curve.group, curve.kind, curve.dtype, size), max(1, ns)


def _alone_ns(group: str, clock: Clock, start: Start, wait: Wait) -> int:
    """How long the collective takes by itself, on the rank where it takes longest."""
    took = []
    for _ in range(_REPEATS):
        agree([0], "max", group, clock.device)
        clock.ahead()
        begin = clock.mark()
        wait(start())
        took.append(clock.read([begin, clock.mark()])[1])
    (most,) = agree([median_low(took)], "max", group, clock.device)
    return max(1, most)


class _Chain:
    """Collectives one after the other on all ranks of a group, with work beside each."""

    def __init__(
        self, group: str, clock: Clock, start: Start, wait: Wait, work: Callable[[], None]
    ) -> None:
        self.group, self.clock = group, clock
        self.start, self.wait, self.work = start, wait, work

    def run(self, compute: bool = True, traffic: bool = True) -> tuple[int, int]:
        """Return how long the work took, and all else: the means of the chain."""
        agree([0], "max", self.group, self.clock.device)
        self.clock.ahead(_AHEAD_NS)
        first = self.clock.mark()
        marks, pending = [], [self.start()] if traffic else []
        for left in reversed(range(_CHAIN)):
            if traffic and left:
                pending.append(self.start())
            marks.append(self.clock.mark())
            if compute:
                self.work()
            marks.append(self.clock.mark())
            if traffic:
                self.wait(pending.pop(0))
        begun, *read, ended = self.clock.read([first, *marks, self.clock.mark()])
        worked = sum(read[1::2]) - sum(read[::2])
        return worked // _CHAIN, (ended - begun - worked) // _CHAIN


def _alike(run: Sequence[float], other: Sequence[float]) -> bool:
    """Do two runs say the same, within the noise?"""
    pairs = zip(_slowdown(*run), _slowdown(*other), strict=True)
    return all(max(pair) <= min(pair) * _ALIKE for pair in pairs)


def _slowdown(free_ns: float, alone_ns: float, beside_ns: float, rest_ns: float) -> list[int]:
    """Compute the slowdowns of compute and communication, in thousandths, from four times.

    A batch of compute takes `free_ns` by itself and `beside_ns` beside a collective. The collective
    takes `alone_ns` by itself and ends `rest_ns` after the batch, so beside the batch it did the
    work of alone - rest. If no rest was left, its slowdown is too small to measure.
    """
    compute = 1000 * beside_ns / max(1.0, free_ns)
    comm = 1000.0
    if rest_ns > 0.05 * alone_ns:
        done_ns = alone_ns - rest_ns
        comm = 1000 * beside_ns / done_ns if done_ns > 0 else _WORST_PERMILLE
    return [round(min(_WORST_PERMILLE, max(1000.0, permille))) for permille in (compute, comm)]


def _batch(device: torch.device) -> Callable[[int], None]:
    """Return a function that runs so many units of work that is mostly matmul, as in layers."""
    if device.type == "cpu":
        a = torch.full((512, 512), 1 / 512, dtype=torch.float32, device=device)
    else:  # longer than the host takes to launch one, of numbers that cost the power of real ones
        generator = torch.Generator(device).manual_seed(0)
        a = torch.randn(4096, 4096, dtype=torch.bfloat16, device=device, generator=generator)
    out = torch.empty_like(a)

    def run(count: int) -> None:
        for _ in range(count):
            torch.mm(a, a, out=out)

    return run
