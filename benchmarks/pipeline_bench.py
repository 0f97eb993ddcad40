"""A pipeline of two ranks on a shaped link, against `torch.distributed.pipelining`.

    python benchmarks/pipeline_bench.py --rates 400 --microbatches 8 --reps 5

Each rank is pinned to a core of its own and in a network namespace of its own (`lab.py`). PyTorch's
runtime gets the same stage modules: 1F1B with full recompute (`checkpoint` around each block), 1F1B
without, zero-bubble with one stage a rank and as a V. Each of their measured peaks is a budget
for overlapc, and so are `--levels` of the first one's. At every such peak ours meet the fastest of
PyTorch's that fits, and what no rows of these stages can beat: a rank's work, all of it, from when
its first input can be there. Every repetition runs every variant once, in turn and in the same
processes.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.lab import as_two_ranks, interleaved, parse_rates, ratio, write_results
from benchmarks.measuring import slowest, timed_ms
from examples.common import Text, checkpoint_blocks, leave, same, say
from examples.gpt.model import GPT, GPTConfig, cross_entropy
from examples.pipeline import cut_into_stages
from overlapc.core.errors import Infeasible
from overlapc.core.pipeline import StageCost
from overlapc.profiler.memory import measure_peak
from overlapc.runtime.pipeline import Pipeline

SIZE = GPTConfig(layers=8, width=512, heads=8, max_seq=256)
BATCH, SEQ = 2, 256
RIVALS = ("torch 1f1b full", "torch 1f1b", "torch zero-bubble", "torch zero-bubble-v")


@dataclass
class Variant:
    """One way to run the step, and what was seen of it."""

    name: str
    modules: list[nn.Module]
    step: Callable[[], Any]
    step_ms: list[float] = field(default_factory=list)
    peak_bytes: list[int] = field(default_factory=list)  # by rank
    bitwise_equal: bool | None = None
    close: bool | None = None
    pipeline: Pipeline | None = None
    limit: int = 0  # of the peak, where it is ours

    def run(self) -> None:
        for module in self.modules:
            module.zero_grad()
        self.step()

    def gradients(self) -> list[Tensor]:
        return [p.grad.clone() for module in self.modules for p in module.parameters()]


def stages_here(name: str, rank: int) -> dict[int, nn.Module]:
    """Fresh modules of this rank's stages: halves, or for a V the quarters it has."""
    model = GPT(SIZE)
    if name.endswith("-v"):
        quarters = cut_into_stages(model, 4)
        return {stage: quarters[stage] for stage in ((0, 3) if rank == 0 else (1, 2))}
    return {rank: cut_into_stages(model, 2)[rank]}


def torch_variant(name: str, batches: list[tuple[Tensor, Tensor]]) -> Variant:
    rank, count = dist.get_rank(), len(batches)
    modules = stages_here(name, rank)
    stages = [
        PipelineStage(
            checkpoint_blocks(module) if name.endswith("full") else module,
            stage,
            4 if len(modules) == 2 else 2,
            torch.device("cpu"),
        )
        for stage, module in modules.items()
    ]
    how = {"loss_fn": cross_entropy, "scale_grads": False}
    if name.endswith("-v"):
        schedule: Any = ScheduleZBVZeroBubble(stages, count, **how)
    elif name.endswith("bubble"):
        schedule = ScheduleInterleavedZeroBubble(stages, count, **how)
    else:
        schedule = Schedule1F1B(stages[0], count, **how)
    inputs, targets = (torch.cat(part) for part in zip(*batches, strict=True))
    last = (3 if len(modules) == 2 else 1) in modules

    def step() -> None:
        given = (inputs,) if 0 in modules else ()
        schedule.step(*given, **({"target": targets, "losses": []} if last else {}))

    return Variant(name, list(modules.values()), step)


