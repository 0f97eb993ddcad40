"""Plans of every solver and baseline, predicted and then run on a shaped link.

    python benchmarks/plans_bench.py --model gpt --rate 400 --levels 1.0,1.3 --reps 5

Two ranks as in `link_bench.py`. The graph is measured once; rank 0 solves for each level of
memory with HEU, OPT and all baselines, and moves windows' work apart and together: recompute
alone ("R"), weight gradients alone ("W"), one after the other ("R,W") and jointly ("RW"), with
the same choices of what to recompute. Every plan that fits then runs, in turn and in the same
processes. Each repetition predicts every plan from op times taken just before it.

Printed: measured and predicted step of every plan, their rank correlation and error, and the
paired ratios to the best plan of the level.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import overlapc
from benchmarks.lab import as_two_ranks, write_results
from benchmarks.link_bench import (
    CHECKPOINT,
    Bench,
    Planned,
    Variant,
    conditions,
    make_bench,
)
from benchmarks.solvers import SEPARATE, fastest, moved
from examples.common import checkpoint_blocks, leave, same, say
from overlapc.core.errors import Infeasible
from overlapc.core.ir import Plan, Problem
from overlapc.core.simulate import simulate
from overlapc.planning import road
from overlapc.planning.report import StepPlan
from overlapc.profiler.measure import retime
from overlapc.solvers import FIELD, solve

SOLVED = ("heu", "opt", "overlap", *FIELD)


@dataclass
class Tried:
    """One plan, under the names that found it at a level."""

    names: list[str]
    level: str
    plan: Plan
    variant: Variant
    predicted_ms: list[float] = field(default_factory=list)

    @property
    def measured_ms(self) -> float:
        return statistics.median(self.variant.step_ms)


def plans_of(problem: Problem, opt_seconds: float) -> Iterator[tuple[str, Plan]]:
    """What each solver finds, and each way to fill windows, where it fits."""
    found: dict[str, Plan] = {}
    for name in SOLVED:
        try:
            found[name] = solve(problem, name, time_limit_s=opt_seconds)
        except Infeasible:
            continue
    yield from found.items()
    chosen = [found[name] for name in ("heu", "opt", "checkmate") if name in found]
    for moves in SEPARATE:
        ways = (plan for one in chosen for plan in moved(problem, one, moves.split(",")))
        if (best := fastest(problem, ways)) is not None:
            yield moves, best


def first_plan(bench: Bench, cache: str) -> Planned:
    """Capture and measure the graph: what all plans are made for."""
    kept: list[Planned] = []

    def remember(*given: Any, **how: Any) -> StepPlan:
        found = road.plan(*given, **how)
        kept.append(Planned(found.captured, found.report, how["primals"]))
        return found

    model = overlapc.optimize(bench.twin(), solver="none", cache=cache)
    with mock.patch("overlapc.runtime.backend.plan", remember):
        bench.run(Variant("first", model=model))
    return kept[0]


def rank_main(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    torch._dynamo.config.capture_scalar_outputs = True
    torch._dynamo.config.recompile_limit = 1024
    dist.init_process_group("gloo")
    bench = make_bench(args.model)
    sync = Variant(CHECKPOINT, model=checkpoint_blocks(bench.twin()))
    eager = Variant("eager", model=bench.twin())
    for variant in (sync, eager):
        bench.run(variant)
    sync_peak = bench.peak(sync)
    with tempfile.TemporaryDirectory() as folder:
        cache = os.path.join(folder, "costs")
        first = first_plan(bench, cache)
        tried = [
            each
            for level in args.levels.split(",")
            for each in try_level(bench, first, level, int(float(level) * sync_peak), args, cache)
        ]
    reference = bench.gradients(eager)
    for each in tried:
        equal = same(reference, bench.gradients(each.variant))
        each.variant.bitwise_equal = equal
    for repetition in range(args.reps):
        turn = repetition % len(tried)
        mine = retime(first.captured, first.primals, first.report.problem.profile)
        profiles: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(profiles, mine)
        for each in tried[turn:] + tried[:turn]:
            step = simulate(first.report.problem, each.plan, profiles).step_ns
            each.predicted_ms.append(step / 1e6)
            each.variant.step_ms.append(bench.timed_ms(each.variant))
        say(f"repetition {repetition + 1} of {args.reps}")
    if dist.get_rank() == 0:
        report(tried, args)
    leave()


def try_level(
    bench: Bench, first: Planned, level: str, limit: int, args: argparse.Namespace, cache: str
) -> list[Tried]:
    problem = replace(first.report.problem, budget_bytes=limit)
    box: list[Any] = [None]
    if dist.get_rank() == 0:
        say(f"solving at {level}: {limit / 2**20:.1f} MiB")
        box = [list(plans_of(problem, args.opt_seconds))]
    dist.broadcast_object_list(box)
    tried: dict[tuple[Any, ...], Tried] = {}
    for name, plan in box[0]:
        key = plan.saved, plan.order
        if key in tried:
            tried[key].names.append(name)
            continue
        model = overlapc.optimize(bench.twin(), plan=plan, cache=cache)
        tried[key] = Tried([name], level, plan, Variant(name, level, model=model))
        bench.run(tried[key].variant)
    return list(tried.values())


def report(tried: list[Tried], args: argparse.Namespace) -> None:
    print(f"{'plan':34}{'level':>6}{'measured ms':>22}{'predicted':>11}{'off':>8}{'grads':>7}")
    for each in sorted(tried, key=lambda t: (t.level, t.measured_ms)):
        steps = each.variant.step_ms
        off = statistics.median(p / m - 1 for p, m in zip(each.predicted_ms, steps, strict=True))
        print(
            f"{' = '.join(each.names):34.34}{each.level:>6}"
            f"{each.measured_ms:8.0f} ({min(steps):5.0f}..{max(steps):5.0f})"
            f"{statistics.median(each.predicted_ms):11.0f}{off:+8.1%}"
            f"{'equal' if each.variant.bitwise_equal else 'DIFFER':>7}"
        )
    measured = [each.measured_ms for each in tried]
    predicted = [statistics.median(each.predicted_ms) for each in tried]
    errors = [abs(p / m - 1) for p, m in zip(predicted, measured, strict=True)]
    print(
        f"{len(tried)} plans: rank correlation of predicted and measured "
        f"{rank_correlation(predicted, measured):.3f}; error median "
        f"{statistics.median(errors):.1%}, most {max(errors):.1%}"
    )
    for level in dict.fromkeys(each.level for each in tried):
        here = {name: each for each in tried if each.level == level for name in each.names}
        for ours in ("opt", "heu", "RW"):
            for name, other in here.items():
                if ours in here and other is not here[ours]:
                    print(f"{ours}@{level} is {paired(other, here[ours])} times as fast as {name}")
    save(tried, args)
    sys.stdout.flush()


def paired(slow: Tried, fast: Tried) -> str:
    ratios = [a / b for a, b in zip(slow.variant.step_ms, fast.variant.step_ms, strict=True)]
    return f"{statistics.median(ratios):.3f} ({min(ratios):.2f}..{max(ratios):.2f})"


def rank_correlation(a: list[float], b: list[float]) -> float:
    """Spearman's; equal values share their mean rank."""

    def ranks(values: list[float]) -> Any:
        _, place, count = np.unique(values, return_inverse=True, return_counts=True)
        return (np.cumsum(count) - (count + 1) / 2)[place]

    return float(np.corrcoef(ranks(a), ranks(b))[0, 1])


def save(tried: list[Tried], args: argparse.Namespace) -> None:
    rows = [
        {
            "names": each.names,
            "level": each.level,
            "measured_ms": each.variant.step_ms,
            "predicted_ms": each.predicted_ms,
            "bitwise_equal": each.variant.bitwise_equal,
            "recomputed": len(each.plan.recomputed),
        }
        for each in tried
    ]
    document = conditions(args.model) | {"plans": rows}
    write_results(f"plans_{args.model}_{document['rate_mbit']}", document)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", choices=["gpt", "moe"], default="gpt")
    add("--rate", type=float, default=400.0, help="rate of the link in Mbit/s")
    add("--levels", default="1.0,1.3", help="peaks, relative to checkpointing's")
    add("--reps", type=int, default=5)
    add("--opt-seconds", type=float, default=30.0)
    args = parser.parse_args()
    as_two_ranks(rank_main, args, [args.rate], f"{args.model}, ")


if __name__ == "__main__":
    main()
