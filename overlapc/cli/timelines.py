"""`overlapc simulate` runs a plan or a schedule in the simulator."""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

from overlapc.cli.shared import GOOD, Declare, positive, print_text
from overlapc.core.errors import FileError, OptionError


def declare_simulate(command: Declare) -> None:
    simulate = command("simulate", _simulate, "run a plan or a schedule in the simulator")
    simulate.add_argument("file", help="a problem file, or a schedule file")
    simulate.add_argument("plan", nargs="?", help="the plan, for a problem")
    simulate.add_argument(
        "--costs",
        type=Path,
        help="for a schedule: a JSON file, a list with an object for each stage, "
        '{"forward_ns": 1, "input_ns": 1, "weight_ns": 1}; by default all take 1 ns',
    )
    simulate.add_argument("--trace", type=Path, help="write a Perfetto trace here")
    simulate.add_argument(
        "--picture",
        metavar="COLUMNS",
        type=positive,
        nargs="?",
        const=100,
        help="draw the timeline as text, so many characters wide (100)",
    )


def _simulate(args: argparse.Namespace) -> int:
    from overlapc.core.files import write_file
    from overlapc.core.pipeline import PipelineTimeline, describe
    from overlapc.report.picture import picture
    from overlapc.report.trace import chrome_trace, pipeline_json

    if args.picture is not None and args.json:
        raise OptionError("--picture with --json: expected one of both; --trace writes JSON, too")
    timeline = _timeline(args)
    if args.trace is not None:
        write_file(args.trace, json.dumps(chrome_trace(timeline)))
    if args.plan is None and args.costs is None:
        print("no --costs: each part of a backward, and a forward, takes 1 ns", file=sys.stderr)
    if args.picture is not None:
        is_row = isinstance(timeline, PipelineTimeline)
        drawn = timeline.picture if is_row else partial(picture, timeline)
        print_text(drawn(args.picture))
        return GOOD
    if isinstance(timeline, PipelineTimeline):
        print(json.dumps(pipeline_json(timeline), indent=1) if args.json else describe(timeline))
        return GOOD
    keys = ("step_ns", "phase_ns", "exposed_ns", "comm_ns", "recompute_ns", "peak_bytes")
    figures = {key: getattr(timeline, key) for key in keys}
    if args.json:
        print(json.dumps(figures, indent=1))
    else:
        print("\n".join(f"{key:13} {value}" for key, value in figures.items()))
    return GOOD


def _timeline(args: argparse.Namespace) -> Any:
    """The timeline of a problem's plan, or of a schedule with its stages' costs."""
    from overlapc.core.files import load_plan, load_problem, read_json, read_text
    from overlapc.core.pipeline import StageCost, simulate_pipeline
    from overlapc.core.schedule import parse_schedule
    from overlapc.planning.road import judged

    given = args.costs
    if args.plan is not None:
        if given is not None:
            raise OptionError(
                f"--costs {given} with a plan, whose problem has its own costs; expected a "
                "schedule, or no --costs"
            )
        problem, plan = load_problem(args.file), load_plan(args.plan)
        return judged(args.plan, problem, plan, given=True).timeline
    text = read_text(args.file, "schedule")
    try:
        schedule = parse_schedule(text)
    except FileError as error:
        hint = "for a problem, name its plan behind it: PROBLEM PLAN"
        raise FileError(f"{args.file!r}: {error}; {hint}") from None
    costs = [StageCost(1, 1, 1)] * schedule.stages
    if given is not None:
        try:
            costs = [_stage_cost(stage) for stage in read_json(given, "costs")]
        except (FileError, ValueError, TypeError, AttributeError) as error:
            raise OptionError(
                f"--costs {given}: {error}; expected a JSON list with an object for each "
                'stage: {"forward_ns": 1, "input_ns": 1, "weight_ns": 1}'
            ) from None
    return simulate_pipeline(schedule, costs)


def _stage_cost(given: dict[str, Any]) -> Any:
    from overlapc.core.pipeline import StageCost

    working = tuple((str(kind), int(size)) for kind, size in given.get("working", ()))
    return StageCost(**{**given, "working": working})
