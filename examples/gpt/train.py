"""Train a small GPT, tensor parallel or as a pipeline, with and without overlapc.

python examples/gpt/train.py --ranks 2 --compare
python examples/gpt/train.py --ranks 2 --compare --microbatches 8
python examples/gpt/train.py --pp 2 --schedule 1f1b --compare --microbatches 8
torchrun --nproc-per-node 2 examples/gpt/train.py --dtensor --steps 50
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples import common, pipeline
from examples.gpt.model import GPT, GPTConfig, cross_entropy, parallelize_dtensor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtensor", action="store_true", help="parallelize with DTensor instead")
    parser.add_argument("--tie-embeddings", action="store_true")
    common.add_arguments(parser)
    pipeline.add_arguments(parser)
    args = parser.parse_args()
    if args.pp > 1:
        args.ranks = args.pp
        if args.dtensor or args.tie_embeddings or args.slices > 1 or args.microbatches < 2:
            parser.error(
                "--pp takes --microbatches of 2 or more, and no --dtensor, --slices or tied weights"
            )
    common.launch(args.ranks)
    group = common.connect(args.link, args.link_mbit, args.device)

    config = GPTConfig(
        layers=args.layers,
        width=args.width,
        dropout=args.dropout,
        tie_embeddings=args.tie_embeddings,
        max_seq=args.seq,
    )

    def build() -> nn.Module:
        if args.dtensor:
            mesh = init_device_mesh(args.device, (group.size(),))
            return parallelize_dtensor(GPT(config).to(args.device), mesh)
        return GPT(config, group).to(args.device)

    def build_variant(name: str) -> common.Variant:
        if args.pp > 1:
            stages = pipeline.stages_here(GPT(config), group, args).to(args.device)
            step = pipeline.step_of(name, stages, cross_entropy, group, args)
            optimizer = torch.optim.AdamW(stages.parameters(), lr=1e-3)
            return common.Variant(name, stages, optimizer, add_up=step)
        model, add_up = build(), common.accumulate
        if name == "checkpoint":
            model = common.checkpoint_blocks(model)
        if name == "overlapc":
            model, add_up = common.optimized(model, args)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        return common.Variant(name, model, optimizer, add_up=add_up)

    text = common.Text()

    def batch(step: int) -> list[common.Batch]:
        """Tensor-parallel ranks all read the same batch."""
        found = []
        for i in range(step * args.microbatches, (step + 1) * args.microbatches):
            tokens, targets = text.batch(i, stream=0, batch=args.batch, seq=args.seq)
            found.append((tokens.to(args.device), targets.to(args.device)))
        return found

    variants = [build_variant(name) for name in args.variants.split(",")]
    common.train(variants, batch, args.steps)
    common.report(variants, batch(0))
    if args.pp > 1:
        pipeline.show(variants)
    common.leave()


if __name__ == "__main__":
    main()
