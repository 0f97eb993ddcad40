"""Is what `overlapc search` predicts what runs? Three layouts of a GPT on two ranks, measured.

    python benchmarks/search_is_run.py --rate 400 --reps 9

Two ranks as in `link_bench.py`, each on a core of its own, with a shaped link between them
(`lab.py`). First the hardware is profiled: the machine and its link (as by `overlapc profile`, over
the process group of the steps), and the times of the model's ops (on both ranks at the same time,
as they will run). From these figures alone, and on no ranks, `search` plans the layouts TP 2, PP 2
and DP 2. Then `TrainStep` and `Pipeline` plan them on the ranks, once from the same figures and
once from what they measure themselves, and run. Every repetition runs every layout, in turn: a step
untimed, since memory that lay idle while others ran is faulted in anew (110,000 faults and a second
of a pipeline's step), and two timed ones.
"""

from __future__ import annotations

import argparse
import json
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
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.duplex import init_duplex
from benchmarks.lab import NotPermitted, ShapedPair, interleaved, parse_rates, ratio, write_results
from benchmarks.measuring import timed_ms
from examples.common import Text, leave, say
from examples.gpt.model import GPTConfig, with_ends
from overlapc.core.files import write_file
from overlapc.passes.capture.front import capture
from overlapc.planning.report import Report
from overlapc.profiler.cache import Cache
from overlapc.profiler.hardware import format_hardware, load_hardware
from overlapc.profiler.machine import measure_machine
from overlapc.profiler.measure import measure
from overlapc.runtime.pipeline import Pipeline
from overlapc.runtime.train_step import TrainStep
from overlapc.search.chosen import memory_budgets
from overlapc.search.evaluate import Found
from overlapc.search.layouts import Cluster, Fixed
from overlapc.search.models.own import Repeats
from overlapc.search.presets import find_model
from overlapc.search.search import search

WHERE = "benchmarks.search_is_run:model"
MEMORY = 4 << 30  # of a rank: enough to save everything, as on machines for a model this small
PINNED = {
    "TP 2": Fixed(tp=2, pp=1, dp=1, sequence=False),
    "PP 2": Fixed(tp=1, pp=2, dp=1, schedule="1f1b"),
    "DP 2": Fixed(tp=1, pp=1, dp=2),
}


