"""Megatron patched against Megatron at each of its own recompute settings, on a slow link.

    OVERLAPC_MEGATRON=... python benchmarks/megatron_bench.py --layout tp --rates 400 --reps 5
    OVERLAPC_MEGATRON=... python benchmarks/megatron_bench.py --layout tp,pp --clock virtual

Two ranks train tiny GPTs of megatron-core on CPU (`tests/megatron/cpu.py`), each pinned to a core
and in a network namespace of its own (`lab.py`). Four ranks (`tp,pp`) share the cores there are,
and the emulated link. With `--clock virtual` the link is emulated in virtual time. Every
repetition runs a step of every variant, in turn. `overlapc@X` has at most the measured peak of
Megatron's setting X, and is held against the fastest of Megatron's settings that fit there.
Gradients are compared bit by bit.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.duplex import init_duplex
from benchmarks.lab import interleaved, parse_rates, ratio, run_at_rates, write_results
from benchmarks.measuring import slowest, timed_ms
from examples.common import connect, launch, leave, same, say
from overlapc.core.errors import Infeasible, RankError
from overlapc.core.pipeline import simulate_pipeline
from overlapc.core.schedule import Schedule, Step
from overlapc.core.stages import stage_cost
from overlapc.planning.report import Report
from overlapc.planning.rows import StageFigures, plan_rows
from overlapc.profiler.link_model import Collective, LinkModel
from overlapc.profiler.links import measure_links
from overlapc.profiler.memory import measure_peak
from overlapc.solvers.pipeline.schedules import make_schedule
from tests.megatron import cpu
from tests.megatron.models import Layout, Trained, set_up

LAYOUTS = {
    "one": Layout(ranks=1),  # nothing to hide
    "tp": Layout(tp=2),
    "ep": Layout(ep=2, experts=4),
    "pp": Layout(pp=2),
    "tp,pp": Layout(ranks=4, tp=2, pp=2),
}
_FULL = {"recompute_granularity": "full", "recompute_num_layers": 1}
# Megatron's own settings: what is made again in the backward.
SETTINGS: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute_granularity": "selective"},
    "half": {**_FULL, "recompute_method": "block"},  # of the layers, as `own` says
    "full": {**_FULL, "recompute_method": "uniform"},
}
_TRIES = 6  # at a budget whose measured peak is within the limit


@dataclass
class Variant:
    name: str
    trained: Trained
    steps: Any = None  # of overlapc
    limit: int = 0
    peak_bytes: int = 0
    predicted_ms: float = 0.0
    planning_s: float = 0.0
    equal: bool = True
    step_ms: list[float] = field(default_factory=list)

    def predict(self, **options: Any) -> Report:
        """Run a first step patched, which plans, and a second one, whose time is no planning;
        return what was planned for this rank's chunk."""
        import overlapc.megatron as patched

        patched.patch(**options)
        self.steps = patched._steps
        patched.unpatch()
        first_ms, second_ms = timed_ms(self.step), timed_ms(self.step)
        self.planning_s = (first_ms - second_ms) / 1e3
        (chunk,) = self.steps.chunks.values()
        (planned,) = [each for each in chunk._planned.values() if each is not None]
        found: Report = planned.program.report
        return found

    @property
    def ran(self) -> Mapping[str, int]:
        (chunk,) = self.steps.chunks.values()
        found: Mapping[str, int] = chunk.ran
        return found

    def step(self) -> list[torch.Tensor]:
        from overlapc.megatron import seams
        from overlapc.ranks import roll

        if self.steps is not None:
            seams.install(self.steps.run, roll.tell)
        try:
            return self.trained.gradients(0)
        finally:
            seams.remove()

    def timed(self) -> None:
        self.step_ms.append(timed_ms(self.step))


