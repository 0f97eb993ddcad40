"""overlapc against eager, checkpointing and PyTorch's own compiler passes, on a shaped link.

    python benchmarks/link_bench.py --model gpt --rates 400,800,none --reps 7

Two ranks, each pinned to a core of its own and in a network namespace of its own (`lab.py`), run
forward and backward of one model from one fixed state. Every repetition runs every variant once,
in turn and in the same processes, so that ratios are taken between neighbours in time. The
step of the optimizer and, for MoE, the averaging of replicated gradients are left out: they are
the same for all.

Variants meet at the same memory. A level is a peak relative to that of `checkpoint_sync`, or
`eager`, the peak of plain eager; at each level stand overlapc with that budget and the fastest
of PyTorch's own settings whose *measured* peak fits.

A step is predicted twice: when it is planned, and in every repetition from op times taken anew
just before it. The second tells the model's error apart from the machine's change of speed.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import overlapc
from benchmarks.lab import as_two_ranks, interleaved, parse_rates, ratio, write_results
from benchmarks.measuring import gradients, least_peak, timed_ms, twin
from benchmarks.torch_baselines import Baseline, MeasuredCosts
from examples.common import Text, checkpoint_blocks, leave, measure_exposed, same, say
from examples.gpt.model import GPT, GPTConfig
from examples.moe.model import MoEConfig, MoEGPT
from overlapc.core.simulate import simulate
from overlapc.passes.trace import Captured
from overlapc.planning import road
from overlapc.planning.report import Report, StepPlan
from overlapc.profiler.measure import retime

EAGER, CHECKPOINT = "eager", "checkpoint_sync"
# At 400 Mbit/s communication takes about half as long as compute on a slow core.
GPT_SIZE = GPTConfig(layers=4, width=768, heads=12, max_seq=256)
MOE_SIZE = MoEConfig(layers=3, width=512, heads=8, experts=4, top_k=2, expert_width=1024)
BATCH, SEQ = 4, 256


@dataclass
class Planned:
    """What overlapc made one graph's plan from."""

    captured: Captured
    report: Report
    primals: Sequence[Any] | None

    def step_now_ns(self) -> int:
        """The predicted step, from times that the ops of every rank take now."""
        mine = retime(self.captured, self.primals, self.report.problem.profile)
        profiles: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(profiles, mine)
        return simulate(self.report.problem, self.report.plan, profiles).step_ns


@dataclass
class Variant:
    """One way to run the step, what was measured and, for overlapc, what was predicted."""

    name: str
    level: str | None = None
    setting: str = ""
    model: Callable[..., Tensor] | None = None
    step_ms: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    fits: bool = True
    exposed_ms: float = 0.0
    bitwise_equal: bool | None = None
    predicted: dict[str, float] | None = None
    predicted_now_ms: list[float] = field(default_factory=list)  # one for each of step_ms
    planned: list[Planned] = field(default_factory=list)


@dataclass
class Bench:
    """The model, its batch and its parameters, which every variant shares."""

    model: nn.Module
    batch: tuple[Tensor, Tensor]

    def twin(self) -> nn.Module:
        return twin(self.model)

    def run(self, variant: Variant) -> None:
        self.model.zero_grad()
        torch.manual_seed(0)
        variant.model(*self.batch).backward()

    def timed_ms(self, variant: Variant) -> float:
        return timed_ms(lambda: self.run(variant))

    def peak(self, variant: Variant) -> int:
        return least_peak(self.model, lambda: self.run(variant))

    def gradients(self, variant: Variant) -> list[Tensor]:
        self.run(variant)
        return gradients(self.model)


