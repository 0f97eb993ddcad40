"""How long torchtitan's graph trainer takes to plan a step of a deep model, and again from kept
plans: one rank of many, on fake ranks, traced and planned, not run.

    python benchmarks/torchtitan_deep.py --layers 32 --width 4096 --ranks 64 --solvers heu,overlap

Costs are estimated for an H100. Without a budget the step may take what torchtitan's own passes
take, which run once to see it. Seconds are measured; a step's time and peak are predicted.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


class Planned(Exception):
    """Ends the step before it runs."""


def planned_once(args: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from examples.torchtitan import on_cpu

    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=args.ranks)
    on_cpu.load()
    import overlapc.torchtitan
    from overlapc.runtime.whole import plan_step

    def timed(*given: Any) -> None:
        traced_s = time.monotonic() - began
        report = plan_step(*given)
        trace, plan_s = report.problem.trace, time.monotonic() - began - traced_s
        print(
            f"{args.solvers}: traced in {traced_s:.1f} s (with their passes), planned and put in "
            f"order in {plan_s:.1f} s: {len(trace.ops)} ops, digest {trace.digest}, step "
            f"{report.step_ms:.1f} ms (bound {report.bound_ns / 1e6:.1f}), peak "
            f"{report.peak_bytes / 1e9:.2f} of {(report.problem.budget_bytes or 0) / 1e9:.2f} GB",
            flush=True,
        )
        raise Planned

    overlapc.torchtitan.plan_step = timed  # type: ignore[assignment]
    config = on_cpu.config_of(
        "llama3", args.layers, args.width, sequence=args.seq, precision="bfloat16"
    )
    config.training.local_batch_size = 1
    overlapc.torchtitan.planned(
        config,
        solver=args.solvers,
        memory_budget=args.memory_budget,
        profile="estimate",
        hardware="h100-sxm",
        cache=args.cache,
    )
    trainer = on_cpu.Titan(config, args.ranks, values=False)
    began = time.monotonic()
    try:
        trainer.step(0)
    except Planned:
        return


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--layers", type=int, default=32)
    add("--width", type=int, default=4096)
    add("--ranks", type=int, default=64)
    add("--seq", type=int, default=8192)
    add("--solvers", default="heu,overlap")
    add("--memory-budget")
    add("--cache", help="plan once, with this file")
    args = parser.parse_args()
    if args.cache:
        planned_once(args)
        return
    for solver in args.solvers.split(","):
        with tempfile.TemporaryDirectory() as folder:
            once = [*sys.argv, "--solvers", solver, "--cache", f"{folder}/costs.json"]
            for _ in range(2):
                subprocess.run([sys.executable, *once], check=True, stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
