"""torchtitan's graph trainer, planned, against its own passes, on an emulated link in virtual time.

    python benchmarks/torchtitan_steps.py --layers 4 --width 512 --rates 800,400 --reps 9

Its passes (recompute by each of its memory policies, buckets, order) are as it has them. The plan
may take the peak of the default policy. Each repetition runs all variants in turn, from one
state; rho is the time of the traffic alone over that of the compute alone, per parameter.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.fsdp2 import slowest_ns
from benchmarks.lab import interleaved, ratio, write_results
from examples.common import leave, say
from examples.torchtitan import on_cpu
from overlapc.emulate import Link, init_link
from overlapc.profiler.memory import measure_peak

POLICIES = ("default", "eager", "full")


def gathered_into(part: torch.Tensor, _ranks: int, group: str, out: torch.Tensor) -> torch.Tensor:
    """Start a gather into a buffer, as their op does, which finds no group written in Python."""
    into: Any = dist.distributed_c10d._resolve_process_group(group)
    torch._C._distributed_c10d._register_work(out, into.all_gather_single(out, part))
    return out


def on_link(graph: fx.GraphModule, _inputs: Any) -> fx.GraphModule:
    """Have gathers into buffers run on the link."""
    for node in graph.graph.nodes:
        if node.target == torch.ops._c10d_functional.all_gather_into_tensor_out.default:
            node.target = gathered_into
    graph.recompile()
    return graph


def trainers(args: argparse.Namespace) -> dict[str, on_cpu.Titan]:
    from torchtitan.experiments.graph_trainer import passes, registry

    import overlapc.torchtitan

    def theirs(traced: Any, config: Any, *, parallel_dims: Any = None) -> list[Any]:
        given = passes.construct_default_graph_passes(traced, config, parallel_dims=parallel_dims)
        return [*given, on_link]

    registry.register_pass_pipeline("theirs")(theirs)
    made = {}
    for name in (*POLICIES, "planned"):
        config = on_cpu.config_of(
            args.model,
            args.layers,
            args.width,
            sequence=args.seq,
            **({"expert_parallel_degree": args.ranks} if args.model == "deepseek_v3" else {}),
        )
        if name == "planned":
            overlapc.torchtitan.planned(config, solver=args.solver)
        else:
            config.compile.pass_pipeline, config.compile.memory_policy = "theirs", name
        made[name] = on_cpu.Titan(config, args.ranks)
    return made


def rank_main(args: argparse.Namespace, rate: float) -> None:
    torch.set_num_threads(1)
    init_link(Link(alpha_s=args.alpha, bytes_per_s=rate * 1e6), "virtual")
    on_cpu.load()
    import overlapc.torchtitan

    made, rank = trainers(args), dist.get_rank()
    losses = {name: each.step(rank) for name, each in made.items()}  # traced and planned
    gradients = {name: each.gradients for name, each in made.items()}
    peaks = {}
    for name, each in made.items():
        each.model.zero_grad()
        peaks[name] = measure_peak(partial(each.step, rank))
    times: dict[str, list[int]] = {name: [] for name in made}
    for name in interleaved(list(made), args.reps):
        times[name].append(slowest_ns(partial(made[name].step, rank)))
    [report] = overlapc.torchtitan.reports
    costs = [report.problem.cost(op.name) for op in report.problem.trace.ops]
    compute, comm = sum(c.compute_ns for c in costs), sum(c.comm_ns for c in costs)
    say(
        f"{args.model} {args.layers} x {args.width}, {args.ranks} ranks, {rate:g} MB/s, rho "
        f"{comm / compute:.2f}: planned {statistics.median(times['planned']) / 1e6:.1f} ms, "
        f"predicted {report.step_ms:.1f} ms, bound {report.bound_ns / 1e6:.1f} ms"
    )
    for name in POLICIES:
        alike = all(torch.equal(gradients[name][key], g) for key, g in gradients["planned"].items())
        alike &= torch.equal(losses[name], losses["planned"])
        say(
            f"  {name:8} {statistics.median(times[name]) / 1e6:7.1f} ms, peak "
            f"{peaks[name] / 2**20:.1f} MiB: planned is {ratio(times[name], times['planned'])} "
            f"times as fast, peak {peaks['planned'] / 2**20:.1f} MiB (predicted "
            f"{report.peak_bytes / 2**20:.1f}); {'equal' if alike else 'other'} bits"
        )
    if rank == 0:
        name = f"torchtitan_{args.model}_{args.layers}_{args.width}_{rate:g}"
        found = {"times ns": times, "peaks": peaks, "rho": comm / compute}
        found |= {"predicted ms": report.step_ms, "predicted peak": report.peak_bytes}
        write_results(name, {"arguments": vars(args), "measured": found})
    leave()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--model", choices=("llama3", "deepseek_v3"), default="llama3")
    add("--ranks", type=int, default=2)
    add("--rates", default="800,400", help="of the link in MB/s")
    add("--layers", type=int, default=4)
    add("--width", type=int, default=512, help="of a llama3; 0: the debug model's")
    add("--seq", type=int, default=128)
    add("--alpha", type=float, default=50e-6, help="seconds that a collective takes to begin")
    add("--solver", default="overlap")
    add("--reps", type=int, default=9)
    args = parser.parse_args()
    if args.model != "llama3":
        args.width = 0
    if "RANK" in os.environ:
        rank_main(args, float(os.environ["OVERLAPC_RATE"]))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    ranks = f"--nproc-per-node={args.ranks}"
    for rate in args.rates.split(","):
        quiet = {"OMP_NUM_THREADS": "1", "KINETO_LOG_LEVEL": "99", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        rated = {**os.environ, **quiet, "OVERLAPC_RATE": rate}
        subprocess.run([*torchrun, ranks, *sys.argv], env=rated, check=True)


if __name__ == "__main__":
    main()