def make_bench(name: str, width: int | None = None) -> Bench:
    """The model of that name; a GPT perhaps of another width."""
    group, text = dist.group.WORLD, Text()
    if name == "gpt":
        size = GPT_SIZE if width is None else replace(GPT_SIZE, width=width, heads=width // 64)
        return Bench(GPT(size, group), text.batch(0, stream=0, batch=BATCH, seq=SEQ))
    batch = text.batch(0, stream=group.rank(), batch=BATCH, seq=SEQ)
    return Bench(MoEGPT(MOE_SIZE, group), batch)


def torch_candidates(bench: Bench, budgets: list[float]) -> list[Variant]:
    """PyTorch's own settings, each with its measured peak and a first idea of its time."""
    # Of the rows of an MoE layer, half go to each of the two ranks or experts of a rank.
    rows = BATCH * SEQ * MOE_SIZE.top_k // 2
    costs = MeasuredCosts(unknown_size=rows)
    candidates = []
    for overlap in (False, True):
        for budget in budgets:
            name = "torch_overlap" if overlap else "torch_mincut"
            baseline = Baseline(budget, costs, overlap)
            candidate = Variant(
                name, setting=f"budget {budget:g}", model=baseline.compile(bench.twin())
            )
            bench.run(candidate)
            candidate.peak_bytes = bench.peak(candidate)
            candidate.step_ms = [bench.timed_ms(candidate) for _ in range(2)]
            say(
                f"  {name} {candidate.setting}: {min(candidate.step_ms):.0f} ms, "
                f"{candidate.peak_bytes / 2**20:.1f} MiB"
            )
            candidates.append(candidate)
    return candidates


def best_torch(candidates: list[Variant], name: str, level: str, limit: int) -> Variant:
    """The fastest candidate within the limit, else the smallest; a fresh copy, no times yet."""
    known = [candidate for candidate in candidates if candidate.name == name]
    fitting = [candidate for candidate in known if candidate.peak_bytes <= limit]
    best = (
        min(fitting, key=lambda c: min(c.step_ms))
        if fitting
        else min(known, key=lambda c: c.peak_bytes)
    )
    setting, model = best.setting, best.model
    return Variant(f"{name}@{level}", level, setting, model, fits=bool(fitting))


def overlapc_variant(bench: Bench, level: str, limit: int, solver: str) -> Variant:
    model = overlapc.optimize(bench.twin(), memory_budget=limit, solver=solver)
    variant = Variant(f"overlapc@{level}", level, f"budget {limit}", model)

    def plan_and_remember(*given: Any, **how: Any) -> StepPlan:
        found = road.plan(*given, **how)
        variant.planned.append(Planned(found.captured, found.report, how["primals"]))
        return found

    with mock.patch("overlapc.runtime.backend.plan", plan_and_remember):
        bench.run(variant)
    timelines = [report.timeline for report in model.graphs]
    variant.predicted = {
        "step_ms": sum(t.step_ns for t in timelines) / 1e6,
        "peak_bytes": max(t.peak_bytes for t in timelines),
        "exposed_ms": sum(t.exposed_ns for t in timelines) / 1e6,
        "bound_ms": sum(report.bound_ns for report in model.graphs) / 1e6,
    }
    return variant


def rank_main(args: argparse.Namespace) -> None:
    """What each of the two ranks does, at one rate."""
    torch.set_num_threads(1)
    torch._dynamo.config.capture_scalar_outputs = True
    torch._dynamo.config.recompile_limit = 1024  # one function, many variants of it
    dist.init_process_group("gloo")
    bench = make_bench(args.model)
    eager = Variant(EAGER, model=bench.twin())
    sync = Variant(CHECKPOINT, model=checkpoint_blocks(bench.twin()))
    variants = [eager, sync]
    for variant in variants:
        bench.run(variant)
    eager_peak, sync_peak = bench.peak(eager), bench.peak(sync)

    wanted = args.variants.split(",")
    candidates = torch_candidates(bench, args.torch_budgets) if "torch" in wanted else []
    for level in args.levels.split(","):
        limit = eager_peak if level == "eager" else int(float(level) * sync_peak)
        if candidates:
            for name in ("torch_mincut", "torch_overlap"):
                variants.append(best_torch(candidates, name, level, limit))
        if "overlapc" in wanted:
            say(f"planning overlapc@{level}: {limit / 2**20:.1f} MiB")
            variants.append(overlapc_variant(bench, level, limit, args.solver))
    candidates.clear()

    reference = bench.gradients(eager)
    for variant in variants:
        variant.bitwise_equal = same(reference, bench.gradients(variant))
        variant.peak_bytes = bench.peak(variant)
        variant.exposed_ms = measure_exposed(lambda v=variant: bench.run(v)) * 1e3
    del reference
    for variant in interleaved(variants, args.reps):
        if variant.planned:
            now_ns = sum(planned.step_now_ns() for planned in variant.planned)
            variant.predicted_now_ms.append(now_ns / 1e6)
        variant.step_ms.append(bench.timed_ms(variant))
    if dist.get_rank() == 0:
        print_table(variants)
        save(variants, args)
    leave()


def error(variant: Variant) -> str:
    """How far the prediction made in the same repetition is off: the median and the range."""
    errors = [p / m - 1 for p, m in zip(variant.predicted_now_ms, variant.step_ms, strict=True)]
    return f"{statistics.median(errors):+.1%} ({min(errors):+.0%}..{max(errors):+.0%})"


def print_table(variants: list[Variant]) -> None:
    sync = next(v for v in variants if v.name == CHECKPOINT)
    print("                         measured                                            predicted")
    print(
        f"{'variant':20} {'step ms':>8} {'vs checkpoint_sync':>20} {'MiB':>7} {'exposed':>8}"
        f" {'grads':>6} {'step ms':>9} {'off now by':>20} {'MiB':>7} {'exposed':>8} {'bound':>7}"
        "  setting"
    )
    for v in variants:
        p = v.predicted
        foreseen = (
            f"{p['step_ms']:9.0f} {error(v):>20} {p['peak_bytes'] / 2**20:7.1f}"
            f" {p['exposed_ms']:8.0f} {p['bound_ms']:7.0f}"
            if p
            else f"{'-':>9} {'-':>20} {'-':>7} {'-':>8} {'-':>7}"
        )
        print(
            f"{v.name:20} {statistics.median(v.step_ms):8.0f} {ratio(sync.step_ms, v.step_ms):>20}"
            f" {v.peak_bytes / 2**20:7.1f} {v.exposed_ms:8.0f}"
            f" {'equal' if v.bitwise_equal else 'DIFFER':>6} {foreseen}  {v.setting}"
            f"{'' if v.fits else ' (over the level: nothing fits)'}"
        )
    for ours in (v for v in variants if v.name.startswith("overlapc@")):
        rivals = [v for v in variants if v.level == ours.level and v.name.startswith("torch")]
        for rival in rivals:
            print(
                f"{ours.name} is {ratio(rival.step_ms, ours.step_ms)} times as fast as {rival.name}"
            )
    sys.stdout.flush()


def conditions(model: str) -> dict[str, Any]:
    """What figures of this machine and link were measured under."""
    return {
        "what": "forward and backward on a shaped link; times are measured, one per repetition",
        "model": model,
        "size": asdict(GPT_SIZE if model == "gpt" else MOE_SIZE),
        "batch": [BATCH, SEQ],
        "rate_mbit": os.environ.get("OVERLAPC_LAB_MBIT", "none"),
        "ranks": 2,
        "threads_per_rank": 1,
        "dtype": "float32",
        "torch": torch.__version__,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "date": time.strftime("%Y-%m-%d"),
    }


def save(variants: list[Variant], args: argparse.Namespace) -> None:
    """Everything measured, with its conditions, under benchmarks/results/."""
    rows = []
    for variant in variants:
        row = asdict(replace(variant, model=None, planned=[]))
        del row["model"], row["planned"]
        rows.append(row)
    document = conditions(args.model) | {"solver": args.solver, "variants": rows}
    write_results(f"link_{args.model}_{document['rate_mbit']}", document)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", choices=["gpt", "moe"], default="gpt")
    add("--rates", default="400,800,none", help="rates of the link in Mbit/s; none is unshaped")
    add("--reps", type=int, default=7)
    add("--levels", default="1.0,1.1,eager", help="peaks, relative to checkpoint_sync's")
    add("--variants", default="torch,overlapc", help="variants beside eager and checkpoint_sync")
    add("--solver", default="overlap")
    add(
        "--torch-budgets",
        type=lambda text: [float(word) for word in text.split(",")],
        default=[0.0, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 1.0],
        help="activation_memory_budget settings to choose PyTorch's best from",
    )
    args = parser.parse_args()
    as_two_ranks(rank_main, args, parse_rates(args.rates), f"{args.model}, ")


if __name__ == "__main__":
    main()
