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

from torch import nn
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples import common, pipeline
from examples.gpt.model import GPT, GPTConfig, cross_entropy, parallelize_dtensor
from examples.training import compare


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtensor", action="store_true", help="parallelize with DTensor instead")
    parser.add_argument("--tie-embeddings", action="store_true")
    common.add_arguments(parser)
    pipeline.add_arguments(parser)
    args = parser.parse_args()
    if args.pp > 1:
        args.ranks = args.pp
        if args.dtensor or args.tie_embeddings or args.microbatches < 2:
            parser.error("--pp takes --microbatches of 2 or more, and no --dtensor or tied weights")
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
        return GPT(config, None if args.pp > 1 else group)

    compare(args, build, cross_entropy, along=group)  # all ranks read the same batches


if __name__ == "__main__":
    main()
