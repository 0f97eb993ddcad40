"""Megatron's recompute arguments, read as a budget: with overlapc a step takes no more memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

from tests.megatron import cpu
from tests.megatron.models import Layout, Trained, set_up
from tests.multiprocess.spawn import run_ranks

pytestmark = pytest.mark.multiprocess

FULL, CHOSEN = {"recompute_granularity": "full"}, {"recompute_granularity": "selective"}
ARGUMENTS: dict[str, dict[str, Any]] = {
    "uniform": {**FULL, "recompute_method": "uniform", "recompute_num_layers": 1},
    "two at a time": {**FULL, "recompute_method": "uniform", "recompute_num_layers": 2},
    "block": {**FULL, "recompute_method": "block", "recompute_num_layers": 2},
    "core attention": {**CHOSEN, "recompute_modules": ["core_attn"]},
    "norms and mlp": {**CHOSEN, "recompute_modules": ["layernorm", "mlp"]},
}
QUICK = ("uniform",)
EXPERTS = {**CHOSEN, "recompute_modules": ["moe", "layernorm"]}


def peaks(rank: int, ranks: int, version: str, layout: Layout, slices: int) -> dict[str, Any]:
    """What a step allocates at its peak, as Megatron runs it and planned, and what was planned."""
    cpu.use(version)
    from megatron.core.pipeline_parallel import get_forward_backward_func

    import overlapc.megatron as patched
    from overlapc.profiler.memory import measure_peak

    dist.init_process_group("gloo")
    set_up(layout)

    def peak(trained: Trained) -> int:
        def step() -> None:
            get_forward_backward_func()(**trained._given(0))

        found = []
        for _ in range(3):
            trained._zero()
            found.append(measure_peak(step))
        return min(found[1:])  # the first plans

    plain = peak(Trained(layout))
    patched.patch(profile="estimate", solver="overlap", slices=slices)
    ours = peak(Trained(layout))
    (chunk,) = patched._steps.chunks.values()
    (planned,) = chunk._planned.values()
    problem = planned.program.report.problem
    return {
        "plain": plain,
        "ours": ours,
        "budget": problem.budget_bytes,
        "everything": planned.program.report.eager.peak_bytes,
        "why": chunk.why_plain,
    }


def check(version: str, layout: Layout, slices: int = 1) -> None:
    if cpu.folder(version) is None:
        pytest.skip(f"megatron-core {version} is not installed: see the Makefile")
    (found,) = run_ranks(peaks, 1, version, layout, slices, timeout_s=140)
    print(found)
    assert found["why"] == []
    assert found["budget"] < found["everything"]
    assert found["ours"] <= found["plain"]


def cases() -> Iterator[Any]:
    for version in ("0.16.1", "0.19.2"):
        for asked in ARGUMENTS:
            quick = version == "0.16.1" and asked in QUICK
            yield pytest.param(version, asked, marks=[] if quick else pytest.mark.slow)


@pytest.mark.parametrize(("version", "asked"), list(cases()))
def test_a_step_takes_no_more_than_with_the_scripts_own_recompute(version: str, asked: str) -> None:
    check(version, Layout(ranks=1, layers=4, sequence=128, config=ARGUMENTS[asked]))


@pytest.mark.slow
def test_without_megatrons_buffers() -> None:
    check("0.16.1", Layout(ranks=1, layers=4, sequence=128, ddp=None, config=ARGUMENTS["uniform"]))


@pytest.mark.slow
@pytest.mark.parametrize("asked", ["uniform", "norms and mlp"])
def test_in_slices(asked: str) -> None:
    layout = Layout(ranks=1, layers=4, sequence=128, batch=4, config=ARGUMENTS[asked])
    check("0.16.1", layout, slices=2)


@pytest.mark.slow
def test_of_experts() -> None:
    check("0.16.1", Layout(ranks=1, layers=2, sequence=128, experts=4, config=EXPERTS))
