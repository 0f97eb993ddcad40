"""A script may write the next microbatch where the last one was, as Megatron alone allows."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from overlapc.core.errors import OverlapcError
from tests.megatron import cpu
from tests.megatron.models import Layout, Trained, innermost, loss_of, set_up, twins
from tests.megatron.test_patch import MERGED_1F1B, differences
from tests.multiprocess.spawn import run_ranks

pytestmark = pytest.mark.multiprocess

LAYOUTS = {
    "tp": Layout(tp=2, layers=1, dropout=0.1),
    "ep": Layout(ep=2, experts=4, layers=1),
    "recompute": Layout(tp=2, options={"memory_budget": 0.7}, merge=False),
    "pp": Layout(pp=2, dropout=0.1, microbatches=5),
    "merged 1f1b": Layout(pp=2, tp=2, ranks=4, microbatches=6, options=MERGED_1F1B),
}
QUICK = ("tp", "pp")


class Refilling:
    """The forward step of a script that has as many buffers as microbatches are in flight."""

    def __init__(self) -> None:
        from megatron.core import parallel_state

        behind = parallel_state.get_pipeline_model_parallel_rank()
        self.count = parallel_state.get_pipeline_model_parallel_world_size() - behind
        self.buffers: list[tuple[torch.Tensor, ...]] = []
        self.begun = 0

    def __call__(self, data: Any, model: Any, *_: Any, **__: Any) -> Any:
        tokens, labels = next(data)
        batch, length = tokens.shape
        whole = torch.ones(length, length, dtype=torch.bool)
        mask = torch.triu(whole, 1) | (tokens[:, None, None, :] % 5 == 0)
        mask[..., 0] = False
        came = tokens, torch.arange(length).expand(batch, -1), mask, labels
        if len(self.buffers) < self.count:
            self.buffers.append(tuple(each.clone() for each in came))
        own = self.buffers[self.begun % self.count]
        self.begun += 1
        for buffer, new in zip(own, came, strict=True):
            buffer.copy_(new)
        *given, labels = own
        return model(*given, labels=labels), functools.partial(loss_of, labels % 3 != 0, False)


def refilling(trained: Trained) -> Trained:
    real, step = trained._given, Refilling()
    trained._given = lambda n: {**real(n), "forward_step_func": step}  # type: ignore[method-assign]
    return trained


def on_rank(rank: int, ranks: int, names: list[str]) -> dict[str, Any]:
    cpu.use("0.16.1")
    import overlapc.megatron as patched

    dist.init_process_group("gloo")
    found = {}
    for name in names:
        layout = LAYOUTS[name]
        set_up(layout)
        plain, ours = map(refilling, twins(layout))
        expected = [plain.step(number) for number in range(2)]
        options = {"solver": "heu", "profile": "estimate", **layout.options}
        patched.patch(merge=layout.merge, **options)
        got = [ours.step(number) for number in range(2)]
        assert patched._steps is not None
        ran = [dict(chunk.ran) for chunk in patched._steps.chunks.values()]
        patched.unpatch()
        wrong = [each for pair in zip(expected, got, strict=True) for each in differences(*pair)]
        found[name] = wrong, ran
        dist.barrier()
    dist.destroy_process_group()
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(QUICK, id="quick"),
        pytest.param(("ep", "recompute"), id="others", marks=pytest.mark.slow),
        pytest.param(("merged 1f1b",), id="merged 1f1b", marks=pytest.mark.slow),
    ],
)
def test_a_microbatch_in_the_place_of_the_last(names: tuple[str, ...]) -> None:
    cpu.need("0.16.1")
    for found in run_ranks(on_rank, LAYOUTS[names[0]].ranks, list(names), timeout_s=280):
        for name in names:
            wrong, ran = found[name]
            assert wrong == [], name
            count = 2 * LAYOUTS[name].microbatches
            assert [(one["planned"], one["plain"]) for one in ran] == [(count, 0)], name


def on_a_rank_that_writes(rank: int, ranks: int, what: str) -> list[str]:
    cpu.use("0.16.1")
    import overlapc.megatron as patched

    dist.init_process_group("gloo")
    layout = Layout(tp=2, layers=1, ddp=None)
    set_up(layout)
    told = []
    for merge in (False, True):
        plain, ours = twins(layout)
        for trained in (plain, ours):
            WRITES[what](trained)
        expected = plain.step(0)
        patched.patch(merge=merge, fill=merge, solver="heu", profile="estimate")
        try:
            told += differences(expected, ours.step(0))
        except OverlapcError as error:
            told.append(str(error))
        patched.unpatch()
    dist.destroy_process_group()
    return told


def _scaled_by_a_buffer(trained: Trained) -> None:
    """Let the script write into a buffer of the model before each microbatch."""
    layer = innermost(trained.models[0]).decoder.layers[0].mlp
    layer.register_buffer("factor", torch.ones(trained.layout.width))
    own = layer.forward
    layer.forward = lambda x, *args, **more: own(x * layer.factor, *args, **more)
    before_each(trained, lambda: layer.factor.mul_(1.1))


def _noisy(trained: Trained) -> None:
    weight = innermost(trained.models[0]).decoder.layers[0].mlp.linear_fc2.weight
    before_each(trained, lambda: weight.data.add_(0.01))


def _frozen_by_turns(trained: Trained) -> None:
    weight = innermost(trained.models[0]).decoder.layers[0].mlp.linear_fc2.weight
    before_each(trained, lambda: weight.requires_grad_(not weight.requires_grad))


WRITES: dict[str, Callable[[Trained], None]] = {
    "buffer": _scaled_by_a_buffer,
    "weight": _noisy,
    "flag": _frozen_by_turns,
}


def before_each(trained: Trained, write: Callable[[], object]) -> None:
    """Let the script do this before each microbatch."""
    real = trained._given

    def given(number: int) -> dict[str, Any]:
        found = real(number)
        step = found["forward_step_func"]

        def forward_step(*args: Any) -> Any:
            write()
            return step(*args)

        return {**found, "forward_step_func": forward_step}

    trained._given = given  # type: ignore[method-assign]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("what", "shape"), [("buffer", "(32,)"), ("weight", "(32, 64)")])
def test_what_changes_before_a_deferred_backward_is_an_error(what: str, shape: str) -> None:
    cpu.need("0.16.1")
    for told in run_ranks(on_a_rank_that_writes, 2, what, timeout_s=200):
        assert len(told) == 1  # unmerged there is no difference
        assert f"constant of shape {shape} that a backward reads changed" in told[0]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_parameter_is_frozen_between_microbatches() -> None:
    cpu.need("0.16.1")
    assert run_ranks(on_a_rank_that_writes, 2, "flag", timeout_s=200) == [[], []]
