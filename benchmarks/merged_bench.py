"""A step of several microbatches, merged and not, on a shaped link.

    python benchmarks/merged_bench.py --model gpt --rates 400,800 --microbatches 8 --reps 5

Two ranks as in `link_bench.py`. `megatron` is full recompute with Megatron's own overlap, each
weight gradient behind its layer's all-reduce, gradients added up as soon as they are there. At
level 1.0 the others have its *measured* peak: `unmerged`, the best plan of one microbatch after
the other, and `merged`, the forward of one with the backward of the one before. The budget that
takes as much is found by trying. Every repetition runs every variant once, in turn and in the
same processes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.duplex import init_duplex
from benchmarks.lab import as_two_ranks, interleaved, parse_rates, ratio, write_results
from benchmarks.link_bench import BATCH, SEQ, Bench, conditions, make_bench
from benchmarks.measuring import exposed_ms, gradients, least_peak, timed_ms
from examples.common import Text, leave, same, say
from overlapc.runtime.train_step import TrainStep

BASE = "megatron"
_TRIES, _NEAR = 4, 0.005  # of the peak


@dataclass
class Variant:
    """One way to run the step, and what was seen of it."""

    name: str
    step: TrainStep
    step_ms: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    exposed_ms: list[float] = field(default_factory=list)  # in waits for collectives, by rank
    bitwise_equal: bool | None = None

    @property
    def predicted(self) -> dict[str, float]:
        report = self.step.report
        reports = [report, *([report.merged] if report.merged else [])]
        compute, comm = (least(report, what) * report.microbatches for what in (0, 1))
        return {
            "step_ms": report.step_ns / 1e6,
            "peak_bytes": report.peak_bytes,
            "compute_ms": compute / 1e6,
            "comm_ms": comm / 1e6,
            "exposed_ms": sum(r.timeline.exposed_ns for r in reports) / 1e6,
        }


def least(report: Any, what: int) -> int:
    """All compute, or all communication, of the plan's issues; in ns."""
    costs = [report.problem.cost(text.removeprefix("R:")) for text in report.plan.order]
    return sum(cost.comm_ns if what else cost.compute_ns for cost in costs)


def run(bench: Bench, variant: Variant, batches: list[tuple[Tensor, Tensor]]) -> None:
    bench.model.zero_grad()
    torch.manual_seed(0)
    variant.step(batches)


def rank_main(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    init_duplex()
    bench = make_bench(args.model, args.width)
    stream = 0 if args.model == "gpt" else dist.get_rank()
    batches = [Text().batch(i, stream, BATCH, SEQ) for i in range(args.microbatches)]

    bench.model.zero_grad()
    torch.manual_seed(0)
    for batch in batches:
        bench.model(*batch).backward()
    reference = gradients(bench.model)

    def made(name: str, **options: Any) -> Variant:
        say(f"planning {name}")
        variant = Variant(name, TrainStep(bench.model, cache=cache, **options))
        run(bench, variant, batches)
        variant.bitwise_equal = same(reference, gradients(bench.model))
        variant.peak_bytes = least_peak(bench.model, lambda: variant.step(batches))
        return variant

    cache = str(Path(tempfile.mkdtemp()) / "costs")  # measured once
    everything = TrainStep(bench.model, solver="full", cache=cache, memory_budget="1TB")
    limit = everything.predict(batches).peak_bytes
    variants = [made(BASE, solver="megatron", memory_budget=limit)]
    for level in args.levels.split(","):
        most, budget = (int(float(level) * peak) for peak in (variants[0].peak_bytes, limit))
        for name, schedule in (("unmerged", "plain"), ("merged", "auto")):
            options = {"schedule": schedule, "solver": args.solver}
            variants.append(fitting(made, f"{name}@{level}", most, budget, options))
    for variant in variants:
        variant.exposed_ms = exposed_ms(lambda v=variant: run(bench, v, batches))
    for variant in interleaved(variants, args.reps):
        variant.step_ms.append(timed_ms(lambda v=variant: run(bench, v, batches)))
    if dist.get_rank() == 0:
        print_table(variants)
        rows = [
            {
                "name": v.name,
                "step_ms": v.step_ms,
                "peak_bytes": v.peak_bytes,
                "exposed_ms": v.exposed_ms,
                "bitwise_equal": v.bitwise_equal,
                "predicted": v.predicted,
            }
            for v in variants
        ]
        size = {"microbatches": args.microbatches, "width": args.width}
        document = conditions(args.model) | size | {"variants": rows}
        write_results(f"merged_{args.model}{args.width or ''}_{document['rate_mbit']}", document)
    leave()


def fitting(
    made: Callable[..., Variant], name: str, most: int, budget: int, options: dict[str, Any]
) -> Variant:
    """Of a few budgets the largest with which the variant's measured peak is at most `most`."""
    found = None
    for _ in range(_TRIES):
        variant = made(name, memory_budget=budget, **options)
        left = most - variant.peak_bytes
        say(f"  budget {budget / 2**20:.1f} MiB: measured {variant.peak_bytes / 2**20:.1f} MiB")
        if left >= 0:
            found = variant
            if left <= most * _NEAR:
                break
            budget += left
        elif found is not None:
            break
        else:
            budget += left - int(most * _NEAR)
    if found is None:
        raise RuntimeError(f"no plan of {name} was measured with at most {most / 2**20:.1f} MiB")
    return found


def print_table(variants: list[Variant]) -> None:
    base = next(v for v in variants if v.name == BASE)
    print("exposed: on the rank that waits least; the other waits for this one, too")
    print("                 measured                                 predicted")
    print(
        f"{'variant':14} {'step ms':>8} {'vs megatron':>20} {'MiB':>7} {'exposed':>8} {'grads':>6}"
        f" {'step ms':>8} {'MiB':>7} {'compute':>8} {'comm':>7}"
    )
    for v in variants:
        p = v.predicted
        print(
            f"{v.name:14} {statistics.median(v.step_ms):8.0f} {ratio(base.step_ms, v.step_ms):>20}"
            f" {v.peak_bytes / 2**20:7.1f} {min(v.exposed_ms):8.0f}"
            f" {'equal' if v.bitwise_equal else 'DIFFER':>6} {p['step_ms']:8.0f}"
            f" {p['peak_bytes'] / 2**20:7.1f} {p['compute_ms']:8.0f} {p['comm_ms']:7.0f}"
        )
    for merged in (v for v in variants if v.name.startswith("merged@")):
        rival = next(v for v in variants if v.name == "un" + merged.name)
        print(
            f"{merged.name} is {ratio(rival.step_ms, merged.step_ms)} times as fast as {rival.name}"
        )
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", choices=["gpt", "moe"], default="gpt")
    add("--width", type=int, help="width of the GPT: the narrower, the more communication")
    add("--rates", default="400,800", help="rates of the link in Mbit/s; none is unshaped")
    add("--microbatches", type=int, default=8)
    add("--reps", type=int, default=5)
    add("--levels", default="1.0,1.3", help="peaks, relative to full recompute's")
    add("--solver", default="overlap")
    args = parser.parse_args()
    as_two_ranks(rank_main, args, parse_rates(args.rates), f"{args.model}, ")


if __name__ == "__main__":
    main()
