"""`overlapc explain` and `plan` read files of problems and plans."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from overlapc.cli.shared import (
    GOOD,
    Declare,
    bytes_or_text,
    can_write,
    print_table,
    print_text,
    seconds,
)
from overlapc.core.errors import OptionError


def declare_explain(command: Declare) -> None:
    explain = command(
        "explain", _explain, "say what hides each collective of a plan, and why the rest is exposed"
    )
    explain.add_argument("problem", help="a problem file")
    explain.add_argument("plan", help="a plan file for it")
    explain.add_argument("other", nargs="?", help="another plan: say what differs")
    explain.add_argument(
        "--ops",
        action="store_true",
        help="also say for each op whether its result is saved or recomputed, and where",
    )


def declare_plan(command: Declare) -> None:
    plan = command("plan", _plan, "solve a problem file")
    plan.add_argument("problem", help="a problem file")
    plan.add_argument("--solver", default="overlap")
    plan.add_argument("--memory", help='the budget, such as "8GB"; by default the problem\'s own')
    plan.add_argument("--seconds", type=seconds, default=60.0, help="time limit of solver opt")
    plan.add_argument("--out", type=Path, help="write the plan here instead of to stdout")


def _explain(args: argparse.Namespace) -> int:
    from overlapc.core.files import load_plan, load_problem
    from overlapc.planning.road import judged
    from overlapc.report.explain import explain_ops, op_fates

    if args.other is not None:
        if args.ops:
            raise OptionError("--ops with two plans: expected one plan, or no --ops")
        return _compare(args)
    problem, plan = load_problem(args.problem), load_plan(args.plan)
    report = judged(args.plan, problem, plan, given=True)
    report = replace(report, given=False)  # the file's bound is for these costs
    if args.json:
        ops = {"ops": [asdict(fate) for fate in op_fates(report)]} if args.ops else {}
        print(json.dumps(_figures(report) | ops, indent=1))
    else:
        print_text("\n".join([report.explain(), *([explain_ops(report)] if args.ops else [])]))
    return GOOD


def _figures(report: Any) -> dict[str, Any]:
    timeline = report.timeline
    return {
        "solver": report.plan.solver,
        "found_by": report.plan.found_by,
        "step_ns": timeline.step_ns,
        "bound_ns": report.bound_ns,
        "exposed_ns": timeline.exposed_ns,
        "comm_ns": timeline.comm_ns,
        "recompute_ns": timeline.recompute_ns,
        "peak_bytes": timeline.peak_bytes,
        "collectives": [asdict(exposure) for exposure in timeline.exposures],
    }


def _plan(args: argparse.Namespace) -> int:
    from overlapc.core.files import load_problem, write_file
    from overlapc.core.text import format_plan
    from overlapc.planning.options import Options, parse_budget
    from overlapc.planning.road import judged
    from overlapc.solvers import solve
    from overlapc.tools.progress import doing

    memory = bytes_or_text(args.memory) if args.memory else None
    options = Options(memory_budget=memory, solver=args.solver)
    problem = load_problem(args.problem)
    if args.memory:
        problem = replace(problem, budget_bytes=parse_budget(options.memory_budget, 0, 0))
    can_write(args.out)
    with doing(f"solving ({args.solver}, {len(problem.trace.ops)} ops)"):
        plan = solve(problem, args.solver, time_limit_s=args.seconds)
    if args.out is not None:
        write_file(args.out, format_plan(plan))
    if args.json:
        print(json.dumps(_figures(judged(args.problem, problem, plan)), indent=1))
    elif args.out is None:
        print(format_plan(plan), end="")
    return GOOD


def _compare(args: argparse.Namespace) -> int:
    from overlapc.core.files import load_plan, load_problem
    from overlapc.core.ir import issue
    from overlapc.planning.road import judged

    problem = load_problem(args.problem)
    plans = [load_plan(path) for path in (args.plan, args.other)]
    reports = [judged(plan.solver, problem, plan, given=True) for plan in plans]
    first, second = (set(plan.recomputed) for plan in plans)
    figures = {
        key: [getattr(report.timeline, key) for report in reports]
        for key in ("step_ns", "exposed_ns", "recompute_ns", "peak_bytes")
    }
    moved = _moved(plans[0].order, plans[1].order)
    if args.json:
        differences = {
            **figures,
            "recomputed_only_in_first": sorted(first - second),
            "recomputed_only_in_second": sorted(second - first),
            "moved": moved,
        }
        print(json.dumps(differences, indent=1))
        return GOOD
    rows = [("", args.plan, args.other, "ratio")]
    for key, (a, b) in figures.items():
        unit = "ms" if key.endswith("ns") else "MB"
        name = key.removesuffix("_ns").removesuffix("_bytes")
        ratio = f"{b / a:.3f}" if a else "-"
        rows.append((name, f"{a / 1e6:.3f} {unit}", f"{b / 1e6:.3f} {unit}", ratio))
    print_table(rows)
    for name, only in ((args.plan, first - second), (args.other, second - first)):
        issued = ", ".join(issue(op, True) for op in sorted(only)) or "nothing"
        print_text(f"recomputed only in {name}: {issued}")
    print_text(f"issued in another place: {', '.join(moved) or 'nothing'}")
    return GOOD


def _moved(first: Sequence[str], second: Sequence[str]) -> list[str]:
    """Issues that are in both orders, but not in their longest common subsequence."""
    from difflib import SequenceMatcher

    both = set(first) & set(second)
    a, b = ([text for text in order if text in both] for order in (first, second))
    blocks = SequenceMatcher(None, a, b, autojunk=False).get_matching_blocks()
    still = {text for block in blocks for text in a[block.a : block.a + block.size]}
    return [text for text in a if text not in still]
