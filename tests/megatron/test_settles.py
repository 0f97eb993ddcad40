"""What a module sets in its first forward settles in one plain call; what is plain for a while is
not said to be plain for ever."""

from __future__ import annotations

import types
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.megatron import cpu
from tests.megatron.models import Layout, Trained, set_up, twins
from tests.megatron.test_patch import differences
from tests.multiprocess.spawn import run_ranks

pytestmark = pytest.mark.multiprocess

LAYOUTS = {
    "tp, merged": Layout(tp=2, layers=1, microbatches=3),
    "pp": Layout(pp=2, microbatches=3),
    "merged 1f1b": Layout(pp=2, microbatches=4, options={"schedule": "merged"}),
    "one microbatch": Layout(layers=1, microbatches=1),
}
STEPS = 3


def sets_once(model: Any, out: torch.Tensor) -> torch.Tensor:
    if not hasattr(model, "ready"):
        model.ready = True
    return out * 2


def seeds_at_first(model: Any, out: torch.Tensor) -> torch.Tensor:
    if model.seeds:
        torch.manual_seed(5)
    return out * 2


def changed(trained: Trained, then: Any) -> None:
    from megatron.core.models.gpt import GPTModel

    def forward(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        return then(self, GPTModel.forward(self, *args, **kwargs))

    (model,) = trained.models
    model = model.module
    model.seeds = True
    model.__class__ = types.new_class("Changed", (GPTModel,))
    type(model).forward = forward


def on_rank(rank: int, ranks: int, names: list[str], what: str) -> dict[str, Any]:
    cpu.use("0.19.2")
    import overlapc.megatron as patched

    dist.init_process_group("gloo")
    found = {}
    for name in names:
        layout = LAYOUTS[name]
        set_up(layout)
        plain, ours = twins(layout)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            steps, said = [], []
            for trained in (plain, ours):
                changed(trained, globals()[what])
                if trained is ours:
                    options = {"merge": layout.merge, "solver": "heu", "profile": "estimate"}
                    patched.patch(**{**options, **layout.options})
                for number in range(STEPS):
                    trained.models[0].module.seeds = number == 0
                    steps.append(trained.step(number))
                    said.append(patched.explain())
        assert patched._steps is not None
        (chunk,) = patched._steps.chunks.values()
        found[name] = {
            "wrong": [
                f"step {i}: {difference}"
                for i, pair in enumerate(zip(steps[:STEPS], steps[STEPS:], strict=True))
                for difference in differences(*pair)
            ],
            "ran": dict(chunk.ran),
            "told": [str(each.message) for each in told if "overlapc" in str(each.message)],
            "said": said[STEPS:],
        }
        patched.unpatch()
        dist.barrier()
    dist.destroy_process_group()
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(("one microbatch",), id="one"),
        pytest.param(tuple(LAYOUTS)[:3], id="two", marks=pytest.mark.slow),
    ],
)
def test_an_attribute_set_in_the_first_forward_settles_in_one_plain_call(
    names: tuple[str, ...],
) -> None:
    cpu.need("0.19.2")
    for found in run_ranks(on_rank, LAYOUTS[names[0]].tp, list(names), "sets_once", timeout_s=290):
        for name in names:
            one, count = found[name], STEPS * LAYOUTS[name].microbatches
            assert (one["wrong"], one["told"]) == ([], []), name
            assert (one["ran"]["planned"], one["ran"]["plain"]) == (count - 1, 1), name
            assert "the attribute ready, and" in one["said"][-1], name
            assert "one call ran as plain Megatron, to settle that" in one["said"][-1], name


@pytest.mark.timeout(300)
def test_what_is_planned_later_is_not_said_to_be_plain() -> None:
    cpu.need("0.19.2")
    (found,) = run_ranks(on_rank, 1, ["one microbatch"], "seeds_at_first", timeout_s=290)
    one = found["one microbatch"]
    assert (one["wrong"], len(one["told"])) == ([], 1)
    assert (one["ran"]["planned"], one["ran"]["plain"]) == (2, 1)
    assert "manual_seed, and a graph would not (runs as plain Megatron)" in one["said"][0]
    for said in one["said"][1:]:
        assert "(ran as plain Megatron up to step 1, planned since)" in said
        assert "runs as plain" not in said
