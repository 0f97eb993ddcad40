"""Megatron's recompute arguments, read as a budget: with overlapc a step takes no more memory."""

from __future__ import annotations

import types
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.megatron import cpu
from tests.megatron.models import Layout, Trained, innermost, set_up, twins
from tests.megatron.test_patch import differences
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
    cpu.need(version)
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


def counting(layer: Any) -> None:
    """Let a layer count its forwards, and read the count."""
    kind = type(layer)

    def forward(self: Any, x: torch.Tensor, *args: Any, **more: Any) -> Any:
        x = x + self.count.clone()
        self.count += 1
        return kind.forward(self, x, *args, **more)

    layer.register_buffer("count", torch.zeros(()))
    layer.__class__ = types.new_class("Counting", (kind,))
    layer.__class__.forward = forward


def twice(rank: int, ranks: int, version: str) -> list[tuple[list[str], list[str]]]:
    """Models whose layers are recomputed: one counts in them, and the layers of the other get
    nothing that requires a gradient."""
    cpu.use(version)
    import overlapc.megatron as patched

    dist.init_process_group("gloo")
    layout = Layout(ranks=1, ddp=None, dropout=0.1, config=ARGUMENTS["uniform"])
    set_up(layout)
    found = []
    for counts in (True, False):
        both = twins(layout)
        for trained in both:
            model = innermost(trained.models[0])
            if counts:
                counting(model.decoder.layers[0].mlp)
            else:
                model.embedding.requires_grad_(False)
        expected = [both[0].step(number) for number in range(2)]
        patched.patch(profile="estimate", solver="heu")
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            got = [both[1].step(number) for number in range(2)]
        patched.unpatch()
        wrong = [each for pair in zip(expected, got, strict=True) for each in differences(*pair)]
        found.append((wrong, [str(one.message) for one in told if "overlapc" in str(one.message)]))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("version", ["0.16.1", "0.19.2"])
def test_what_recompute_itself_does_to_a_step(version: str) -> None:
    cpu.need(version)
    ((counted, frozen),) = run_ranks(twice, 1, version)
    assert counted[0] == frozen[0] == frozen[1] == []
    (told,) = counted[1]
    assert "forward changes the buffer decoder.layers.0.mlp.count where Megatron recompu" in told
