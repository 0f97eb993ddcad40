"""Models that FSDP2 shards are planned, with all gathers and reductions in the graphs, and bitwise
FSDP2's own."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from torch import nn

from tests.multiprocess.sharded import (
    VOCAB,
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
    ragged = replace(together, ragged=True, groups="blocks", spare=False)
    blocks = replace(plain, checkpoints=True, unsaid=True, clip=True)
    check([plain, merged, together, blocks, ragged], 2)


def test_unused_parameters_over_three_ranks() -> None:
    """FSDP2 leaves them out of a reduction, and three ranks add up in an order of its size."""
    spare = Case(spare=True, groups="end", width=18, policy="bf16 all")
    check([spare, replace(spare, groups="rows", width=24, microbatches=2, together=True)], 3)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 120, 20))
def test_random_models_on_two_ranks(first: int) -> None:
    check([Case.drawn(seed, 2) for seed in range(first, first + 20)], 2)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "first"), [(r, f) for r in (3, 4) for f in range(0, 90, 15)])
def test_random_models_on_more_ranks(ranks: int, first: int) -> None:
    check([Case.drawn(seed, ranks) for seed in range(first, first + 15)], ranks)


def _ragged(rank: int, _ranks: int) -> tuple[bool, int, int, int, list[str]]:
    """Two hundred batches, padded by themselves."""
    import overlapc

    torch.distributed.init_process_group("gloo")
    random = Random(rank)
    lengths = [random.randint(5, 70) for _ in range(200)]

    def run(call: Any) -> list[torch.Tensor]:
        losses = []
        for step, length in enumerate(lengths):
            made = torch.Generator().manual_seed(1000 * step + rank)
            losses.append(call(torch.randint(VOCAB, (4, length), generator=made)))
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        return [loss.detach() for loss in losses]

    model, optimizer = built(Case())
    expected = [*run(model), *(p.to_local() for p in model.parameters())]
    model, optimizer = built(Case())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        twin: Any = overlapc.optimize(model, profile="estimate", solver="heu", timeout_s=120)
        found = [*run(twin), *(p.to_local() for p in model.parameters())]
    said = [text for w in caught if (text := str(w.message)).startswith("overlapc")]
    same = all(torch.equal(*pair) for pair in zip(expected, found, strict=True))
    text = twin.explain()
    return same, len(twin.graphs), len(set(lengths)), text.count("of other shapes, run by"), said


@pytest.mark.slow
def test_batches_that_are_padded_by_themselves() -> None:
    for same, planned, lengths, carried, said in run_ranks(_ragged, 3, timeout_s=300):
        assert same
        assert (planned, carried, said) == (1, 1, [])
        assert lengths >= 40


def _in_parallel(_rank: int, _ranks: int) -> tuple[str, int, list[str]]:
    torch.distributed.init_process_group("gloo")
    case = Case(mesh="columns", ragged=True, layers=1)
    return _planned(case, lambda model, call: one_by_one(call))


@pytest.mark.slow
def test_shapes_are_traced_one_by_one_where_an_op_takes_no_symbols() -> None:
    for difference, planned, said in run_ranks(_in_parallel, 4, timeout_s=600):
        assert (difference, planned) == ("", 1)
        assert len(said) == 1
        assert "each shape of a batch for itself" in said[0]


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
    said = [text for w in caught if (text := str(w.message)).startswith("overlapc")]
    return different(expected, found), len(twin.graphs), said


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
        assert "called again before a backward" in twice[2][0]  # at the step behind


def _copied(_rank: int, _ranks: int, policy: str) -> list[tuple[int, int, int]]:
    """How often a step waits for the host to read a number, copies, and gathers, and reduces: of
    FSDP2, and planned with its order of gathers."""
    import overlapc

    torch.distributed.init_process_group("gloo")
    case, found = Case(policy=policy, reshard=False, layers=3), []
    for planned in (False, True):
        model, optimizer = built(case)
        options: dict[str, Any] = {"profile": "estimate", "solver": "heu", "timeout_s": 120}
        run = one_by_one(overlapc.optimize(model, **options) if planned else model)
        for step in range(2):
            run(batches(case, step))
            optimizer.step()
            optimizer.zero_grad()
        with torch.profiler.profile(record_shapes=True) as profile:
            run(batches(case, 2))
        events = list(profile.events() or ())
        copies = [event for event in events if event.name == "aten::copy_"]
        found.append(
            (
                sum(event.name in ("aten::item", "aten::_local_scalar_dense") for event in events),
                sum(math.prod(event.input_shapes[0]) for event in copies),
                sum(event.name.startswith("gloo:") for event in events),
            )
        )
    return found


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["", "bf16"])
def test_no_host_reads_and_no_more_copies_than_fsdp2s(policy: str) -> None:
    for theirs, ours in run_ranks(_copied, 2, policy, timeout_s=300):
        assert ours[0] == 0
        assert ours[1] <= theirs[1]
        assert ours[2] <= theirs[2]


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
    return different(expected, found), len(twin.graphs), same and torch.equal(*losses)


@pytest.mark.slow
def test_loaded_parameters_and_sharded_parts() -> None:
    assert run_ranks(_loaded, 2, timeout_s=300) == [("", 1, True)] * 2
