"""What overlapc costs where there is nothing to hide: one rank, no collectives, a generous budget.

    python benchmarks/overhead.py [--reps 21]

Forward and backward of a GPT from one state: eager against `backend="eager"`, and `torch.compile`
against `backend="inductor"`. Variants take turns within a repetition; the ratio is that of
neighbours, its median and range are printed. Measured, one thread.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

import overlapc
from examples.gpt.model import GPT, GPTConfig


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--reps", type=int, default=21)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--no-inductor", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = GPT(GPTConfig(layers=args.layers, width=args.width, heads=8, max_seq=256))
    tokens = torch.randint(0, 256, (2, 256), generator=torch.Generator().manual_seed(0))

    def twin() -> GPT:
        return copy.deepcopy(model, {id(p): p for p in model.parameters()})

    pairs = [("eager", twin(), overlapc.optimize(twin(), memory_budget=1.5))]
    if not args.no_inductor:
        ours = overlapc.optimize(twin(), memory_budget=1.5, backend="inductor")
        pairs.append(("torch.compile", torch.compile(twin()), ours))
    for name, theirs, ours in pairs:
        ratios, base = [], []
        for _ in range(3):
            step(model, theirs, tokens), step(model, ours, tokens)
        for repetition in range(args.reps):
            first, second = (theirs, ours) if repetition % 2 else (ours, theirs)
            times = {id(f): step(model, f, tokens) for f in (first, second)}
            ratios.append(times[id(ours)] / times[id(theirs)])
            base.append(times[id(theirs)])
        print(
            f"overlapc / {name}: {statistics.median(ratios):.3f} "
            f"({min(ratios):.3f}..{max(ratios):.3f}), "
            f"{name} {statistics.median(base) * 1e3:.0f} ms, {args.reps} pairs, "
            f"plan {ours.plan.solver!r} of {len(ours.plan.order)} issues"
        )


def step(model: GPT, run: Callable[..., torch.Tensor], tokens: torch.Tensor) -> float:
    model.zero_grad()
    begin = time.perf_counter()
    run(tokens, tokens).backward()
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
