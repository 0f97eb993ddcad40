"""`optimize` where something is wrong with the ranks: a typed error on each, in time, no hang."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist

import overlapc
from examples.gpt.model import GPT, GPTConfig
from overlapc.planning import agreement
from tests.multiprocess.mortal import DEAD, caught, launch

pytestmark = pytest.mark.multiprocess

PROMISED_S = 10.0


def _model(layers: int = 1) -> GPT:
    torch.set_num_threads(1)
    return GPT(GPTConfig(layers=layers, width=32, heads=2, max_seq=16), dist.group.WORLD)


def _step(model: Any) -> None:
    tokens = torch.zeros(1, 16, dtype=torch.long)
    model(tokens, tokens).backward()


def _different_models(rank: int) -> Any:
    model = overlapc.optimize(_model(layers=1 + rank), profile="estimate")
    return caught(lambda: _step(model))


def _different_budgets(rank: int) -> Any:
    model = overlapc.optimize(_model(), memory_budget=0.5 + 0.1 * rank, profile="estimate")
    return caught(lambda: _step(model))


def _infeasible(rank: int) -> Any:
    model = overlapc.optimize(_model(), memory_budget=1, profile="estimate")
    return caught(lambda: _step(model))


def _one_never_plans(rank: int) -> Any:
    model = overlapc.optimize(_model(), profile="estimate")
    if rank == 0:
        return caught(lambda: _step(model))
    return caught(dist.barrier)  # rank 0 goes without it


def _dies(rank: int) -> Any:
    if rank == 1:
        agreement.profile_captured = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    model = overlapc.optimize(_model(), profile="estimate")
    return caught(lambda: _step(model))


def _fails(rank: int) -> Any:
    if rank == 1:
        agreement.profile_captured = _explode
    model = overlapc.optimize(_model(), profile="estimate")
    return caught(lambda: _step(model))


def _explode(*_: Any) -> Any:
    raise ZeroDivisionError("a bug on one rank")


@pytest.mark.parametrize(
    ("scenario", "kinds", "says"),
    [
        (_different_models, ("RankError", "RankError"), "disagree on trace"),
        (_different_budgets, ("RankError", "RankError"), "disagree on options"),
        (_infeasible, ("Infeasible", "Infeasible"), "smallest budget that works"),
        (_fails, ("RankError", "RankError"), "a bug on one rank"),
    ],
)
def test_every_rank_is_told(scenario: Any, kinds: tuple[str, ...], says: str) -> None:
    results = launch(scenario, 2, timeout_s=90)
    assert tuple(kind for kind, *_ in results) == kinds, results
    assert all(says in text for _, text, *_ in results), results
    ends = [when for *_, when in results]
    assert max(ends) - min(ends) < PROMISED_S


def test_a_rank_killed_while_planning() -> None:
    survivor, dead = launch(_dies, 2, timeout_s=90)
    assert dead == DEAD
    assert survivor[0] == "RankError"
    assert "rank 1" in survivor[1]


def test_a_rank_that_never_plans() -> None:
    waiting, _ = launch(_one_never_plans, 2, timeout_s=90)
    assert waiting[0] == "RankError"
    assert "rank 1 is not planning: it waits in barrier" in waiting[1]
