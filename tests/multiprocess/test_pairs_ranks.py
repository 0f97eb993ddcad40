"""Steps in pairs on two ranks: both run the same collectives in the same order, whatever state of
Python their models read."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from overlapc import TrainStep
from overlapc.emulate import Link, init_link
from tests.multiprocess.spawn import RankFailed, run_ranks
from tests.multiprocess.test_exactness_ranks import gpt, tokens
from tests.slow import slow_link
from tests.torch.exact import Batch
from tests.torch.test_pairs import force
from tests.torch.test_train_step import differences, eagerly, left_behind

pytestmark = pytest.mark.multiprocess

LINK = Link(alpha_s=1e-4, bytes_per_s=1e9)
ALONE = "scales later on one rank"


class Scales(nn.Module):
    """A model of several ranks that scales its loss by one of two tensors, in turn if told to."""

    def __init__(self, turns: bool) -> None:
        super().__init__()
        self.inner, self.turns = gpt(0.0), turns
        self.scale, self.other = torch.tensor(1.5), torch.tensor(0.75)
        self.seen: Tensor | None = None

    def forward(self, x: Tensor, targets: Tensor, how: str = "") -> Tensor:
        found: Tensor = self.inner(x, targets) * self.scale * (2 if how == "again" else 1)
        if self.turns:
            self.scale, self.other = self.other, self.scale
        self.seen = found.detach()  # which no call reads
        return found


class Draws(Scales):
    def forward(self, x: Tensor, targets: Tensor, how: str = "") -> Tensor:
        found: Tensor = self.inner(x, targets) * random.randint(2, 9)
        return found


def made(kind: str, rank: int) -> nn.Module:
    torch.manual_seed(1)
    random.seed(5)
    if kind == "draws":
        return Draws(False)
    return Scales({"scales": True, "scales on one rank": rank == 0}.get(kind, False))


def given(kind: str, rank: int, count: int) -> list[tuple[Any, ...]]:
    batches: list[tuple[Any, ...]] = [(tokens(i), tokens(i + 50)) for i in range(count)]
    if kind == "other graphs on one rank":  # of one digest: they differ in a number
        hows = ["", "again"] if rank == 0 else ["", ""]
        batches = [(*batch, hows[i % 2]) for i, batch in enumerate(batches)]
    return batches


def on_rank(rank: int, ranks: int, kind: str, counts: list[int], hardware: str = "") -> Any:
    """What differs from eager in each step, and the order of its pair; with `hardware` the solver
    decides, else steps are in pairs if they may be."""
    init_link(LINK)
    found = []
    with pytest.MonkeyPatch.context() as patch:
        how: dict[str, Any] = {"profile": "estimate"}
        if hardware:
            how |= {"hardware": hardware, "solver": "heu"}
        else:
            force(patch, 4)
        model, twin = made(kind, rank), made(kind, rank)
        step = TrainStep(twin, **how)
        for i, count in enumerate(counts):
            if kind.startswith("scales later"):  # on one rank there is nobody to plan anew with
                model.turns = twin.turns = i > 0 and (rank == 0 or kind == "scales later")
            batches = given(kind, rank, count)
            both = [Batch(batch) for batch in batches]
            state = random.getstate()
            expected = eagerly(model, both, lambda model, *args: model(*args))
            after, _ = random.getstate(), random.setstate(state)
            torch.manual_seed(7)
            got = left_behind(step.model, both, step(batches))
            assert random.getstate() == after
            assert step.report is not None
            pair = step.report.pair
            found.append((differences(expected, got), pair and pair.plan.order))
        assert step.fallbacks == []
        assert torch.equal(model.scale, twin.scale)
    dist.barrier()
    dist.destroy_process_group()
    return json.loads(json.dumps(found))


SLOWER = ("plain", True), ("scales", False), ("draws", False)


@pytest.mark.parametrize(
    ("kind", "pairs"),
    [
        ("other graphs on one rank", True),
        ("scales on one rank", False),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOWER),
    ],
)
def test_gradients_are_those_of_plain_accumulation(kind: str, pairs: bool) -> None:
    assert paired(run_ranks(on_rank, 2, kind, [3, 2, 3], timeout_s=100)) == [pairs] * 3


def paired(both: list[Any]) -> list[bool]:
    assert both[0] == both[1]
    assert all(differ == [] for differ, _ in both[0])
    return [order is not None for _, order in both[0]]


def test_the_solver_chooses_pairs_on_a_slow_link(tmp_path: Path) -> None:
    both = run_ranks(on_rank, 2, "plain", [2], slow_link(tmp_path), timeout_s=100)
    assert paired(both) == [True]


@pytest.mark.slow
def test_calls_that_depend_on_each_other_later_are_planned_anew() -> None:
    both = run_ranks(on_rank, 2, "scales later", [3, 3, 3], timeout_s=100)
    assert paired(both) == [True, False, False]


def test_a_model_whose_calls_depend_on_each_other_later_on_one_rank_is_an_error() -> None:
    with pytest.raises(RankFailed, match=r"RankError|Connection"):
        run_ranks(on_rank, 2, ALONE, [3, 3], timeout_s=100)
