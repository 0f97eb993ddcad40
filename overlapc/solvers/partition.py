"""Layers to the stages of a pipeline, so that the slowest stage is as fast as can be.

What a stage takes is what its *own best plan* takes, under its own memory and with as many
microbatches in flight as its place asks for: early stages hold more, so they recompute more, so
they should have fewer layers. Who asks gives that as a function; it is called once for each
segment that could still be part of a better partition.

    best_partition   exact, by dynamic programming over borders
    moved            layers moved one at a time from the slowest stage to a neighbour: an upper
                     bound to begin with, and all there is where segments are too many
    even             as many layers for each stage, as they come
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from operator import add

from overlapc.errors import OptionError

# (stage, first layer, the layer behind its last) -> ns, or None if no plan fits
StageTime = Callable[[int, int, int], "int | None"]
_EXACT = 100_000  # segments up to which all may be asked for


@dataclass(frozen=True)
class Partition:
    """Stage n has the layers from borders[n] to before borders[n + 1]. A stage for which no plan
    fits has None for its time."""

    borders: tuple[int, ...]
    stage_ns: tuple[int | None, ...]
    optimal: bool = False

    @cached_property
    def key(self) -> tuple[int, int, int]:
        """How bad it is: stages that do not fit, the slowest stage, all of them."""
        times = [ns for ns in self.stage_ns if ns is not None]
        return len(self.stage_ns) - len(times), max(times, default=0), sum(times)

    @property
    def slowest_ns(self) -> int | None:
        """None if a stage does not fit."""
        return None if self.key[0] else self.key[1]

    @property
    def layers(self) -> tuple[int, ...]:
        """How many each stage has."""
        return tuple(b - a for a, b in pairwise(self.borders))

    def layout(self) -> str:
        return layout(self.layers)


def layout(counts: Sequence[int]) -> str:
    """Layers of each stage as Megatron's `--pipeline-model-parallel-layout` takes them: E
    embedding, t transformer layer, L loss, a bar between stages."""
    return "E" + "|".join(f"t*{count}" if count else "" for count in counts) + "L"


def even(layers: int, stages: int, time: StageTime) -> Partition:
    """What is left over goes to the stages in the middle, away from embedding and head."""
    _check(layers, stages)
    more = layers % stages
    first = (stages - more) // 2
    counts = [layers // stages + (first <= s < first + more) for s in range(stages)]
    return _timed(_borders(counts), time)


def moved(layers: int, stages: int, time: StageTime) -> Partition:
    """From the even split on, a layer at a time from the slowest stage towards another, for as
    long as that helps."""
    best = even(layers, stages, time)
    while True:
        counts = list(best.layers)
        worst = max(range(stages), key=lambda s: (best.stage_ns[s] is None, best.stage_ns[s] or 0))
        tries = []
        for other in range(stages):
            if other != worst and counts[worst] > 1:
                changed = list(counts)
                changed[worst] -= 1
                changed[other] += 1
                tries.append(_timed(_borders(changed), time))
        found = min(tries, key=lambda p: p.key, default=best)
        if found.key >= best.key:
            return best
        best = found


def best_partition(layers: int, stages: int, time: StageTime) -> Partition:
    """The partition whose slowest stage is fastest; of equals, the least time in all.

    Every stage has at least one layer. With too many segments it is that of `moved`, not proven.
    """
    _check(layers, stages)
    known: dict[tuple[int, int, int], int | None] = {}

    def ask(stage: int, first: int, behind: int) -> int | None:
        key = stage, first, behind
        if key not in known:
            known[key] = time(stage, first, behind)
        return known[key]

    start = moved(layers, stages, ask)
    room = layers - stages + 1  # most layers of one stage
    if stages * room * (room + 1) // 2 > _EXACT:
        return start
    quickest = _cheapest(layers, stages, ask, start.slowest_ns, max)
    if quickest is None:
        return start  # nothing fits: what fits best
    slowest, _ = quickest
    least = _cheapest(layers, stages, ask, slowest, add)
    assert least is not None
    return replace(_timed(least[1], ask), optimal=True)


def _cheapest(
    layers: int,
    stages: int,
    ask: StageTime,
    limit: int | None,
    join: Callable[[int, int], int],
) -> tuple[int, tuple[int, ...]] | None:
    """The least joined time of all stages, none above the limit, and its borders."""
    # the layer behind -> the best way to give the layers before it to the stages so far
    reached: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, (0,))}
    for stage in range(stages):
        left = stages - stage - 1
        further: dict[int, tuple[int, tuple[int, ...]]] = {}
        for first, (before, borders) in reached.items():
            for behind in range(first + 1, layers - left + 1) if left else [layers]:
                took = ask(stage, first, behind)
                if took is None or (limit is not None and took > limit):
                    continue
                found = join(before, took), (*borders, behind)
                if behind not in further or found < further[behind]:
                    further[behind] = found
        reached = further
    return reached.get(layers)


def _timed(borders: tuple[int, ...], time: StageTime) -> Partition:
    return Partition(borders, tuple(time(s, *pair) for s, pair in enumerate(_pairs(borders))))


def _pairs(borders: tuple[int, ...]) -> list[tuple[int, int]]:
    return list(pairwise(borders))


def _borders(counts: list[int]) -> tuple[int, ...]:
    borders = [0]
    for count in counts:
        borders.append(borders[-1] + count)
    return tuple(borders)


def _check(layers: int, stages: int) -> None:
    if not 1 <= stages <= layers:
        raise OptionError(
            f"{layers} layers on {stages} stages: expected at least one stage, and a layer for each"
        )