def our_variant(
    rows: str, at: str, limit: int, batches: list[tuple[Tensor, Tensor]], costs: str
) -> Variant:
    """Ours within a peak on either rank: the budget is what is left beside what a pipeline holds
    that no plan has a say in, found by trying. `costs` is a file of this rank in which measured
    ones are kept: all variants are planned with the same."""
    rank, count = dist.get_rank(), len(batches)
    inputs, targets = map(list, zip(*batches, strict=True))
    budget = limit
    for _ in range(4):
        modules = stages_here(rows, rank)
        last = (3 if len(modules) == 2 else 1) in modules
        pipeline = Pipeline(
            modules, rows, count, cross_entropy if last else None,
            memory_budget=budget // len(modules), cache=costs,
        )  # fmt: skip
        variant = Variant(
            f"overlapc {rows} @ {at}",
            list(modules.values()),
            lambda pipeline=pipeline: pipeline(inputs, targets),
            pipeline=pipeline,
            limit=limit,
        )
        measure(variant)
        say(
            f"  budget {budget / 2**20:.1f}: measured {mib(variant.peak_bytes)}, predicted "
            f"{mib(predicted_peaks(variant))}"
        )
        over = max(variant.peak_bytes) - limit
        if over <= 0:
            break
        budget -= over + limit // 200
    return variant


def measure(variant: Variant) -> None:
    variant.run()
    peaks = []
    for _ in range(2):  # one can be too high by a buffer, never too low
        for module in variant.modules:
            module.zero_grad()
        peaks.append(measure_peak(variant.step))
    found = torch.zeros(2, dtype=torch.int64)
    found[dist.get_rank()] = min(peaks)
    dist.all_reduce(found)
    variant.peak_bytes = found.tolist()


