"""Sharded models, planned, against FSDP2's own order, on an emulated link in virtual time.

    python benchmarks/fsdp2.py --ranks 2 --rates 500,150,75 --reps 15

A GPT whose blocks FSDP2 shards, or with `--model moe` one with experts, all of them on each rank.
`own` is FSDP2's order in the same executor: each group gathered
one ahead, kept or gathered again as FSDP2 does, reductions where gradients are there. (Eager FSDP2
on a CPU waits for each collective, which no GPU does.) Each front door has the peak of `own`.

    one batch           `optimize`
    each, last          four microbatches: `TrainStep(reduce=...)` against the same loop in `own`

Each repetition runs all variants in turn, from one state. rho is the time of the traffic alone over
that of the compute alone, of one batch.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import overlapc
from benchmarks.lab import interleaved, ratio, write_results
from benchmarks.merged_bench import least
from examples.common import Text, leave, same, say
from examples.gpt.model import GPT, GPTConfig
from examples.moe.model import MoEConfig, MoEGPT
from overlapc.emulate import Link, init_link, now_ns
from overlapc.planning import road
from overlapc.profiler.memory import measure_peak

MICROBATCHES = 4
_PEAKS = 5


def own(problem: Any, _step: Any, _options: Any, _choices: Any, theirs: Any = None) -> Any:
    """The plan of what FSDP2 does by itself, in the place of the search."""
    return (theirs,)


def built(args: argparse.Namespace) -> Any:
    torch.manual_seed(0)
    sizes = {"layers": args.layers, "width": args.width, "heads": 4, "max_seq": args.seq}
    model: Any = GPT(GPTConfig(**sizes), None)
    if args.model == "moe":
        model = MoEGPT(MoEConfig(**sizes), args.alone)
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def loop(call: Callable[..., Tensor], model: Any, last: bool) -> Callable[[Any], None]:
    """One backward for each microbatch; reduced each time, or by the last one."""

    def run(batches: Sequence[Any]) -> None:
        for i, batch in enumerate(batches):
            model.set_requires_gradient_sync(not last or i == len(batches) - 1)
            call(*batch).backward()

    return run


def peak(model: Any, run: Callable[[], Any]) -> int:
    """The least of several, since gloo's threads may let go of a buffer late."""
    found = []
    for _ in range(_PEAKS):
        model.zero_grad()
        found.append(measure_peak(run))
    return min(found)


def slowest_ns(run: Callable[[], Any]) -> int:
    dist.barrier()
    begin = now_ns()
    run()
    took = torch.tensor([now_ns() - begin])
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return int(took)


def rank_main(args: argparse.Namespace, rate: float) -> None:
    torch.set_num_threads(1)
    init_link(Link(alpha_s=args.alpha, bytes_per_s=rate * 1e6), "virtual")
    args.alone, _ = dist.new_subgroups(1)
    if args.model == "moe":  # how many rows come to an expert is data
        torch._dynamo.config.capture_scalar_outputs = True
    say(f"\n{args.model}, {args.ranks} ranks, {rate:g} MB/s")
    found = measured(args)
    if dist.get_rank() == 0:
        name = f"fsdp2{'_moe' * (args.model == 'moe')}_{args.ranks}_{rate:g}"
        told = {key: value for key, value in vars(args).items() if key != "alone"}
        write_results(name, {"arguments": told, "measured": found})
    leave()


def measured(args: argparse.Namespace) -> dict[str, Any]:
    batches = [Text().batch(i, dist.get_rank(), args.batch, args.seq) for i in range(MICROBATCHES)]
    found: dict[str, Any] = {}
    options: dict[str, Any] = {"solver": args.solver}
    for what in ("one batch", "each", "last"):
        torch.compiler.reset()
        mine, last = batches[:1] if what == "one batch" else batches, what == "last"
        theirs, ours = built(args), built(args)
        twin = overlapc.optimize(theirs, **options)
        before = loop(twin, theirs, last)
        if what == "one batch":
            planned = overlapc.optimize(ours, **options)
            after = loop(planned, ours, last)
        else:
            planned = overlapc.TrainStep(ours, reduce=what, **options)
            after = planned
        with mock.patch.object(road, "_solved", own):
            before(mine)
        after(mine)
        grads = [[p.grad.to_local().clone() for p in m.parameters()] for m in (theirs, ours)]
        held = [peak(theirs, partial(before, mine)), peak(ours, partial(after, mine))]
        variants = {"own": (theirs, before, []), "planned": (ours, after, [])}
        for model, run, times in interleaved(list(variants.values()), args.reps):
            model.zero_grad()
            times.append(slowest_ns(partial(run, mine)))
        base, better = (times for _, _, times in variants.values())
        report = twin.graphs[0]
        compute, comm = (least(report, i) for i in (0, 1))
        mean = planned.graphs[0] if what == "one batch" else planned.report
        found[what] = {
            "own ms": [t / 1e6 for t in base],
            "planned ms": [t / 1e6 for t in better],
            "bitwise": same(*grads),
            "rho": comm / compute,
            "predicted ms": [report.step_ns / 1e6, planned.step_ms],
            "peaks": [report.peak_bytes, mean.peak_bytes],
            "measured peaks": held,
        }
        say(
            f"{what:10} own {statistics.median(base) / 1e6:7.1f} ms, planned "
            f"{statistics.median(better) / 1e6:7.1f} ms: {ratio(base, better)} times as fast; "
            f"{'equal' if found[what]['bitwise'] else 'DIFFERENT'}; rho {comm / compute:.2f}; "
            f"predicted {report.step_ns / 1e6:.1f} and {planned.step_ms:.1f} ms, peaks "
            f"{report.peak_bytes / 2**20:.1f} and {mean.peak_bytes / 2**20:.1f} MiB (measured "
            f"{held[0] / 2**20:.1f} and {held[1] / 2**20:.1f})"
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--model", choices=("gpt", "moe"), default="gpt")
    add("--ranks", type=int, default=2)
    add("--rates", default="500,150,75", help="of the link in MB/s")
    add("--layers", type=int, default=4)
    add("--width", type=int, default=256)
    add("--batch", type=int, default=4)
    add("--seq", type=int, default=128)
    add("--alpha", type=float, default=50e-6, help="seconds that a collective takes to begin")
    add("--solver", default="overlap")
    add("--reps", type=int, default=15)
    args = parser.parse_args()
    if "RANK" in os.environ:
        rank_main(args, float(os.environ["OVERLAPC_RATE"]))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    ranks = f"--nproc-per-node={args.ranks}"
    for rate in args.rates.split(","):
        rated = {**os.environ, "OVERLAPC_RATE": rate, "OMP_NUM_THREADS": "1"}
        subprocess.run([*torchrun, ranks, *sys.argv], env=rated, check=True)


if __name__ == "__main__":
    main()
