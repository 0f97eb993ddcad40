"""`overlapc trace` shows where a recorded run spent its time."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from overlapc.cli.shared import GOOD, Declare, positive, print_table
from overlapc.core.errors import FileError, OptionError
from overlapc.report.recordings.beside import Beside, beside, by_name
from overlapc.report.recordings.kineto import RecordedExposure, RecordedRun, read_run
from overlapc.tools.progress import doing

if TYPE_CHECKING:
    from overlapc.report.recordings.solved import Solved


_AT_ONCE = 1.02  # times the traffic of all: more is of collectives that ran at once


def declare_trace(command: Declare) -> None:
    trace = command("trace", _trace, "show where a run recorded by torch.profiler spent its time")
    add = trace.add_argument
    add(
        "files", nargs="+", type=Path, help="Chrome trace JSON of torch.profiler, one for each rank"
    )
    add(
        "--plan",
        nargs=2,
        metavar=("PROBLEM", "PLAN"),
        help="files of the plan that ran: what it predicted beside what was measured, op by op",
    )
    add(
        "--solve",
        action="store_true",
        help="predict the step of the recorded ranges of forward and backward (record_function), "
        "merged as well as the solver can",
    )
    add("--out", type=Path, help="folder for the problem and the plan of --solve")
    add("--top", type=positive, default=10, help="number of collectives, stalls and ops to list")


def _trace(args: argparse.Namespace) -> int:
    if args.out is not None and (not args.solve or len(args.files) > 1):
        raise OptionError("--out takes the problem of one file; expected it with --solve, one FILE")
    runs = [read_run(path) for path in args.files]
    found = [None if args.plan is None else _beside(run, *args.plan) for run in runs]
    solved = [_solved(path, args.out) if args.solve else None for path in args.files]
    if args.json:
        document = []
        for run, one, step in zip(runs, found, solved, strict=True):
            document.append({**asdict(replace(run, ops=())), "exposed": run.exposed})
            document[-1] |= {} if one is None else {"plan": asdict(one)}
            document[-1] |= {} if step is None else {"solved": step.as_json()}
        print(json.dumps(document, indent=1))
        return GOOD
    for number, (run, one, step) in enumerate(zip(runs, found, solved, strict=True)):
        if number:
            print()
        _print(run, args.top)
        if one is not None:
            print()
            _print_beside(one, args.top)
        if step is not None:
            print()
            print(step.text(args.top))
    return GOOD


def _solved(path: Path, folder: Path | None) -> Solved:
    """Solve the step of a recording; write its problem and plan."""
    from overlapc.core.files import make_folder, save_plan, save_problem
    from overlapc.report.recordings.recorded import recorded_step
    from overlapc.report.recordings.solved import Solved

    with doing(f"solving the ranges of {path}"):
        found = Solved.of(recorded_step(path))
    if folder is not None:
        make_folder(folder)
        save_problem(folder / "problem.txt", found.merged.problem)
        save_plan(folder / "plan.txt", found.merged.plan)
    return found


def _beside(run: RecordedRun, problem: str, plan: str) -> Beside:
    from overlapc.core.files import load_plan, load_problem

    found = beside(run, load_problem(problem), load_plan(plan))
    if not found.steps:
        raise FileError(
            f"{run.name} has no step of the plan {plan}: fewer than half of its ops are found in "
            "its order; expected a trace of what this plan ran, recorded with CPU activities"
        )
    return found


def _print_beside(found: Beside, top: int) -> None:
    measured, predicted = found.measured_ns, found.predicted_ns
    print(
        f"beside the plan, means of {found.steps} step{'s' * (found.steps > 1)}: ops predicted "
        f"{predicted / 1e6:.3f} ms, measured {measured / 1e6:.3f} ms; {len(found.ops)} matched, "
        f"{len(found.unmatched)} not found in the run"
    )
    head = "predicted ms", "measured ms", "measured / predicted"
    rows = [
        (name, str(count), *_three(before, after)) for name, count, before, after in by_name(found)
    ]
    print_table([("ops", "issues", *head), *rows[:top]])
    print()
    worst = sorted(found.ops, key=lambda pair: -abs(pair.measured_ns - pair.predicted_ns))[:top]
    far = [(pair.issue, pair.name, *_three(pair.predicted_ns, pair.measured_ns)) for pair in worst]
    print_table([("farthest off", "op", *head), *far])
    if found.collectives:
        print()
        sent = [
            (pair.issue, *_three(pair.predicted_ns, pair.measured_ns), *_three(*exposed)[:2])
            for pair, exposed in zip(found.collectives, found.exposed, strict=True)
        ]
        print_table([("collective", *head, "exposed, predicted", "exposed, measured"), *sent[:top]])


def _three(predicted_ns: float, measured_ns: float) -> tuple[str, str, str]:
    ratio = f"{measured_ns / predicted_ns:.2f}" if predicted_ns else "-"
    return f"{predicted_ns / 1e6:.3f}", f"{measured_ns / 1e6:.3f}", ratio


def _print(run: RecordedRun, top: int) -> None:
    each = 1000 * run.steps  # from microseconds of all steps to milliseconds of one
    stalled = run.span - run.compute - run.traffic + run.both
    print(
        f"{run.name}: {run.steps} step{'s' * (run.steps > 1)} of {run.span / each:.1f} ms: "
        f"compute {run.compute / each:.1f}, traffic {run.traffic / each:.1f} ms, "
        f"{run.exposed / each:.1f} of it exposed, {stalled / each:.1f} ms of neither"
    )
    if run.warning:
        print(f"warning: {run.name} {run.warning}")
    print_table([("lane", "busy ms"), *((lane, f"{us / each:.1f}") for lane, us in run.lanes)])
    if run.collectives:
        print()
        if sum(one.event.took for one in run.collectives) > _AT_ONCE * run.traffic:
            print("collectives that ran at once are each counted in full:")
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


def _by_kind(collectives: Sequence[RecordedExposure], each: float) -> list[tuple[str, ...]]:
    kinds: dict[str, list[RecordedExposure]] = {}
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
