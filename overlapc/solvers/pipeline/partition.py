"""`best_partition` gives layers to the stages of a pipeline so that the slowest stage is as fast as
possible.

The time of a stage is that of its *own best plan*, in its own memory and with the microbatches in
flight of its place: early stages hold more microbatches, so they recompute more and should have
fewer layers. The caller gives this time as a function, and cheaper lower bounds on it.

    best_partition   exact, by dynamic programming over borders, repeated after each new time until
                     all times of the best partition are known
    moved            moves layers one at a time from the slowest stage to another: the fallback for
                     too many segments, or if nothing fits
    even             equally many layers for each stage
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from overlapc.core.errors import OptionError
from overlapc.solvers.constants import EXACT

# (stage, first layer, the layer behind its last) -> ns, or None if no plan fits
StageTime = Callable[[int, int, int], "int | None"]
Run = Callable[..., Iterable["int | None"]]  # like `map`, which computes one after the other
_Segment = tuple[int, ...]
_Weight = tuple[int, int]
TOGETHER = 2  # segments computed at a time


@dataclass(frozen=True)
class Partition:
    """A partition: stage n has the layers from borders[n] to before borders[n + 1]. A stage for
    which no plan fits has the time None."""

    borders: tuple[int, ...]
    stage_ns: tuple[int | None, ...]
    optimal: bool = False

    @cached_property
    def key(self) -> tuple[int, int, int]:
        """Sort key: stages that do not fit, then the slowest stage, then the sum of all."""
        times = [ns for ns in self.stage_ns if ns is not None]
        return len(self.stage_ns) - len(times), max(times, default=0), sum(times)

    @property
    def slowest_ns(self) -> int | None:
        """The time of the slowest stage; None if a stage does not fit."""
        return None if self.key[0] else self.key[1]

    @property
    def layers(self) -> tuple[int, ...]:
        """The number of layers of each stage."""
        return tuple(b - a for a, b in pairwise(self.borders))

    @property
    def segments(self) -> list[_Segment]:
        return [(stage, *pair) for stage, pair in enumerate(pairwise(self.borders))]

    def layout(self) -> str:
        return layout(self.layers)


def layout(counts: Sequence[int]) -> str:
    """Layers of each stage as Megatron's `--pipeline-model-parallel-layout` takes them: E
    embedding, t transformer layer, L loss, a bar between stages."""
    return "E" + "|".join(f"t*{count}" if count else "" for count in counts) + "L"


def even(layers: int, stages: int, time: StageTime, run: Run = map) -> Partition:
    """The even split. Leftover layers go to the stages in the middle, away from embedding and
    head."""
    _check(layers, stages)
    more = layers % stages
    first = (stages - more) // 2
    counts = [layers // stages + (first <= s < first + more) for s in range(stages)]
    return _timed(_borders(counts), time, run)


def moved(layers: int, stages: int, time: StageTime) -> Partition:
    """Start from the even split and move one layer at a time from the slowest stage towards
    another, as long as that helps."""
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


def best_partition(
    layers: int, stages: int, time: StageTime, *bounds: StageTime, run: Run = map
) -> Partition:
    """The partition whose slowest stage is fastest; among equals, the one with the least sum.

    Every stage has at least one layer. With too many segments the result is that of `moved`, which
    is not proven. `bounds` are lower bounds on `time`, from the cheapest to the closest, and None
    only where `time` is None. A segment's time is computed only while a partition with that segment
    could be the best; ties count only among partitions whose times are all known.
    """
    _check(layers, stages)
    room = layers - stages + 1  # most layers of one stage
    if stages * room * (room + 1) // 2 > EXACT:
        return moved(layers, stages, time)
    ways = (*bounds, time)
    # how many of bounds and time were computed, and the last result
    known: dict[_Segment, tuple[int, int | None]] = {}

    def ask(*segment: int) -> int | None:
        if segment not in known:
            known[segment] = 1, ways[0](*segment)
        return known[segment][1]

    def slowest(*segment: int) -> _Weight | None:
        took = ask(*segment)
        return None if took is None else (took, 0)

    def in_all(*segment: int) -> _Weight | None:
        took = ask(*segment)
        if took is None or took > limit:
            return None
        # Fewest segments known by bounds alone, then time.
        return int(known[segment][0] < len(ways)), took

    while True:
        quickest = _lightest(layers, stages, slowest, lambda a, b: max(a, b))
        if quickest is None:
            return moved(layers, stages, time)  # nothing fits: the nearest to it
        (limit, _), _ = quickest
        found = _lightest(layers, stages, in_all, lambda a, b: (a[0] + b[0], a[1] + b[1]))
        assert found is not None
        best = _timed(found[1], ask)
        guesses = [s for s in best.segments if known[s][0] < len(ways)]
        if not guesses:
            return replace(best, optimal=True)
        longest = sorted(guesses, key=lambda s: -(known[s][1] or 0))[:TOGETHER]
        answers = run(lambda s: ways[known[s][0]](*s), longest)
        for segment, answer in zip(longest, list(answers), strict=True):
            known[segment] = known[segment][0] + 1, answer


def _lightest(
    layers: int,
    stages: int,
    weigh: Callable[..., _Weight | None],
    join: Callable[[_Weight, _Weight], _Weight],
) -> tuple[_Weight, tuple[int, ...]] | None:
    """The borders with the least weight of all stages together, where `join` combines weights."""
    # layer -> the best split of the layers before it over the stages so far
    reached: dict[int, tuple[_Weight, tuple[int, ...]]] = {0: ((0, 0), (0,))}
    for stage in range(stages):
        left = stages - stage - 1
        further: dict[int, tuple[_Weight, tuple[int, ...]]] = {}
        for first, (before, borders) in reached.items():
            for behind in range(first + 1, layers - left + 1) if left else [layers]:
                weight = weigh(stage, first, behind)
                if weight is None:
                    continue
                found = join(before, weight), (*borders, behind)
                if behind not in further or found < further[behind]:
                    further[behind] = found
        reached = further
    return reached.get(layers)


def _timed(borders: tuple[int, ...], time: StageTime, run: Run = map) -> Partition:
    segments = ((stage, *pair) for stage, pair in enumerate(pairwise(borders)))
    return Partition(borders, tuple(run(lambda segment: time(*segment), segments)))


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
