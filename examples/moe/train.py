"""Train a small mixture-of-experts GPT, expert parallel, also in a pipeline, with and without
overlapc.

python examples/moe/train.py --ranks 2 --compare
python examples/moe/train.py --ranks 2 --compare --microbatches 4
python examples/moe/train.py --ranks 2 --compare --batch 8 --slices 2 --steps 8
python examples/moe/train.py --ranks 4 --pp 2 --compare --microbatches 4
torchrun --nproc-per-node 2 examples/moe/train.py --top-k 1 --steps 50
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples import common, pipeline
from examples.gpt.model import cross_entropy
from examples.moe.model import MoEConfig, MoEGPT, average_gradients
from examples.training import compare


def dimensions(stages: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """This rank's group of experts, neighbours, and its pipeline, over one rank of each group."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if ranks % stages:
        raise SystemExit(f"--pp {stages} does not divide {ranks} ranks")
    each = ranks // stages
    across = [dist.new_group(list(range(s * each, (s + 1) * each))) for s in range(stages)]
    along = [dist.new_group(list(range(e, ranks, each))) for e in range(each)]
    return across[rank // each], along[rank % each]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--experts", type=int, default=4)
    parser.add_argument("--top-k", type=int, default=2)
    common.add_arguments(parser)
    pipeline.add_arguments(parser)
    args = parser.parse_args()
    ranks = int(os.environ.get("WORLD_SIZE", args.ranks))  # torchrun's, where it has begun
    if args.pp > 1 and (ranks % args.pp or args.microbatches < 2):
        parser.error("--pp takes ranks that it divides, and --microbatches of 2 or more")
    if args.experts % (ranks // args.pp):
        each = f"{ranks // args.pp} ranks"
        parser.error(f"{args.experts} experts cannot be divided among {each} of a stage")
    common.launch(args.ranks)
    common.connect(args.link, args.link_mbit, args.device)
    group, along = dimensions(args.pp)

    config = MoEConfig(
        layers=args.layers,
        width=args.width,
        experts=args.experts,
        top_k=args.top_k,
        dropout=args.dropout,
        max_seq=args.seq,
    )

    def build() -> nn.Module:
        return MoEGPT(config, group)

    def averaged(model: nn.Module) -> None:
        average_gradients(model, group)

    # Every rank of a group of experts reads batches of its own.
    compare(args, build, cross_entropy, along, group.rank(), averaged)


if __name__ == "__main__":
    main()
