"""Train a small mixture-of-experts GPT, expert parallel, with and without overlapc.

python examples/moe/train.py --ranks 2 --compare
python examples/moe/train.py --ranks 2 --compare --microbatches 4
torchrun --nproc-per-node 2 examples/moe/train.py --top-k 1 --steps 50
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples import common
from examples.moe.model import MoEConfig, MoEGPT, average_gradients


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--experts", type=int, default=4)
    parser.add_argument("--top-k", type=int, default=2)
    common.add_arguments(parser)
    args = parser.parse_args()
    common.launch(args.ranks)
    group = common.connect(args.link, args.link_mbit, args.device)

    config = MoEConfig(
        layers=args.layers,
        width=args.width,
        experts=args.experts,
        top_k=args.top_k,
        dropout=args.dropout,
        max_seq=args.seq,
    )

    def build_variant(name: str) -> common.Variant:
        model: nn.Module = MoEGPT(config, group).to(args.device)
        add_up = common.accumulate
        if name == "checkpoint":
            model = common.checkpoint_blocks(model)
        if name == "overlapc":
            model, add_up = common.optimized(model, args)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        return common.Variant(name, model, optimizer, lambda m: average_gradients(m, group), add_up)

    text = common.Text()

    def batch(step: int) -> list[common.Batch]:
        """Every rank reads a batch of its own."""
        found = []
        for i in range(step * args.microbatches, (step + 1) * args.microbatches):
            tokens, targets = text.batch(i, stream=group.rank(), batch=args.batch, seq=args.seq)
            found.append((tokens.to(args.device), targets.to(args.device)))
        return found

    variants = [build_variant(name) for name in args.variants.split(",")]
    common.train(variants, batch, args.steps)
    common.report(variants, batch(0))
    common.leave()


if __name__ == "__main__":
    main()
