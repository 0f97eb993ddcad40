"""A model of Megatron's, trained in a loop of one's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from overlapc.core.errors import OptionError
from tests.megatron import cpu
from tests.megatron.models import Layout, Trained, batches, random_states, restore, set_up, twins
from tests.multiprocess.spawn import run_ranks

VERSION = "0.16.1"
MICROBATCHES = 3


class Weighted:
    """A loss that reads a number which changes from step to step."""

    scale = 1.0

    def __call__(self, model: Any, tokens: Tensor, places: Tensor, mask: Any, labels: Any) -> Any:
        out = model(tokens, places, mask, labels=labels)
        if self.scale < 0:
            raise ValueError("no loss")
        return out.mean() * self.scale / MICROBATCHES


def microbatches(step: int) -> list[tuple[Tensor, ...]]:
    places = torch.arange(16).unsqueeze(0).expand(2, -1)
    mask = torch.triu(torch.ones(16, 16, dtype=torch.bool), 1)[None, None]
    return [(t, places, mask, labels) for t, labels in batches(step, MICROBATCHES, (2, 16))]


def trained(model: Any, loss: Weighted, step: Any, random: dict[str, Tensor]) -> list[Tensor]:
    """Losses, gradients, weights and random states of three steps."""
    restore(random)
    found: list[Tensor] = []
    for number in range(3):
        loss.scale = 1.0 + number
        found += step(microbatches(number))
        with torch.no_grad():
            for parameter in model.parameters():
                found.append(parameter.grad.clone())
                parameter.add_(parameter.grad, alpha=-0.1)
                parameter.grad = None
                found.append(parameter.detach().clone())
    return [*found, *random_states().values()]


def on_rank(rank: int, ranks: int, layout: Layout) -> dict[str, Any]:
    cpu.use(VERSION)
    import overlapc.megatron

    dist.init_process_group("gloo")
    set_up(layout)
    plain, ours = twins(layout)
    loss = Weighted()

    def accumulate(each: list[Any]) -> list[Tensor]:
        losses = []
        for microbatch in each:
            losses.append(loss(plain.models[0], *microbatch))
            losses[-1].backward()
        return [one.detach() for one in losses]

    random = {name: state.clone() for name, state in plain.random.items()}
    expected = trained(plain.models[0], loss, accumulate, plain.random)
    options = {"solver": "heu", "profile": "estimate"}
    how = "auto" if layout.merge else "plain"
    step = overlapc.megatron.TrainStep(ours.models[0], loss, schedule=how, **options)
    loss.scale = -1.0
    with pytest.raises(ValueError, match="no loss"):
        step(microbatches(0))
    found = trained(ours.models[0], loss, step, random)
    (chunk,) = step._steps.chunks.values()
    left = "forward" in vars(chunk.module)
    dist.barrier()
    dist.destroy_process_group()
    same = [torch.equal(*pair) for pair in zip(expected, found, strict=True)]
    return {"same": all(same), "ran": chunk.ran, "left": left, "text": step.explain()}


@pytest.mark.multiprocess
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "layout",
    [
        Layout(tp=2, layers=1, dropout=0.1, ddp=None),
        pytest.param(
            Layout(ep=2, experts=4, layers=1, ddp=None, merge=False), marks=pytest.mark.slow
        ),
    ],
    ids=["tp", "ep"],
)
def test_a_loop_of_ones_own_trains_bitwise_alike(layout: Layout) -> None:
    cpu.need(VERSION)
    for found in run_ranks(on_rank, 2, layout, timeout_s=100):
        assert found["same"]
        assert not found["left"]
        assert (found["ran"]["planned"], found["ran"]["plain"]) == (3 * MICROBATCHES + 1, 0)
        assert found["ran"]["merged"] == (6 if layout.merge else 0)
        assert "ran: 10 planned" in found["text"]


def refused(rank: int, ranks: int) -> list[str]:
    cpu.use(VERSION)
    import overlapc.megatron

    dist.init_process_group("gloo")
    set_up(Layout(ranks=1))
    stage = Trained(Layout(ranks=1, ddp=None)).models[0]
    stage.post_process = False
    theirs = Trained(Layout(ranks=1)).models[0]
    torchs = torch.nn.parallel.DistributedDataParallel(theirs.module)
    told = []
    for model in (theirs, torchs, stage, torch.nn.Linear(2, 2)):
        with pytest.raises(OptionError) as error:
            overlapc.megatron.TrainStep(model)
        told.append(str(error.value))
    return told


def test_what_only_megatrons_own_loop_trains_is_refused() -> None:
    cpu.need(VERSION)
    ((ddp, torchs, stage, other),) = run_ranks(refused, 1)
    assert "in DistributedDataParallel: expected it in Megatron's own loop" in ddp
    assert "in torch's DistributedDataParallel, whose hooks a planned model does not run" in torchs
    assert "a stage of a pipeline" in stage
    assert "overlapc.TrainStep takes other models" in other
