"""The late are waited for, the dead and the disagreeing are named, at every front door."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest

from tests.multiprocess.troubled import DOORS, Outcome, Trouble, run

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(300)]

PROMISED_S = 10.0  # between a death, or a rank that cannot come any more, and every error


def all_but_slow(*quick: str) -> list[Any]:
    return [pytest.param(d, marks=() if d in quick else pytest.mark.slow) for d in DOORS]


@lru_cache
def gradients_without_trouble(door: str, ranks: int) -> list[float]:
    outcomes = run(Trouble("none", door, ranks, 0, 0))
    return [found.gradients for found in outcomes if found is not None]


def assert_waited_for(trouble: Trouble, outcomes: list[Outcome | None]) -> None:
    expected = gradients_without_trouble(trouble.door, trouble.ranks)
    for mine, gradients in zip(outcomes, expected, strict=True):
        assert mine is not None
        assert mine.kind == "", (trouble, mine)
        assert mine.gradients == gradients


def assert_named(trouble: Trouble, outcomes: list[Outcome | None]) -> None:
    """Every other rank says so, in time. (Of what ranks wait for in collectives of their own, as
    at the end of the run, PyTorch says what it says.)"""
    for rank, found in enumerate(outcomes):
        if rank != trouble.victim:
            assert found is not None
            assert found.kind == "RankError", (trouble, rank, found)
            assert f"rank {trouble.victim}" in found.text, (trouble, rank, found)
            assert found.seconds <= PROMISED_S, (trouble, rank, found)


@pytest.mark.parametrize("door", all_but_slow("optimize", "Pipeline"))
def test_a_late_rank_is_waited_for(door: str) -> None:
    trouble = Trouble("late", door, 2, 1, 2, 9.0)
    assert_waited_for(trouble, run(trouble))


@pytest.mark.parametrize("door", all_but_slow("TrainStep"))
def test_a_killed_rank_is_named(door: str) -> None:
    trouble = Trouble("killed", door, 2, len(door) % 2, 0, 1.0)
    assert_named(trouble, run(trouble))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_a_rank_that_is_late_anywhere(seed: int) -> None:
    trouble = Trouble.drawn("late", seed)
    assert_waited_for(trouble, run(trouble))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_a_rank_that_is_killed_anywhere(seed: int) -> None:
    trouble = Trouble.drawn("killed", seed)
    assert_named(trouble, run(trouble))


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])  # rank 0 has the store
@pytest.mark.parametrize("door", DOORS)
def test_a_stopped_rank_is_late(door: str, victim: int) -> None:
    trouble = Trouble("stopped", door, 2, victim, 0, 20.0)
    assert_waited_for(trouble, run(trouble))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["in a barrier", "raises"])
@pytest.mark.parametrize("door", DOORS)
def test_a_rank_that_does_something_else_is_named(door: str, kind: str) -> None:
    trouble = Trouble(kind, door, 4, 2, 0)
    assert_named(trouble, run(trouble))
