"""Megatron patched against Megatron as it is, in one process: three steps, bit by bit."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.megatron import cpu
from tests.megatron.models import Layout, Trained, set_up
from tests.multiprocess.spawn import run_ranks

pytestmark = pytest.mark.multiprocess

QUICK = ("0.16.1", "0.19.2")
OTHERS = ("0.12.3", "0.13.1", "0.14.0", "0.15.3", "0.17.0", "0.18.0")
SHARDED = dict(use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True)
# Merged plans take longest to make, so that the quick ones have one layer.
LAYOUTS = {
    "tp": Layout(tp=2, layers=1),
    "tp, sequence, dropout": Layout(
        tp=2, layers=1, dropout=0.1, config={"sequence_parallel": True}, merge=False
    ),
    "pp": Layout(pp=2),
    "dp, sharded": Layout(ddp=SHARDED),
    "ep": Layout(ep=2, experts=4, layers=1, merge=False),
    "tied": Layout(tp=2, layers=1, tied=True, position="learned_absolute", merge=False),
    "bf16": Layout(tp=2, layers=1, config={"bf16": True}, dropout=0.1, merge=False),
}


def on_rank(rank: int, ranks: int, version: str, names: list[str]) -> dict[str, Any]:
    cpu.use(version)
    dist.init_process_group("gloo")
    found = {}
    for name in names:
        found[name] = compared(LAYOUTS[name])
        dist.barrier()
    dist.destroy_process_group()
    return found


def compared(layout: Layout) -> dict[str, Any]:
    """Train one model by Megatron as it is and its twin by Megatron patched."""
    from megatron.core.pipeline_parallel import schedules

    import overlapc.megatron as patched

    set_up(layout)
    before = dict(vars(schedules))
    plain, ours = Trained(layout), Trained(layout)
    ours.random = {name: state.clone() for name, state in plain.random.items()}
    expected = [plain.step(number) for number in range(3)]
    patched.patch(
        **{"merge": layout.merge, "solver": "heu", "profile": "estimate", **layout.options}
    )
    found = [ours.step(number) for number in range(3)]
    assert patched._steps is not None
    chunks = list(patched._steps.chunks.values())
    patched.unpatch()
    left = [name for name, value in before.items() if vars(schedules)[name] is not value]
    left += [name for c in chunks for name in vars(c.module) if name == "forward"]
    return {
        "wrong": [
            f"step {number}: {difference}"
            for number, (one, other) in enumerate(zip(expected, found, strict=True))
            for difference in differences(one, other)
        ],
        "ran": [dict(chunk.ran) for chunk in chunks],
        "why": [reason for chunk in chunks for reason in chunk.why_plain],
        "left": left,
    }


def differences(expected: dict[str, Any], found: dict[str, Any]) -> list[str]:
    return [
        f"{what} {i}"
        for what in expected
        for i, (one, other) in enumerate(zip(expected[what], found[what], strict=True))
        if not (one is other is None or torch.equal(one, other))
    ]


@functools.cache
def ran(version: str, ranks: int) -> list[dict[str, Any]]:
    """What each rank found, of all layouts one after the other: a process imports one version."""
    if cpu.folder(version) is None:
        pytest.skip(f"megatron-core {version} is not installed: see the Makefile")
    names = [name for name, layout in LAYOUTS.items() if layout.ranks == ranks]
    return run_ranks(on_rank, ranks, version, names, timeout_s=290)


def check(version: str, name: str) -> None:
    layout = LAYOUTS[name]
    count = 3 * layout.microbatches
    merged = count - 3 if layout.merge and layout.pp == 1 and name != "dp, sharded" else 0
    chunks = [{"planned": count, "merged": merged, "plain": 0}] * (layout.vpp or 1)
    for found in ran(version, layout.ranks):
        assert found[name] == {"wrong": [], "ran": chunks, "why": [], "left": []}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("version", QUICK)
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_patched_step_is_megatrons(version: str, name: str) -> None:
    check(version, name)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("version", OTHERS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_so_it_is_in_other_versions(version: str, name: str) -> None:
    check(version, name)
