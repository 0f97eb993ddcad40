"""Models that FSDP2 shards are planned, with all gathers and reductions in the graphs, and bitwise
FSDP2's own."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from tests.multiprocess.sharded import (
    Case,
    batches,
    built,
    compared,
    different,
    one_by_one,
    trained,
)
from tests.multiprocess.spawn import run_ranks

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(900)]


def check(cases: list[Case], ranks: int) -> None:
    """All of them, in processes that start once."""
    for each in zip(*run_ranks(compared, ranks, cases, timeout_s=880), strict=True):
        for case, difference, planned, unchanged, differences in each:
            assert difference == "", case
            assert planned, (case, unchanged)
            assert unchanged == [], case
            assert differences == [], case


def test_through_optimize_and_train_step() -> None:
    plain = Case(budget=0.7, evaluates=True, spare=True)
    merged = Case(door="TrainStep", policy="bf16", microbatches=3, tied=True, groups="end")
    together = Case(microbatches=3, together=True, policy="bf16", spare=True, groups="rows")
    check([plain, merged, together, replace(plain, checkpoints=True, clip=True)], 2)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 120, 20))
def test_random_models_on_two_ranks(first: int) -> None:
    check([Case.drawn(seed, 2) for seed in range(first, first + 20)], 2)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "first"), [(r, f) for r in (3, 4) for f in range(0, 90, 15)])
def test_random_models_on_more_ranks(ranks: int, first: int) -> None:
    check([Case.drawn(seed, ranks) for seed in range(first, first + 15)], ranks)


# ------------------------------------------------------------------- what is FSDP2's own


def _planned(case: Case, run: Any) -> tuple[str, int, list[str]]:
    """What differs from FSDP2 when `run(model, call)` trains; graphs planned; warnings."""
    import overlapc

    model, optimizer = built(case)
    expected = trained(case, model, optimizer, run(model, model))
    model, optimizer = built(case)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        twin: Any = overlapc.optimize(model, profile="estimate", solver="heu", timeout_s=120)
        found = trained(case, model, optimizer, run(model, twin))
    said = [str(w.message) for w in caught if "overlapc" in str(w.message)]
    return different(expected, found), len(twin.reports), said


def _compiled(model: Any, call: Any) -> Any:
    model.blocks[0].compile(backend="eager")
    return one_by_one(call)


def _two_calls(model: Any, call: Any) -> Any:
    def run(each: Any) -> list[Any]:
        losses = [call(batch) for batch in each]
        torch.stack(losses).sum().backward()
        return losses

    return run


def _left_to_fsdp2(_rank: int, _ranks: int) -> list[Any]:
    torch.distributed.init_process_group("gloo")
    case = Case(microbatches=3, layers=1)
    alone = replace(case, microbatches=1)
    return [
        _planned(alone, _compiled),
        _planned(replace(case, microbatches=2), _two_calls),
    ]


@pytest.mark.slow
def test_what_no_graph_has_is_left_to_fsdp2() -> None:
    for compiled, twice in run_ranks(_left_to_fsdp2, 2, timeout_s=300):
        assert compiled[:2] == ("", 0)
        assert "blocks.0 is compiled by itself" in compiled[2][0]
        assert twice[1] == 1
        assert len(twice[2]) == 1
        assert "called again before a backward" in twice[2][0]


def _loaded(_rank: int, _ranks: int) -> tuple[str, int, bool]:
    """A state dict that is assigned, and a part of the model that is sharded within another."""
    import overlapc

    torch.distributed.init_process_group("gloo")
    case = Case(seed=5, evaluates=True, layers=1)
    model, optimizer = built(case)
    values = {name: value.clone() for name, value in model.state_dict().items()}
    expected = trained(case, model, optimizer, one_by_one(model))
    model, optimizer = built(replace(case, seed=0))
    twin: Any = overlapc.optimize(model, profile="estimate", solver="heu", timeout_s=120)
    trained(case, model, optimizer, one_by_one(twin))
    model.load_state_dict(values, assign=True)
    again = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    found = trained(case, model, again, one_by_one(twin))

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, _ = built(case)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.inner(tokens) * 2

    model, twin = Around(), overlapc.optimize(Around(), profile="estimate", timeout_s=120)
    losses = [each(batches(case, 0)[0]) for each in (model, twin)]
    for loss in losses:
        loss.backward()
    pairs = zip(model.parameters(), twin.parameters(), strict=True)
    same = all(torch.equal(a.grad.to_local(), b.grad.to_local()) for a, b in pairs)
    return different(expected, found), len(twin.reports), same and torch.equal(*losses)


@pytest.mark.slow
def test_loaded_parameters_and_sharded_parts() -> None:
    assert run_ranks(_loaded, 2, timeout_s=300) == [("", 1, True)] * 2
