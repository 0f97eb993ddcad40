"""Train a small mixture-of-experts GPT, expert parallel, with and without overlapc.

python examples/moe/train.py --ranks 2 --compare
torchrun --nproc-per-node 2 examples/moe/train.py --top-k 1 --steps 50
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import overlapc
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
        if name == "checkpoint":
            model = common.checkpoint_blocks(model)
        if name == "overlapc":
            model = overlapc.optimize(
                model, memory_budget=args.memory_budget, solver=args.solver, backend=args.backend
            )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        return common.Variant(name, model, optimizer, lambda m: average_gradients(m, group))

    text = common.Text()

    def batch(step: int) -> tuple[Tensor, Tensor]:
        """Every rank reads a batch of its own."""
        tokens, targets = text.batch(step, stream=group.rank(), batch=args.batch, seq=args.seq)
        return tokens.to(args.device), targets.to(args.device)

    variants = [build_variant(name) for name in args.variants.split(",")]
    common.train(variants, batch, args.steps)
    common.report(variants, batch(0))
    common.leave()


if __name__ == "__main__":
    main()