def size() -> GPTConfig:
    """The model's, which all processes of the benchmark are told by their environment."""
    layers, width, seq = map(int, os.environ["OVERLAPC_BENCH_SIZE"].split(","))
    return GPTConfig(layers=layers, width=width, heads=width // 64, max_seq=seq)


def model(tensor: Any, expert: Any) -> Repeats:
    return with_ends(size(), tensor)


# --------------------------------------------------------------------------- on the ranks


def stage_of(found: Found, stage: int, microbatch: int) -> nn.Module:
    """A stage of the layout with this rank's part of its weights."""
    tokens = torch.zeros(microbatch, size().max_seq, dtype=torch.long)
    ends = stage == 0, stage == found.layout.stages - 1
    group = dist.group.WORLD if found.layout.tp > 1 else None
    torch.manual_seed(stage)
    part, _ = find_model(WHERE).stage(found.layers[stage], *ends, tokens, group, None)
    return part


def profile_machine(args: argparse.Namespace) -> None:
    here = measure_machine("here", load_hardware("cpu-gloo"), args.seconds)
    if dist.get_rank() == 0:
        write_file(args.folder / "here.toml", format_hardware(here))


def measure_ops(args: argparse.Namespace) -> None:
    """The times of all layouts' ops, into a file of this rank; of a pipeline's stages both ranks
    measure each."""
    cache = Cache(args.folder / f"costs{dist.get_rank()}")
    config, layers = size(), size().layers
    tokens = Text().batch(0, 0, args.microbatch, config.max_seq)
    x = torch.randn(args.microbatch, config.max_seq, config.width, requires_grad=True)
    for name, fixed in PINNED.items():
        split = (layers,) if fixed.pp == 1 else (layers // 2, layers // 2)
        group = dist.group.WORLD if fixed.tp > 1 else None
        for stage, count in enumerate(split):
            say(f"measuring the ops of {name}, stage {stage}")
            ends = stage == 0, stage == len(split) - 1
            part, _ = find_model(WHERE).stage(count, *ends, tokens[0], group, None)
            given = (tokens[0] if ends[0] else x, *[tokens[1]][: ends[1]])
            dist.barrier()
            measure(capture(part, *given), cache=cache)


@dataclass
class Variant:
    """A layout on the ranks: what is predicted of it, and what its steps took."""

    name: str
    run: Callable[[], Any]
    modules: list[nn.Module]
    predicted_ms: float
    known: float  # which part of the ops has a measured time
    step_ms: list[float] = field(default_factory=list)


def made(name: str, found: Found, budgets: list[int], groups: Any, how: dict[str, Any]) -> Variant:
    """The layout, planned. TP runs by `TrainStep`, the others by `Pipeline`."""
    layout, config = found.layout, size()
    stream = dist.get_rank() if layout.dp == 2 else 0
    shape = layout.microbatch, config.max_seq
    batches = [Text().batch(i, stream, *shape) for i in range(found.microbatches)]
    if layout.tp == 2:
        part = stage_of(found, 0, layout.microbatch)
        step = TrainStep(part, solver=found.solver, memory_budget=budgets[0], **how)
        step(batches)
        report = step.report
        return Variant(name, lambda: step(batches), [part], report.step_ns / 1e6, known_of(report))
    plain, alone = groups
    stage = dist.get_rank() if layout.pp == 2 else 0
    part = stage_of(found, stage, layout.microbatch)
    loss, part.loss = part.loss, None
    pipeline = Pipeline(
        {stage: part},
        found.asked,
        found.microbatches,
        loss,
        group=plain if layout.pp == 2 else alone,
        data_parallel=plain if layout.dp == 2 else None,
        solver=found.solver,
        memory_budget=dict(enumerate(budgets)),
        **how,
    )
    inputs, targets = map(list, zip(*batches, strict=True))
    pipeline(inputs, targets)
    run = lambda: pipeline(inputs, targets)  # noqa: E731
    known = known_of(pipeline.reports[stage])
    return Variant(name, run, [part], pipeline.timeline.step_ns / 1e6, known)


def known_of(report: Report) -> float:
    costs = report.problem.profile.costs.values()
    return sum(cost.source == "measured" for cost in costs) / len(costs)


def run_layouts(args: argparse.Namespace) -> None:
    documents = json.loads((args.folder / "found.json").read_text())
    plain = dist.new_group([0, 1], backend="gloo")
    groups = plain, [dist.new_group([rank], backend="gloo") for rank in range(2)][dist.get_rank()]
    same = {"profile": "estimate", "hardware": args.folder / "here.toml"}
    same["cache"] = args.folder / "costs0"
    rows, variants = [], []
    for name, document in documents.items():
        found = Found.parse(document["found"])
        say(f"planning {name}")
        variants.append(made(name, found, document["budgets"], groups, same))
        anew = made(name, found, document["budgets"], groups, {"profile": "measure"})
        row = {"layout": name, "search_ms": found.gradients_ns / 1e6, "merged": found.merged}
        row["ops_measured"] = variants[-1].known
        rows.append(row | {"own_ms": variants[-1].predicted_ms, "anew_ms": anew.predicted_ms})
    for variant in interleaved(variants, args.reps):
        steps = [timed_step_ms(variant) for _ in range(3)]
        variant.step_ms += steps[1:]
    if dist.get_rank() == 0:
        for row, variant in zip(rows, variants, strict=True):
            row["step_ms"] = variant.step_ms
        print_table(rows)
        write_results("search_is_run", conditions(args) | {"layouts": rows})


def timed_step_ms(variant: Variant) -> float:
    for module in variant.modules:
        module.zero_grad()
    return timed_ms(variant.run)


def conditions(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "what": "steps of three layouts on two ranks: as search predicts them, as TrainStep and "
        "Pipeline do (own: from the same figures; anew: from ones they measure), and measured",
        "size": asdict(size()),
        "batch": args.batch,
        "microbatch": args.microbatch,
        "rate_mbit": os.environ.get("OVERLAPC_LAB_MBIT", "none"),
        "threads_per_rank": 1,
        "dtype": "float32",
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }


def print_table(rows: list[dict[str, Any]]) -> None:
    heads = "search ms", "own ms", "anew ms", "measured ms (range)"
    print(f"{'layout':16}" + "".join(f" {head:>10}" for head in heads) + "  search / measured")
    for row in rows:
        steps = row["step_ms"]
        name = row["layout"] + (", merged" if row["merged"] else "")
        figures = [row["search_ms"], row["own_ms"], row["anew_ms"], statistics.median(steps)]
        print(
            f"{name:16}" + "".join(f" {ms:10.1f}" for ms in figures)
            + f" ({min(steps):.0f}..{max(steps):.0f})  "
            + ratio([row["search_ms"]] * len(steps), steps)
        )  # fmt: skip
    sys.stdout.flush()


def rank_main(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    init_duplex()
    phases = {"profile": profile_machine, "measure": measure_ops, "run": run_layouts}
    phases[args.phase](args)
    leave()


# --------------------------------------------------------------------------- beside the ranks


def search_layouts(args: argparse.Namespace) -> None:
    """What the search finds for each pinned layout, from the profiled figures."""
    torch.set_num_threads(1)  # as ops were measured
    hardware = str(args.folder / "here.toml")
    most = load_hardware(hardware).gpus_per_node
    cluster = Cluster(hardware, 2, most, MEMORY, args.batch, str(args.folder / "costs0"))
    model = find_model(WHERE)
    documents = {}
    for name, fixed in PINNED.items():
        pinned = Fixed(**{**asdict(fixed), "microbatch": args.microbatch})
        best = search(model, cluster, pinned, args.solver).best
        if best is None or not best.whole:
            raise SystemExit(f"{name}: the search found nothing that fits {MEMORY} bytes")
        budgets = memory_budgets(model, cluster, best)
        documents[name] = {"found": best.as_json(), "budgets": budgets}
        print(f"searched {name}: {best.gradients_ns / 1e6:.1f} ms", file=sys.stderr, flush=True)
    (args.folder / "found.json").write_text(json.dumps(documents))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--rate", default="400", help="rates of the link in Mbit/s; none is unshaped")
    add("--size", default="8,512,256", help="layers, width (heads of 64, an even number), sequence")
    add("--batch", type=int, default=16, help="sequences in a step on both ranks")
    add("--microbatch", type=int, default=2)
    add("--reps", type=int, default=9)
    add("--seconds", type=float, default=60, help="how long to profile the machine")
    add("--solver", default="heu")
    add("--folder", type=Path, help=argparse.SUPPRESS)
    add("--phase", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if "RANK" in os.environ:
        rank_main(args)
        return
    (rate,) = parse_rates(args.rate)
    os.environ["OVERLAPC_BENCH_SIZE"] = args.size
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["PYTHONPATH"] = str(Path(__file__).resolve().parents[1])
    quiet = {"KINETO_LOG_LEVEL": "99", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    with tempfile.TemporaryDirectory() as folder:
        args.folder = Path(folder)
        own = [__file__, *sys.argv[1:], "--folder", folder, "--phase"]
        try:
            with ShapedPair(rate) as pair:
                pair.run([*own, "profile"], quiet)
                pair.run([*own, "measure"], quiet)
                search_layouts(args)
                pair.run([*own, "run"], quiet)
        except NotPermitted as missing:
            print(f"skipped: the shaped link is not possible here: {missing}")


if __name__ == "__main__":
    main()
