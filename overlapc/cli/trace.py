"""`overlapc trace` shows where a recorded run spent its time."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from overlapc.cli.shared import GOOD, Declare, positive, print_table
from overlapc.report.kineto import Exposure, Run, read_run


def declare_trace(command: Declare) -> None:
    trace = command("trace", _trace, "show where a run recorded by torch.profiler spent its time")
    add = trace.add_argument
    add(
        "files", nargs="+", type=Path, help="Chrome trace JSON of torch.profiler, one for each rank"
    )
    add("--top", type=positive, default=10, help="number of collectives, stalls and ops to list")


def _trace(args: argparse.Namespace) -> int:
    runs = [read_run(path) for path in args.files]
    if args.json:
        print(json.dumps([asdict(run) | {"exposed": run.exposed} for run in runs], indent=1))
        return GOOD
    for number, run in enumerate(runs):
        if number:
            print()
        _print(run, args.top)
    return GOOD


def _print(run: Run, top: int) -> None:
    each = 1000 * run.steps  # from microseconds of all steps to milliseconds of one
    stalled = run.span - run.compute - run.traffic + run.both
    print(
        f"{run.name}: {run.steps} step{'s' * (run.steps > 1)} of {run.span / each:.1f} ms: "
        f"compute {run.compute / each:.1f}, traffic {run.traffic / each:.1f} ms, "
        f"{run.exposed / each:.1f} of it exposed, {stalled / each:.1f} ms of neither"
    )
    print_table([("lane", "busy ms"), *((lane, f"{us / each:.1f}") for lane, us in run.lanes)])
    if run.collectives:
        print()
        print_table(_by_kind(run.collectives, each))
        print()
        worst = sorted(run.collectives, key=lambda one: -one.exposed)[:top]
        print_table(
            [
                ("ms", "exposed", "collective", "beside it", "why no more"),
                *(
                    (
                        f"{one.event.took / 1000:.3f}",
                        f"{one.exposed / 1000:.3f}",
                        one.event.name[:48],
                        one.beside[0][0][:32] if one.beside else "nothing",
                        one.why[:72],
                    )
                    for one in worst
                ),
            ]
        )
    print()
    print_table(
        [
            ("ms a step", "times", "compute"),
            *((f"{us / each:.3f}", str(n), name[:72]) for name, us, n in run.longest[:top]),
        ]
    )
    stalls = [stall for stall in run.stalls[:top] if stall[1] >= 1]
    if stalls:
        print()
        rows = [(f"{at / 1000:.3f}", f"{us / 1000:.3f}", name[:72]) for at, us, name in stalls]
        print_table([("at ms", "stalled ms", "before"), *rows])


def _by_kind(collectives: Sequence[Exposure], each: float) -> list[tuple[str, ...]]:
    kinds: dict[str, list[Exposure]] = {}
    for one in collectives:
        kinds.setdefault(one.event.name[:48], []).append(one)
    rows: list[tuple[str, ...]] = [("collective", "times", "ms a step", "exposed", "hidden")]
    for kind, found in sorted(kinds.items()):
        took, exposed = (
            sum(values) for values in zip(*((o.event.took, o.exposed) for o in found), strict=True)
        )
        hidden = 1 - exposed / took if took else 1.0
        rows.append(
            (kind, str(len(found)), f"{took / each:.2f}", f"{exposed / each:.2f}", f"{hidden:.0%}")
        )
    return rows
