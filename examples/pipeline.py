"""Runs an example as a pipeline: its model in stages, and its training step by overlapc and by
`torch.distributed.pipelining`, for a comparison as in `common.py`."""

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
from examples.common import Batch, Variant, checkpoint_blocks, say
from overlapc.solvers.pipeline.schedules import make_schedule

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
VOCAB = 256  # bytes
SEVERAL = ("interleaved", "zero-bubble", "zero-bubble-v")  # that take a list of stages


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--pp", type=int, default=1, help="pipeline-parallel ranks")
    add("--schedule", choices=sorted(THEIRS), default="1f1b", help="schedule of the pipeline")
    add("--slices", type=int, default=1, help="slices of each microbatch")


class Stage(nn.Module):
    """A stage of an example's model: some blocks, and embedding or head if it is the first or the
    last stage."""

    def __init__(self, model: nn.Module, blocks: range) -> None:
        super().__init__()
        self.is_first, self.is_last = blocks.start == 0, blocks.stop == len(model.blocks)
        if self.is_first:
            self.embed, self.position = model.embed, model.position
        self.blocks = nn.ModuleList(model.blocks[i] for i in blocks)
        if self.is_last:
            self.norm, self.head = model.norm, model.head

    def forward(self, x: Tensor) -> Tensor:
        if self.is_first:
            x = self.embed(x) + self.position(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) if self.is_last else x


def cut_into_stages(model: nn.Module, stages: int) -> list[Stage]:
    """Cut the model as evenly as possible; the first stages have one block more if needed."""
    counts = [len(part) for part in torch.arange(len(model.blocks)).tensor_split(stages)]
    ends = [sum(counts[: i + 1]) for i in range(stages)]
    return [Stage(model, range(end - n, end)) for n, end in zip(counts, ends, strict=True)]


class Stages(nn.ModuleList):
    """This rank's stages, and their numbers in the pipeline."""

    def __init__(self, modules: dict[int, nn.Module], count: int) -> None:
        super().__init__(modules.values())
        self.numbers, self.count = list(modules), count

    @property
    def is_last(self) -> bool:
        return self.count - 1 in self.numbers


def stages_here(model: nn.Module, group: dist.ProcessGroup, args: argparse.Namespace) -> Stages:
    """This rank's stages of the model, in a pipeline over `group`."""
    if group.size() != args.pp:  # torchrun started others
        raise SystemExit(
            f"--pp {args.pp} on {group.size()} ranks: expected as many ranks as stages"
        )
    schedule = make_schedule(args.schedule, group.size(), args.microbatches)
    every = cut_into_stages(model, schedule.stages)
    mine = {s: every[s] for s, rank in schedule.rank_of.items() if rank == group.rank()}
    return Stages(dict(sorted(mine.items())), schedule.stages)


def step_of(
    name: str, stages: Stages, loss: Loss, group: dist.ProcessGroup, args: argparse.Namespace
) -> Callable[..., Any]:
    """Make the function that adds up gradients for the variant of that name: by PyTorch's runtime,
    or ours."""
    numbered = dict(zip(stages.numbers, stages, strict=True))
    if name == "overlapc":
        pipeline = overlapc.Pipeline(
            numbered,
            args.schedule,
            args.microbatches,
            loss if stages.is_last else None,
            group=group,
            memory_budget=args.memory_budget,
            solver=args.solver,
            slices=args.slices,
        )
        stages.explain = pipeline.explain
        run = lambda given, wanted: pipeline(given, wanted)  # noqa: E731
    else:
        run = _theirs(name, numbered, stages.count, loss, group, args)

    def add_up(model: nn.Module, microbatches: list[Batch]) -> list[Tensor]:
        given, wanted = map(list, zip(*microbatches, strict=True))
        losses = torch.zeros(len(microbatches))
        found = run(given, wanted)
        if found:
            losses = torch.stack([each.detach().cpu() for each in found])
        dist.all_reduce(losses, group=group)
        return list(losses)

    return add_up


def show(variants: list[Variant]) -> None:
    """Print overlapc's predicted picture of all ranks."""
    for variant in variants:
        if variant.name == "overlapc":
            say("\n" + variant.model.explain().split("\n\n")[0])


def _theirs(
    name: str,
    numbered: dict[int, nn.Module],
    count: int,
    loss: Loss,
    group: dist.ProcessGroup,
    args: argparse.Namespace,
) -> Callable[..., list[Tensor]]:
    device = torch.device(args.device)
    # Shapes are told, for their runtime finds them on meta tensors, which route no tokens.
    tokens = torch.empty(args.batch, args.seq, dtype=torch.long, device="meta")
    between = torch.empty(args.batch, args.seq, args.width, device="meta", requires_grad=True)
    made = []
    for s, stage in numbered.items():
        given = between if s else tokens
        gives = between if s < count - 1 else between[..., :1].expand(-1, -1, VOCAB)
        module = checkpoint_blocks(stage) if name == "checkpoint" else stage
        made.append(PipelineStage(module, s, count, device, given, gives, group=group))
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
