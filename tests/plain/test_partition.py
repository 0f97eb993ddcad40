"""Partitions against all partitions there are."""

from __future__ import annotations

from itertools import combinations, pairwise
from random import Random

import pytest

from overlapc.core.errors import OptionError
from overlapc.solvers.pipeline.partition import Partition, best_partition, even, moved


def random_time(rng: Random, layers: int, stages: int):
    """Layers take what they take, and longer in early stages; some segments do not fit."""
    took = [rng.randint(1, 9) for _ in range(layers)]
    extra = sorted((rng.randint(0, 4) for _ in range(stages)), reverse=True)
    room = [rng.randint(10, 60) for _ in range(stages)] if rng.random() < 0.4 else None

    def time(stage: int, first: int, behind: int) -> int | None:
        if room is not None and sum(took[first:behind]) > room[stage]:
            return None
        return sum(took[first:behind]) + extra[stage] * (behind - first)

    return time


def every(layers: int, stages: int, time) -> list[Partition]:
    found = []
    for inner in combinations(range(1, layers), stages - 1):
        borders = (0, *inner, layers)
        pairs = pairwise(borders)
        found.append(Partition(borders, tuple(time(s, *p) for s, p in enumerate(pairs))))
    return found


def test_the_best_is_the_best_of_all():
    for seed in range(300):
        rng = Random(seed)
        stages = rng.randint(1, 4)
        layers = rng.randint(stages, 9)
        time = random_time(rng, layers, stages)
        best = min(every(layers, stages, time), key=lambda p: p.key)
        found = best_partition(layers, stages, time)
        assert sum(found.layers) == layers
        assert min(found.layers) >= 1
        assert (found.borders[0], found.borders[-1]) == (0, layers)
        if best.slowest_ns is None:
            assert found.slowest_ns is None
            assert not found.optimal
            continue
        assert found.key == best.key, seed
        assert found.optimal
        for other in (even(layers, stages, time), moved(layers, stages, time)):
            assert other.key >= found.key
            assert sum(other.layers) == layers


def test_bounds_save_questions_and_change_no_answer():
    asked_without, asked_with = 0, 0
    for seed in range(300):
        rng = Random(seed)
        stages = rng.randint(2, 4)
        layers = rng.randint(stages + 2, 12)
        time = random_time(rng, layers, stages)
        off = [[rng.random() for _ in range(layers + 1)] for _ in range(stages)]

        def bound(*segment: int, time=time, off=off) -> int | None:
            took = time(*segment)
            return None if took is None else int(took * (0.7 + 0.3 * off[segment[0]][segment[1]]))

        def rough(*segment: int, time=time) -> int | None:
            return int(0.6 * (time(*segment) or 0))

        asked: set[tuple[int, ...]] = set()

        def noted(*segment: int, time=time, asked=asked) -> int | None:
            asked.add(segment)
            return time(*segment)

        plain = best_partition(layers, stages, noted)
        if plain.slowest_ns is None:
            continue
        asked_without += len(asked)
        asked.clear()
        found = best_partition(layers, stages, noted, rough, bound)
        asked_with += len(asked)
        assert found.slowest_ns == plain.slowest_ns
        assert found.optimal
        assert sum(found.layers) == layers
        assert set(found.segments) <= asked
    assert asked_with < 0.4 * asked_without


def test_early_stages_that_hold_more_get_fewer_layers():
    def time(stage, first, behind):
        embedding = 10 * (first == 0) + 30 * (behind == 24)
        return (behind - first) * (100 + 12 * (3 - stage)) + embedding

    found = best_partition(24, 4, time)
    assert found.layers == (5, 6, 6, 7)
    assert found.slowest_ns < even(24, 4, time).slowest_ns
    assert found.layout() == "Et*5|t*6|t*6|t*7L"


def test_each_segment_is_asked_for_once_and_few_where_there_are_many():
    asked = []

    def time(stage, first, behind):
        asked.append((stage, first, behind))
        return (behind - first) * 10 + stage

    best_partition(20, 4, time)
    assert len(asked) == len(set(asked))
    asked.clear()
    found = best_partition(400, 16, time)
    assert not found.optimal
    assert len(set(asked)) < 5000


def test_more_stages_than_layers_is_refused():
    with pytest.raises(OptionError, match="3 layers on 4 stages"):
        best_partition(3, 4, lambda *_: 1)
