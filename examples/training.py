"""`compare` trains an example's variants side by side and compares them, for both `train.py`."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from examples import common, pipeline

LEARNING_RATE = 1e-3


def compare(
    args: argparse.Namespace,
    build: Callable[[], nn.Module],
    loss: pipeline.Loss,
    along: dist.ProcessGroup,
    stream: int = 0,
    after_backward: Callable[[nn.Module], None] = lambda model: None,
) -> None:
    """Train each of `args.variants` on the same batches, print the comparison, and end this rank.

    `build` makes the model. With `--pp` the model is cut into stages over the ranks of `along`, and
    `loss` comes behind the last stage. Ranks of one `stream` read the same batches.
    """

    def variant(name: str) -> common.Variant:
        model, add_up = build(), common.accumulate
        if args.pp > 1:
            model = pipeline.stages_here(model, along, args).to(args.device)
            add_up = pipeline.step_of(name, model, loss, along, args)
        else:
            model = model.to(args.device)
            if name == "checkpoint":
                model = common.checkpoint_blocks(model)
            if name == "overlapc":
                model, add_up = common.optimized(model, args)
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
        return common.Variant(name, model, optimizer, after_backward, add_up)

    text = common.Text()

    def batch(step: int) -> list[common.Batch]:
        found = []
        for i in range(step * args.microbatches, (step + 1) * args.microbatches):
            tokens, targets = text.batch(i, stream, batch=args.batch, seq=args.seq)
            found.append((tokens.to(args.device), targets.to(args.device)))
        return found

    variants = [variant(name) for name in args.variants.split(",")]
    common.train(variants, batch, args.steps)
    common.report(variants, batch(0))
    if args.pp > 1:
        pipeline.show(variants)
    common.leave()
