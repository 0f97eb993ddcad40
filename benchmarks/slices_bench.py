"""One batch in slices, against the whole batch and against as many microbatches, on a shaped link.

    python benchmarks/slices_bench.py --model moe --rates 400,1000 --slices 2,4 --reps 7
    python benchmarks/slices_bench.py --model gpt --rates 400 --clock virtual

Two ranks as in `link_bench.py` train on one batch in the same memory, by default eager's peak
(`--budget 0.5`: half of its activations): `optimize` runs the batch whole, `TrainStep n` in n
microbatches that are merged, in pairs if that is planned, `no pairs n` in n that are not in pairs,
`slices n` in n slices. Gradients of pieces are compared bitwise with plain accumulation over the
same pieces, and with those of the whole batch. Every repetition runs every variant once, in turn
and in the same processes. Peaks of pieces are of a step that adds to gradients which are there, as
their plans count. With `--clock virtual` the link is emulated, in virtual time: what other
processes do counts little, and what a real link costs the cores not.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import overlapc
from benchmarks.duplex import init_duplex
from benchmarks.lab import as_two_ranks, interleaved, parse_rates, ratio, write_results
from benchmarks.link_bench import conditions
from benchmarks.measuring import exposed_ms, gradients, least_peak, timed_ms
from examples.common import Text, apart, connect, launch, leave, same, say
from examples.gpt.model import GPT, GPTConfig
from examples.moe.model import MoEConfig, MoEGPT

BASE = "optimize"
GPT_SIZE = GPTConfig(layers=4, width=512, heads=8, max_seq=256)
MOE_SIZE = MoEConfig(layers=4, width=256, experts=4, top_k=2, expert_width=512, max_seq=256)
BATCH, SEQ = 8, 256


@dataclass
class Variant:
    """One way to run the batch, and what was seen of it."""

    name: str
    pieces: int
    run: Callable[[], object]
    predicted_ms: float
    planned_bytes: int
    step_ms: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    exposed_ms: list[float] = field(default_factory=list)  # in waits for collectives, by rank
    bitwise_equal: bool = False
    off_whole: float = 0.0  # from uncut gradients at most, relative to the largest of these


@dataclass
class Bench:
    """The model, its batch, and the gradients of each number of pieces by plain accumulation."""

    model: nn.Module
    batch: tuple[Tensor, Tensor]
    budget: Any
    cache: str
    expected: dict[int, list[Tensor]] = field(default_factory=dict)

    @property
    def options(self) -> dict[str, Any]:
        return {"memory_budget": self.budget, "cache": self.cache, "timeout_s": 60}

    def pieces(self, count: int) -> list[tuple[Tensor, ...]]:
        return list(zip(*(each.chunk(count) for each in self.batch), strict=True))

    def gradients(self, run: Callable[[], object]) -> list[Tensor]:
        self.model.zero_grad()
        run()
        return gradients(self.model)

    def plainly(self, count: int) -> None:
        for piece in self.pieces(count):
            (self.model(*piece) / count).backward()

    def optimize(self) -> Variant:
        twin = overlapc.optimize(self.model, **self.options)
        run = lambda: twin(*self.batch).backward()  # noqa: E731
        run()
        report = twin.graphs[0]
        return Variant(BASE, 1, run, report.timeline.step_ns / 1e6, report.peak_bytes)

    def microbatches(self, count: int, pairs: bool = True) -> Variant:
        def loss(model: nn.Module, *piece: Tensor) -> Tensor:
            return model(*piece) / count

        schedule = "auto" if pairs else "merged"
        step = overlapc.TrainStep(self.model, loss, schedule=schedule, **self.options)
        pieces = self.pieces(count)
        step(pieces)
        name = f"TrainStep {count}" if pairs else f"no pairs {count}"
        if pairs and step.report.pair is None:
            say(f"{name}: no pairs by plan")
        report = step.report
        return Variant(name, count, lambda: step(pieces), report.step_ns / 1e6, report.peak_bytes)

    def slices(self, count: int) -> Variant:
        step = overlapc.TrainStep(self.model, slices=count, **self.options)
        step([self.batch])
        run = lambda: step([self.batch])  # noqa: E731
        report = step.report
        return Variant(f"slices {count}", count, run, report.step_ns / 1e6, report.peak_bytes)

    def judge(self, variant: Variant) -> None:
        """Fill in all but the times."""
        found, whole = self.gradients(variant.run), self.expected[1]
        variant.bitwise_equal = same(self.expected[variant.pieces], found)
        variant.off_whole = apart(whole, found)
        variant.peak_bytes = least_peak(self.model, variant.run, sums=variant.pieces > 1)
        variant.exposed_ms = exposed_ms(variant.run)

    def timed_ms(self, run: Callable[[], object]) -> float:
        self.model.zero_grad()
        return timed_ms(run)


def make_bench(args: argparse.Namespace) -> Bench:
    group = dist.group.WORLD
    model = GPT(GPT_SIZE, group) if args.model == "gpt" else MoEGPT(MOE_SIZE, group)
    stream = 0 if args.model == "gpt" else group.rank()
    batch = Text().batch(0, stream, BATCH, SEQ)
    return Bench(model, batch, args.budget, str(Path(tempfile.mkdtemp()) / "costs"))


def rank_main(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    torch._dynamo.config.capture_scalar_outputs = True
    if args.clock == "virtual":
        connect("virtual", float(args.rates), "cpu")
    else:
        init_duplex()
    bench = make_bench(args)
    counts = [int(word) for word in args.slices.split(",")]
    for count in (1, *counts):
        bench.expected[count] = bench.gradients(lambda c=count: bench.plainly(c))
    if bench.budget is None:  # all have what the whole batch takes in eager
        bench.budget = least_peak(bench.model, lambda: bench.plainly(1))
    makes = [bench.optimize]
    for count in counts:
        makes.append(lambda c=count: bench.microbatches(c))
        makes.append(lambda c=count: bench.microbatches(c, pairs=False))
        if not args.pairs:
            makes.append(lambda c=count: bench.slices(c))
    variants = []
    for make in makes:
        bench.model.zero_grad()
        start = time.perf_counter()
        variants.append(make())
        say(f"planned {variants[-1].name} in {time.perf_counter() - start:.0f} s")
        bench.judge(variants[-1])
    for variant in interleaved(variants, args.reps):
        variant.step_ms.append(bench.timed_ms(variant.run))
    if dist.get_rank() == 0:
        print_table(variants)
        save(variants, args)
    leave()


def print_table(variants: list[Variant]) -> None:
    base = next(v for v in variants if v.name == BASE)
    print("exposed: on the rank that waits least; off: from the gradients of the whole batch")
    print(
        f"{'variant':12} {'step ms':>8} {'predicted':>9} {'vs optimize':>20} {'MiB':>7}"
        f" {'planned':>7} {'exposed':>8} {'grads':>6} {'off':>8}"
    )
    for v in variants:
        print(
            f"{v.name:12} {statistics.median(v.step_ms):8.0f} {v.predicted_ms:9.0f}"
            f" {ratio(base.step_ms, v.step_ms):>20} {v.peak_bytes / 2**20:7.1f}"
            f" {v.planned_bytes / 2**20:7.1f}"
            f" {min(v.exposed_ms):8.0f} {'equal' if v.bitwise_equal else 'DIFFER':>6}"
            f" {v.off_whole:8.1e}"
        )
    for sliced in (v for v in variants if v.name.startswith("slices")):
        rivals = (f"TrainStep {sliced.pieces}", f"no pairs {sliced.pieces}")
        for rival in (v for v in variants if v.name in rivals):
            faster = ratio(rival.step_ms, sliced.step_ms)
            print(f"{sliced.name} is {faster} times as fast as {rival.name}")
    for rival in (v for v in variants if v.name.startswith("no pairs")):
        paired = next(v for v in variants if v.name == f"TrainStep {rival.pieces}")
        faster = ratio(rival.step_ms, paired.step_ms)
        predicted = rival.predicted_ms / paired.predicted_ms
        print(f"{paired.name} is {faster} times as fast as {rival.name}, predicted {predicted:.3f}")
    sys.stdout.flush()


def save(variants: list[Variant], args: argparse.Namespace) -> None:
    """Everything measured, with its conditions, under benchmarks/results/."""
    rows = [{k: value for k, value in vars(v).items() if k != "run"} for v in variants]
    size = asdict(GPT_SIZE if args.model == "gpt" else MOE_SIZE)
    own = {"size": size, "batch": [BATCH, SEQ], "budget": args.budget, "variants": rows}
    document = conditions(args.model) | own
    level = f"_{args.budget}" if args.budget else ""
    what = "pairs" if args.pairs else "slices"
    virtual = ""
    if args.clock == "virtual":
        virtual, document["what"] = "_virtual", "forward and backward; emulated link, virtual time"
    write_results(f"{what}_{args.model}_{document['rate_mbit']}{level}{virtual}", document)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", choices=["gpt", "moe"], default="moe")
    add("--rates", default="400,1000", help="rates of the link in Mbit/s; none is unshaped")
    add("--slices", default="2,4", help="numbers of slices, and of microbatches to compare with")
    add("--pairs", action="store_true", help="compare steps with and without pairs alone")
    add("--reps", type=int, default=7)
    add("--budget", type=float, help="a fraction of eager's activation memory; by default its peak")
    help_clock = "virtual: an emulated link of one rate"
    add("--clock", choices=["machine", "virtual"], default="machine", help=help_clock)
    args = parser.parse_args()
    if args.clock == "virtual":
        os.environ.setdefault("OVERLAPC_LAB_MBIT", f"{float(args.rates):g}")
        launch(2)
    as_two_ranks(rank_main, args, parse_rates(args.rates), f"{args.model}, ")


if __name__ == "__main__":
    main()