def rank_main(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    text = Text()
    batches = [text.batch(i, 0, BATCH, SEQ) for i in range(args.microbatches)]
    variants = []
    rivals = []
    for name in args.rivals.split(","):
        say(f"preparing {name}")
        rivals.append(torch_variant(name, batches))
        measure(rivals[-1])
        variants.append(rivals[-1])
    measured = tempfile.TemporaryDirectory()
    limits = {rival.name: max(rival.peak_bytes) for rival in rivals}
    for level in filter(None, args.levels.split(",")):
        limits[f"{level} of {rivals[0].name}"] = int(float(level) * max(rivals[0].peak_bytes))
    for at, limit in limits.items():
        for rows in args.rows.split(","):
            say(f"planning {rows} @ {at}: {limit / 2**20:.1f} MiB")
            try:
                variants.append(our_variant(rows, at, limit, batches, f"{measured.name}/costs"))
            except Infeasible as error:
                say(f"  {error}")
                continue
            if args.show:
                say(variants[-1].pipeline.explain().split("\n\n")[0])
    measured.cleanup()
    reference: dict[bool, list[Tensor]] = {}
    for variant in variants:
        variant.run()
        found = variant.gradients()
        expected = reference.setdefault(len(variant.modules) == 2, found)
        variant.bitwise_equal = same(expected, found)
        near = all(torch.allclose(a, b, 1e-4, 1e-6) for a, b in zip(expected, found, strict=True))
        variant.close = slowest(float(not near)) == 0
    for variant in interleaved(variants, args.reps):
        variant.step_ms.append(timed_ms(variant.run))
    if dist.get_rank() == 0:
        print_table(variants)
        save(variants, args)
    leave()


def print_table(variants: list[Variant]) -> None:
    print(
        f"{'variant':48} {'step ms':>8} {'MiB, by rank':>14} {'grads':>7}"
        f" {'predicted ms':>12} {'MiB':>14} {'bubble':>12}"
    )
    for v in variants:
        line = f"{v.name:48} {statistics.median(v.step_ms):8.0f} {mib(v.peak_bytes):>14}"
        line += f" {'equal' if v.bitwise_equal else 'close' if v.close else 'DIFFER':>7}"
        if v.pipeline is not None:
            timeline = v.pipeline.timeline
            bubbles = (f"{timeline.bubble_ns(r) / timeline.step_ns:.1%}" for r in (0, 1))
            line += f" {timeline.step_ns / 1e6:12.0f} {mib(predicted_peaks(v)):>14}"
            line += f" {' '.join(bubbles):>12}"
        print(line)
    theirs = [v for v in variants if v.pipeline is None]
    for ours in (v for v in variants if v.pipeline is not None):
        rival = min((v for v in theirs if max(v.peak_bytes) <= ours.limit), key=middle)
        print(
            f"{ours.name}, {ours.limit / 2**20:.1f} MiB: {ratio(rival.step_ms, ours.step_ms)} "
            f"times as fast as {rival.name}; none could be more than "
            f"{middle(rival) / least_ms(ours.pipeline):.3f}"
        )
    sys.stdout.flush()


def middle(variant: Variant) -> float:
    return statistics.median(variant.step_ms)


def least_ms(pipeline: Pipeline) -> float:
    """No rows take less: the rank that begins last does all its work without recompute."""
    rows, costs = pipeline.schedule, pipeline.costs
    ends = []
    for rank in range(len(rows.rows)):
        mine = [stage for stage, holder in rows.rank_of.items() if holder == rank]
        before = sum(cost.forward_ns + cost.sent_ns for cost in costs[: min(mine)])
        each = sum(cost.forward_ns + backward_ns(cost) for cost in (costs[s] for s in mine))
        ends.append(before + rows.microbatches * each)
    return max(ends) / 1e6


def backward_ns(cost: StageCost) -> int:
    """Without recompute, in one or in two."""
    apart = cost.input_ns + cost.weight_ns
    return min(apart, cost.whole_ns - cost.recompute_ns) if cost.whole_ns else apart


def predicted_peaks(variant: Variant) -> list[int]:
    """On rank 0; the other rank's gradients are as large."""
    gradients = sum(p.nbytes for module in variant.modules for p in module.parameters())
    return variant.pipeline.timeline.peaks_with([gradients] * 2)


def mib(sizes: list[int]) -> str:
    return " ".join(f"{size / 2**20:.1f}" for size in sizes)


def save(variants: list[Variant], args: argparse.Namespace) -> None:
    rows = []
    for v in variants:
        row: dict[str, Any] = {
            "name": v.name,
            "step_ms": v.step_ms,
            "peak_bytes": v.peak_bytes,
            "bitwise_equal": v.bitwise_equal,
        }
        if v.pipeline is not None:
            timeline = v.pipeline.timeline
            row["predicted"] = {
                "step_ms": timeline.step_ns / 1e6,
                "peak_bytes": predicted_peaks(v),
            }
        rows.append(row)
    rate = os.environ.get("OVERLAPC_LAB_MBIT", "none")
    document = {
        "what": "a training step of a pipeline on two ranks over a shaped link, measured",
        "rate_mbit": rate,
        "size": str(SIZE),
        "batch": [BATCH, SEQ],
        "microbatches": args.microbatches,
        "threads_per_rank": 1,
        "torch": torch.__version__,
        "variants": rows,
    }
    count = "" if args.microbatches == 8 else f"_{args.microbatches}"
    write_results(f"pipeline_{rate}{count}", document)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--rates", default="400", help="rates of the link in Mbit/s; none is unshaped")
    add("--microbatches", type=int, default=8)
    add("--reps", type=int, default=5)
    add("--rows", default="1f1b", help="schedules of ours, with commas")
    add("--rivals", default=",".join(RIVALS))
    add("--levels", default="1.5", help="further peaks, relative to the first rival's")
    add("--show", action="store_true", help="the predicted pictures")
    args = parser.parse_args()
    as_two_ranks(rank_main, args, parse_rates(args.rates))


if __name__ == "__main__":
    main()
