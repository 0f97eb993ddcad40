"""How long it takes, and how much memory, to plan a large model on one small machine.

    python benchmarks/scale.py [--layers 48 --width 6144 --ranks 8]

A GPT of more than 20 billion parameters, tensor parallel over fake ranks, on fake tensors:
capture, plan (costs estimated for an A100) and rewrite, as `overlapc.predict` and `rewrite`
do it. Times are measured and leave out importing torch.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--width", type=int, default=6144)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument(
        "--budget", type=float, default=0.5, help="fraction of eager's activation memory"
    )
    args = parser.parse_args()

    import torch
    import torch.distributed as dist
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from examples.gpt.model import GPT, GPTConfig
    from overlapc.api import capture, rewrite
    from overlapc.planning import road
    from overlapc.planning.options import Options

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=args.ranks)
    config = GPTConfig(
        vocab=50304, layers=args.layers, width=args.width, heads=args.width // 128, max_seq=args.seq
    )
    with FakeTensorMode():
        torch.set_default_dtype(torch.bfloat16)
        model = GPT(config, dist.group.WORLD)
        tokens = torch.zeros(args.batch, args.seq, dtype=torch.long)
        began = time.perf_counter()
        captured = capture(model, tokens, tokens)
        options = Options(profile="estimate", hardware="a100-sxm-80", memory_budget=args.budget)
        report = road.plan(captured, options).report
        planned = time.perf_counter()
    rewrite(captured, report.plan)
    done = time.perf_counter()
    parameters = args.layers * 12 * args.width**2 + config.vocab * args.width
    peak_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    print(report.explain().split("\n  collective")[0])
    print(
        f"{parameters / 1e9:.1f}B parameters, {args.layers} layers, TP={args.ranks}: "
        f"capture and plan {planned - began:.1f} s, rewrite {done - planned:.1f} s, "
        f"together {done - began:.1f} s; resident memory at most {peak_gb:.2f} GB"
    )


if __name__ == "__main__":
    main()
