"""The training step of a pipeline, by overlapc and by `torch.distributed.pipelining`, for a
comparison as in `common.py`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

import overlapc
from examples.common import Batch, checkpoint_blocks
from overlapc.solvers.schedules import make_schedule

Loss = Callable[[Tensor, Tensor], Tensor]
# What PyTorch has for each of ours; for merged pieces there is nothing alike.
THEIRS: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "merged": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero-bubble": ScheduleInterleavedZeroBubble,
    "zero-bubble-v": ScheduleZBVZeroBubble,
}
SEVERAL = ("interleaved", "zero-bubble", "zero-bubble-v")  # that take a list of stages


class Stages(nn.ModuleList):
    """This rank's stages, and their numbers in the pipeline."""

    def __init__(self, modules: dict[int, nn.Module], count: int) -> None:
        super().__init__(modules.values())
        self.numbers, self.count = list(modules), count

    @property
    def is_last(self) -> bool:
        return self.count - 1 in self.numbers


def stages_here(cut: Callable[[int], list[nn.Module]], args: argparse.Namespace) -> Stages:
    """This rank's part of a model that `cut(n)` makes n stages of."""
    schedule = make_schedule(args.schedule, dist.get_world_size(), args.microbatches)
    every = cut(schedule.stages)
    mine = {s: every[s] for s, rank in schedule.rank_of.items() if rank == dist.get_rank()}
    return Stages(dict(sorted(mine.items())), schedule.stages)


def step_of(name: str, stages: Stages, loss: Loss, args: argparse.Namespace) -> Callable[..., Any]:
    """How the variant of that name adds up gradients: PyTorch's runtime, or ours."""
    numbered = dict(zip(stages.numbers, stages, strict=True))
    if name == "overlapc":
        pipeline = overlapc.Pipeline(
            numbered,
            args.schedule,
            args.microbatches,
            loss if stages.is_last else None,
            memory_budget=args.memory_budget,
            solver=args.solver,
        )
        stages.explain = pipeline.explain
        run = lambda given, wanted: pipeline(given, wanted)  # noqa: E731
    else:
        run = _theirs(name, numbered, stages.count, loss, args)

    def add_up(model: nn.Module, microbatches: list[Batch]) -> list[Tensor]:
        given, wanted = map(list, zip(*microbatches, strict=True))
        losses = torch.zeros(len(microbatches))
        found = run(given, wanted)
        if found:
            losses = torch.stack([each.detach().cpu() for each in found])
        dist.all_reduce(losses)
        return list(losses)

    return add_up


def _theirs(
    name: str, numbered: dict[int, nn.Module], count: int, loss: Loss, args: argparse.Namespace
) -> Callable[..., list[Tensor]]:
    device = torch.device(args.device)
    made = [
        PipelineStage(checkpoint_blocks(m) if name == "checkpoint" else m, s, count, device)
        for s, m in numbered.items()
    ]
    schedule = THEIRS[args.schedule](
        made if args.schedule in SEVERAL else made[0],
        args.microbatches,
        loss_fn=loss,
        scale_grads=False,
    )

    def run(given: list[Tensor], wanted: list[Tensor]) -> list[Tensor]:
        losses: list[Tensor] = []
        inputs = (torch.cat(given),) if 0 in numbered else ()
        last = {"target": torch.cat(wanted), "losses": losses} if count - 1 in numbered else {}
        schedule.step(*inputs, **last)
        return losses

    return run