def own(layout: Layout, name: str) -> Variant:
    """Megatron's, at one of its settings."""
    setting = dict(SETTINGS[name])
    if name == "half":
        setting["recompute_num_layers"] = max(1, layout.layers // layout.pp // 2)
    config = {**layout.config, **setting}
    variant = Variant(f"megatron, {name}", Trained(replace(layout, config=config)))
    variant.step()
    variant.peak_bytes = variant.limit = peak(variant)
    say(f"  {variant.name}: {variant.peak_bytes / 2**20:.1f} MiB")
    return variant


def overlapped(layout: Layout, name: str, limit: int, options: dict[str, Any]) -> Variant | None:
    """Ours, in a budget with which the measured peak is at most the limit; None if none fits."""
    budget = limit
    for _ in range(_TRIES):
        variant = Variant(f"overlapc@{name}", Trained(layout), limit=limit)
        try:
            report = variant.predict(memory_budget=budget, **options)
        except (Infeasible, RankError) as error:
            if "Infeasible" not in f"{type(error).__name__}: {error}":  # another rank's
                raise
            say(f"  {variant.name}: {error}")
            return None
        variant.peak_bytes = peak(variant)
        variant.predicted_ms = predicted_ms(layout, report, options["schedule"])
        variant.predicted_ms += sum(map(reduced_ms, variant.trained.models))
        say(
            f"  {variant.name}: budget {budget / 2**20:.1f} MiB, planned in "
            f"{variant.planning_s:.1f} s, measured {variant.peak_bytes / 2**20:.1f} MiB; "
            f"ran {variant.ran}"
        )
        over = variant.peak_bytes - limit
        if over <= 0:
            return variant
        budget -= over + limit // 200
    return None


def predicted_ms(layout: Layout, report: Report, schedule: str) -> float:
    """A step, of all ranks, without the sum of gradients over replicas."""
    if layout.pp == 1:
        return report.step_ns / 1e6
    sent_ns = layout.batch * layout.sequence * layout.width * 4 * 8e3 / (rate() or 1e5)
    cost = stage_cost(report.problem, report.plan, (), int(sent_ns))
    mine = asdict(StageFigures.of(cost, report, 0))
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, mine)
    stages: list[Mapping[str, Any]] = told[:: len(told) // layout.pp]  # tensor ranks are next
    rows = make_schedule(schedule, layout.pp, layout.microbatches)
    figures = [StageFigures.parse(each) for each in stages]
    _, _, best = plan_rows(rows, [[each] for each in figures])
    if any(len(step) > 1 for row in rows.rows for step in row):
        return best.step_ns / 1e6  # merged steps are planned whole, and nothing fills their waits
    filled = simulate_pipeline(apart(rows), [each.cost for each in figures])
    return max(best.step_ns, filled.step_ns) / 1e6  # a step takes no less than either


def reduced_ms(model: Any) -> float:
    """What Megatron's DDP takes to sum the gradients of a model over replicas: nothing hides it."""
    calls = []
    for buffer in (*model.buffers, *model.expert_parallel_buffers):
        group = buffer.data_parallel_group
        for bucket in buffer.buckets if group.size() > 1 else ():
            grads = bucket.grad_data
            calls.append(
                Collective(
                    group.group_name,
                    "all_reduce",
                    str(grads.dtype).removeprefix("torch."),
                    grads.nbytes,
                )
            )
    links = measure_links(calls, repeats=3) if calls else LinkModel(())
    return sum(links.time_ns(call) for call in calls) / 1e6


def apart(rows: Schedule) -> Schedule:
    """As waits are filled if memory allows it: each backward is in its parts, and its gradient is
    sent in between."""
    ran = tuple(tuple(chain.from_iterable(map(_parts, row))) for row in rows.rows)
    return replace(rows, rows=ran)


def _parts(step: Step) -> list[Step]:
    kinds = "RIW" if step[0].kind == "B" else step[0].kind
    return [(replace(step[0], kind=kind),) for kind in kinds]


def rate() -> float | None:
    """Of the link, in Mbit/s."""
    (found,) = parse_rates(os.environ.get("OVERLAPC_LAB_MBIT", "none"))
    return found


def peak(variant: Variant) -> int:
    """The least of three measurements: one can be too high by a buffer, never too low."""
    gc.collect()
    return int(slowest(min(measure_peak(lambda: variant.step()) for _ in range(3))))


def rank_main(args: argparse.Namespace) -> None:
    cpu.use(args.version)
    layout = sized(args)
    torch.set_num_threads(1)
    if rate() and link_of(args) == "none":
        init_duplex()
    else:
        connect(link_of(args), rate() or 0, "cpu")
    set_up(layout)
    variants = [own(layout, name) for name in args.settings.split(",")]
    known = {variant.name: variant.limit for variant in variants}
    costs = tempfile.TemporaryDirectory()
    options = {"solver": args.solver, "schedule": args.schedule, "cache": f"{costs.name}/costs"}
    for name in args.levels.split(","):
        found = overlapped(layout, name, known[f"megatron, {name}"], options)
        variants += [found] if found is not None else []
    expected = variants[0].step()
    for variant in variants:
        variant.equal = same(expected, variant.step())
    for variant in interleaved(variants, args.reps):
        variant.timed()
    if dist.get_rank() == 0:
        report(variants, args)
    costs.cleanup()
    leave()


def report(variants: list[Variant], args: argparse.Namespace) -> None:
    theirs = [v for v in variants if v.steps is None]
    print(
        f"{'variant':22} {'step ms':>8} {'MiB':>7} {'grads':>6} {'predicted':>9} {'planned s':>9}"
    )
    for v in variants:
        fits = [other for other in theirs if other.peak_bytes <= max(v.limit, v.peak_bytes)]
        best = min(fits, key=lambda other: statistics.median(other.step_ms))
        print(
            f"{v.name:22} {statistics.median(v.step_ms):8.0f} {v.peak_bytes / 2**20:7.1f} "
            f"{'equal' if v.equal else 'DIFFER':>6} {v.predicted_ms:9.0f} {v.planning_s:9.1f} "
            f"{ratio(best.step_ms, v.step_ms)} of {best.name}"
        )
    sys.stdout.flush()
    link = {"none": "a shaped" if rate() else "no", "emulated": "an emulated"}.get(
        link_of(args), "an emulated (virtual time)"
    )
    seen = ("name", "peak_bytes", "limit", "equal", "predicted_ms", "planning_s", "step_ms")
    document = {
        "what": f"steps of megatron-core on CPU, {link} link; measured, one per repetition",
        "megatron": args.version,
        "layout": asdict(sized(args)),
        "schedule": args.schedule,
        "solver": args.solver,
        "rate_mbit": rate(),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "variants": [{name: getattr(v, name) for name in seen} for v in variants],
    }
    virtual = "_virtual" if args.clock == "virtual" else ""
    write_results(f"megatron_{args.layout.replace(',', '_')}_{rate() or 'none'}{virtual}", document)


def link_of(args: argparse.Namespace) -> str:
    """What `connect` makes: where two ranks have namespaces, the link itself is shaped."""
    if LAYOUTS[args.layout].ranks == 1:
        return "none"
    if args.clock == "virtual":
        return "virtual"
    return "emulated" if LAYOUTS[args.layout].ranks > 2 else "none"


def sized(args: argparse.Namespace) -> Layout:
    return replace(
        LAYOUTS[args.layout],
        layers=args.layers,
        width=args.width,
        sequence=args.sequence,
        vocabulary=512,
        batch=args.batch,
        microbatches=args.microbatches,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--layout", choices=LAYOUTS, default="tp")
    add("--rates", default="400", help="rates of the link in Mbit/s; none is unshaped")
    add("--reps", type=int, default=5)
    add("--settings", default=",".join(SETTINGS), help="Megatron's settings to compare with")
    add("--levels", default="none,full", help="settings of Megatron's whose peak is the limit")
    add("--solver", default="overlap")
    add("--schedule", default="1f1b")
    add("--layers", type=int, default=4)
    add("--width", type=int, default=512)
    add("--sequence", type=int, default=256)
    add("--batch", type=int, default=4)
    add("--microbatches", type=int, default=4)
    add("--version", default="0.16.1")
    add(
        "--clock",
        choices=["machine", "virtual"],
        default="machine",
        help="virtual: an emulated link",
    )
    args = parser.parse_args()
    ranks = LAYOUTS[args.layout].ranks
    if "RANK" in os.environ:
        rank_main(args)
    elif ranks != 2 or args.clock == "virtual":
        os.environ["OVERLAPC_LAB_MBIT"] = args.rates if ranks > 1 else "none"
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        launch(ranks)
    else:
        run_at_rates(
            [__file__, *sys.argv[1:]], parse_rates(args.rates), f"megatron {args.layout}, "
        )


if __name__ == "__main__":
    main()
