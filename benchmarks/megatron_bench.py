"""Megatron patched against Megatron at each of its own recompute settings, on a shaped link.

    OVERLAPC_MEGATRON=... python benchmarks/megatron_bench.py --layout tp --rates 400 --reps 5

Two ranks train tiny GPTs of megatron-core on CPU (`tests/megatron/cpu.py`), each pinned to a core
and in a network namespace of its own (`lab.py`). Every repetition runs a step of every variant, in
turn. `overlapc@X` has the measured peak of Megatron's setting X as its memory budget, and is held
against the fastest of Megatron's settings that fit there. Gradients after a first step are
compared bit by bit.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.lab import parse_rates, ratio, run_at_rates, write_results
from examples.common import leave, say
from overlapc.profiler.memory import measure_peak
from tests.megatron import cpu
from tests.megatron.models import Layout, Trained, set_up

LAYOUTS = {
    "tp": Layout(tp=2),
    "ep": Layout(ep=2, experts=4),
    "pp": Layout(pp=2),
}
# Megatron's own settings: what is made again in the backward.
SETTINGS: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute_granularity": "selective"},
    "full": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
}


@dataclass
class Variant:
    name: str
    trained: Trained
    steps: Any = None  # of overlapc
    limit: int = 0
    peak_bytes: int = 0
    predicted_ms: float = 0.0
    equal: bool = True
    step_ms: list[float] = field(default_factory=list)

    def step(self) -> Any:
        from overlapc.megatron import seams

        if self.steps is not None:
            seams.install(self.steps.run)
        try:
            return self.trained.gradients(0)
        finally:
            seams.remove()

    def timed(self) -> None:
        dist.barrier()
        start = time.perf_counter()
        self.step()
        self.step_ms.append(slowest(time.perf_counter() - start) * 1e3)


def slowest(value: float) -> float:
    """The greatest of the ranks' values, on every rank."""
    agreed = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
    return agreed.item()


def megatron(layout: Layout, name: str) -> Variant:
    config = {**layout.config, **SETTINGS[name]}
    variant = Variant(f"megatron, {name}", Trained(replace(layout, config=config)))
    variant.step()
    variant.peak_bytes = variant.limit = peak(variant)
    say(f"  {variant.name}: {variant.peak_bytes / 2**20:.1f} MiB")
    return variant


def overlapped(layout: Layout, name: str, limit: int, options: dict[str, Any]) -> Variant:
    import overlapc.megatron as patched

    patched.patch(memory_budget=limit, **options)
    variant = Variant(f"overlapc@{name}", Trained(layout), patched._steps, limit)
    variant.step()
    patched.unpatch()
    (chunk,) = variant.steps.chunks.values()
    (planned,) = [each for each in chunk._planned.values() if each is not None]
    variant.predicted_ms = planned.program.report.step_ns / 1e6
    variant.peak_bytes = peak(variant)
    say(f"  {variant.name}: {variant.peak_bytes / 2**20:.1f} MiB; ran {chunk.ran}")
    return variant


def peak(variant: Variant) -> int:
    """The least of two measurements: one can be too high by a buffer, never too low."""
    gc.collect()
    return int(slowest(min(measure_peak(lambda: variant.step()) for _ in range(2))))


def rank_main(args: argparse.Namespace) -> None:
    cpu.use(args.version)
    dist.init_process_group("gloo")
    layout = sized(args)
    set_up(layout)
    variants = [megatron(layout, name) for name in SETTINGS]
    options = {"solver": args.solver, "schedule": args.schedule}
    for name in args.levels.split(","):
        limit = next(v.limit for v in variants if v.name == f"megatron, {name}")
        variants.append(overlapped(layout, name, limit, options))
    expected = variants[0].step()
    for variant in variants:
        found = variant.step()
        variant.equal = all(map(torch.equal, expected, found))
    for repetition in range(args.reps):
        turn = repetition % len(variants)
        for variant in variants[turn:] + variants[:turn]:
            variant.timed()
        say(f"repetition {repetition + 1} of {args.reps}")
    if dist.get_rank() == 0:
        report(variants, args)
    leave()


def report(variants: list[Variant], args: argparse.Namespace) -> None:
    own = [v for v in variants if v.steps is None]
    rows = []
    for v in variants:
        fits = [other for other in own if other.peak_bytes <= 1.005 * max(v.limit, v.peak_bytes)]
        best = min(fits or own, key=lambda other: statistics.median(other.step_ms))
        print(
            f"{v.name:22} {statistics.median(v.step_ms):8.0f} ms {v.peak_bytes / 2**20:8.1f} MiB "
            f"{'equal' if v.equal else 'DIFFER'} predicted {v.predicted_ms:8.0f} "
            f"{ratio(best.step_ms, v.step_ms)} of {best.name}"
        )
        rows.append(
            {
                "name": v.name,
                "peak_bytes": v.peak_bytes,
                "limit": v.limit,
                "equal": v.equal,
                "predicted_ms": v.predicted_ms,
                "step_ms": v.step_ms,
            }
        )
    document = {
        "what": "steps of megatron-core on CPU and a shaped link; measured, one per repetition",
        "megatron": args.version,
        "layout": asdict(sized(args)),
        "schedule": args.schedule,
        "solver": args.solver,
        "rate_mbit": os.environ.get("OVERLAPC_LAB_MBIT", "none"),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "variants": rows,
    }
    write_results(f"megatron_{args.layout}_{document['rate_mbit']}", document)


def sized(args: argparse.Namespace) -> Layout:
    return replace(
        LAYOUTS[args.layout],
        layers=args.layers,
        width=args.width,
        sequence=args.sequence,
        vocabulary=512,
        batch=4,
        microbatches=args.microbatches,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--layout", choices=LAYOUTS, default="tp")
    add("--rates", default="400", help="of the link, in Mbit/s; none is unshaped")
    add("--reps", type=int, default=5)
    add("--levels", default="none,full", help="settings of Megatron's whose peak is the budget")
    add("--solver", default="overlap")
    add("--schedule", default="1f1b")
    add("--layers", type=int, default=4)
    add("--width", type=int, default=512)
    add("--sequence", type=int, default=256)
    add("--microbatches", type=int, default=4)
    add("--version", default="0.16.1")
    args = parser.parse_args()
    if "RANK" in os.environ:
        rank_main(args)
        return
    run_at_rates([__file__, *sys.argv[1:]], parse_rates(args.rates), f"megatron {args.layout}, ")


if __name__ == "__main__":
    main()
