"""Microbatches whose shapes some ranks have alone run by the plan that all agreed on."""

from __future__ import annotations

import time
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.megatron import cpu
from tests.megatron.models import Layout, Trained, set_up, twins
from tests.megatron.test_patch import SHARDED, differences
from tests.multiprocess.spawn import run_ranks

pytestmark = pytest.mark.multiprocess

VERSION = "0.16.1"
# Step and microbatch -> how many sequences, and of how many tokens: of the last replica alone.
ODD = {(1, 2): (1, 16), (1, 0): (2, 8), (2, 1): (2, 5), (2, 2): (3, 16)}
FIRST = {(0, 0): (2, 8)}
VARIABLE = {"variable_seq_lengths": True, "moe_token_dispatcher_type": "alltoall"}
LAYOUTS = {
    "dp": (Layout(layers=1, dropout=0.1, ddp=SHARDED, microbatches=3), ODD),
    "first": (Layout(layers=1, ddp=SHARDED, microbatches=3), FIRST),
    "ep": (Layout(ep=2, experts=4, layers=1, microbatches=3), {**FIRST, (1, 1): (2, 24)}),
    "ep, not merged": (Layout(ep=2, experts=4, layers=1, microbatches=3, merge=False), ODD),
    "tp": (Layout(ranks=4, tp=2, dropout=0.1, layers=1, microbatches=3), ODD),
    "pp": (
        Layout(ranks=4, pp=2, ddp=SHARDED, microbatches=3, config=VARIABLE),
        {(1, 1): (2, 8), (2, 2): (1, 16)},
    ),
}
QUICK = ("ep, not merged",)


def given_other_shapes(trained: Trained, shapes: dict[tuple[int, int], tuple[int, int]]) -> Trained:
    from megatron.core import parallel_state

    real = trained._given
    last = parallel_state.get_data_parallel_world_size() - 1

    def given(number: int) -> dict[str, Any]:
        found = real(number)
        each = list(found["data_iterator"])
        for (step, place), (batch, sequence) in shapes.items():
            if step == number and parallel_state.get_data_parallel_rank() == last:
                generator = torch.Generator().manual_seed(place)
                tokens = torch.randint(0, 16, (batch, sequence + 1), generator=generator)
                each[place] = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        return {**found, "data_iterator": iter(each)}

    trained._given = given  # type: ignore[method-assign]
    return trained


def on_rank(rank: int, ranks: int, names: list[str]) -> dict[str, Any]:
    cpu.use(VERSION)
    import overlapc.megatron as patched

    dist.init_process_group("gloo")
    found = {}
    for name in names:
        layout, shapes = LAYOUTS[name]
        set_up(layout)
        plain, ours = (given_other_shapes(each, shapes) for each in twins(layout))
        expected = [plain.step(number) for number in range(3)]
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            patched.patch(merge=layout.merge, solver="heu", profile="estimate")
            begun = time.monotonic()
            got = [ours.step(number) for number in range(3)]
        assert patched._steps is not None
        found[name] = {
            "wrong": [d for pair in zip(expected, got, strict=True) for d in differences(*pair)],
            "ran": [dict(chunk.ran) for chunk in patched._steps.chunks.values()],
            "told": [str(each.message) for each in told if "overlapc" in str(each.message)],
            "seconds": time.monotonic() - begun,
        }
        patched.unpatch()
        dist.barrier()
    dist.destroy_process_group()
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(QUICK, id="quick", marks=pytest.mark.slow),
        pytest.param(("dp", "first", "ep"), id="others", marks=pytest.mark.slow),
        pytest.param(("pp",), id="stages", marks=pytest.mark.slow),
        pytest.param(("tp",), id="tp", marks=pytest.mark.slow),
    ],
)
def test_a_shape_of_one_replica_runs_by_the_plan_of_all(names: tuple[str, ...]) -> None:
    cpu.need(VERSION)
    for found in run_ranks(on_rank, LAYOUTS[names[0]][0].ranks, list(names), timeout_s=200):
        for name in names:
            layout, _ = LAYOUTS[name]
            assert (found[name]["wrong"], found[name]["told"]) == ([], []), name
            for ran in found[name]["ran"]:
                assert (ran["planned"], ran["plain"]) == (3 * layout.microbatches, 0), name
                assert (ran["merged"] > 0) == layout.merges, name
