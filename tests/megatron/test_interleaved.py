"""Virtual pipeline stages: each chunk is traced and planned in the first step, and never again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist

from tests.megatron import cpu
from tests.megatron.models import Layout, Trained, set_up, twins
from tests.megatron.test_patch import ALL, QUICK, SHARDED, differences
from tests.megatron.test_slices import ALL as SLICED
from tests.multiprocess.spawn import run_ranks

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(600)]

STEPS = 20  # of more than 16 states a chunk would run plain
LAYOUTS = {
    "interleaved": ALL["interleaved"],
    "in slices": replace(SLICED["interleaved"], options={"slices": 2}),
    "three chunks, tied": Layout(
        pp=2, vpp=3, layers=6, tied=True, position="learned_absolute", ddp=SHARDED
    ),
    "tp, sequence": Layout(
        ranks=4, tp=2, pp=2, vpp=2, layers=4, config={"sequence_parallel": True}
    ),
    "experts": Layout(ranks=4, pp=2, vpp=2, ep=2, experts=4, layers=4),
    "recompute, bf16": Layout(
        pp=2,
        vpp=2,
        layers=4,
        dropout=0.1,
        config={
            "bf16": True,
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        },
    ),
}


def on_rank(
    rank: int, ranks: int, version: str, name: str, steps: int, sets_modes: bool
) -> dict[str, Any]:
    cpu.use(version)
    dist.init_process_group("gloo")
    import overlapc.megatron as patched
    from overlapc.megatron import planning

    layout = LAYOUTS[name]
    set_up(layout)
    plain, ours = twins(layout)
    if sets_modes:
        setting_modes(ours)
    # Slices differ from the whole by rounding: test_slices.py compares those.
    compared = "slices" not in layout.options
    expected = [plain.step(number) for number in range(steps)] if compared else []
    traces, real = [0], planning.traced

    def traced(*args: Any) -> Any:
        traces[-1] += 1
        return real(*args)

    planning.traced = traced
    patched.patch(solver="heu", profile="estimate", **layout.options)
    wrong = []
    for number in range(steps):
        found = ours.step(number)
        wrong += differences(expected[number], found) if compared else []
        traces.append(0)
    assert patched._steps is not None
    chunks = [*patched._steps.chunks.values()]
    return {
        "wrong": wrong,
        "traces": traces[:-1],
        "plans": [len(chunk._planned) for chunk in chunks],
        "plain": [chunk.why_plain for chunk in chunks],
    }


def setting_modes(trained: Trained) -> None:
    """Give it a forward step that sets the model's mode for each microbatch."""
    real = trained._given

    def given(number: int) -> dict[str, Any]:
        found = real(number)
        step = found["forward_step_func"]

        def training(data: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
            model.train()
            return step(data, model, *args, **kwargs)

        return found | {"forward_step_func": training}

    trained._given = given  # type: ignore[method-assign]


def check(version: str, name: str, steps: int, sets_modes: bool = False) -> None:
    cpu.need(version)
    layout = LAYOUTS[name]
    each = 2 if "slices" in layout.options else 1  # the whole microbatch, and a slice
    given = version, name, steps, sets_modes
    for ran in run_ranks(on_rank, layout.ranks, *given, timeout_s=500):
        assert ran == {
            "wrong": [],
            "traces": [each * layout.vpp] + [0] * (steps - 1),
            "plans": [1] * layout.vpp,
            "plain": [[]] * layout.vpp,
        }


def test_a_second_chunk_is_planned_once() -> None:
    check(QUICK[-1], "interleaved", steps=3)


@pytest.mark.slow
def test_attributes_that_are_set_as_they_were_make_no_plan_anew() -> None:
    check(QUICK[-1], "interleaved", steps=3, sets_modes=True)


@pytest.mark.slow
@pytest.mark.parametrize("version", QUICK)
@pytest.mark.parametrize("name", LAYOUTS)
def test_chunks_are_planned_once_in_twenty_steps(version: str, name: str) -> None:
    check(version, name, STEPS)
