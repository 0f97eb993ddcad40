"""Every solver and baseline on the benchmark set: predicted step, bound, gap and search time.

    python benchmarks/solvers.py [--only 7B] [--every 5] [--opt-seconds 20] [--json FILE]
    python benchmarks/solvers.py --depths 12,24,48,96     how HEU's search grows with depth

With `--opt-seconds 0` it leaves OPT out, which needs an idle machine. Ratios are of OPT's and of
HEU's steps. All figures are *predicted*, by one simulator, on costs estimated for the named
hardware. A baseline whose plan does not fit the budget is shown as "-"; ratios are over those that
fit.

`torch` is the fastest that fits of what PyTorch's knapsack saves at six budgets, in the order of
its own overlap scheduler or as it comes. The last columns take the choices of HEU, OPT and
Checkmate and move into windows: recompute alone, weight gradients alone, one after the other
(in the better of both orders), and both jointly.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.problems import Case, Stage, build, cases
from benchmarks.torch_plans import torch_plans
from overlapc.core.errors import Infeasible
from overlapc.core.ir import Plan, Problem
from overlapc.core.simulate import simulate
from overlapc.solvers import FIELD, bound_ns, solve
from overlapc.solvers.choose.blocks import find_repetition
from overlapc.solvers.choose.choice import Needs, choice_of, on_demand
from overlapc.solvers.choose.period import Period, Policy, Totals
from overlapc.solvers.field.baselines import fits
from overlapc.solvers.order.filling import PASSES, filled
from overlapc.solvers.order.work import NEVER, backward_work

OURS = ("heu", "overlap", "opt")
SEPARATE = ("R", "W", "R,W", "RW")  # what moves; one after the other, or jointly
COLUMNS = (*OURS, *FIELD, "torch", *SEPARATE)


def measure(case: Case, opt_seconds: float, opt_gap: float) -> dict[str, Any]:
    """One row: what every solver finds for the case."""
    problem = build(case)
    row: dict[str, Any] = {
        "case": case.name,
        "hardware": case.hardware,
        "digest": problem.trace.digest,
        "ops": len(problem.trace.ops),
        "budget_bytes": problem.budget_bytes,
        "solvers": {},
    }
    bound = bound_ns(problem)
    plans = {}
    for name in (*OURS, *FIELD):
        if name == "opt" and not opt_seconds:
            continue
        began = time.perf_counter()
        try:
            plan = solve(problem, name, time_limit_s=opt_seconds, gap=opt_gap)
        except Infeasible:
            continue
        seconds = time.perf_counter() - began
        bound = max(bound, plan.bound_ns)
        plans[name] = plan
        row["solvers"][name] = describe(problem, plan) | {"search_s": round(seconds, 3)}
    others = {"torch": fastest(problem, torch_plans(case, problem))}
    for moves in SEPARATE:
        mine = [plans[name] for name in ("heu", "opt", "checkmate") if name in plans]
        found = [moved(problem, plan, moves.split(",")) for plan in mine]
        others[moves] = fastest(problem, (plan for some in found for plan in some))
    for name, best in others.items():
        if best is not None:
            row["solvers"][name] = describe(problem, best)
    row["bound_ms"] = bound / 1e6
    return row


def fastest(problem: Problem, plans: Iterable[Plan]) -> Plan | None:
    fitting = [plan for plan in plans if fits(problem, plan)]
    return min(fitting, key=lambda plan: simulate(problem, plan).step_ns, default=None)


def moved(problem: Problem, plan: Plan, turns: Sequence[str]) -> list[Plan]:
    """The plan's choice recomputed on demand, then the windows filled: in these turns, also the
    other way round if there are two; jointly in every way there is."""
    choice = choice_of(problem, plan)
    base = replace(plan, order=on_demand(problem, choice))
    if not fits(problem, base):
        return []
    tastes = [way[0] for way in PASSES if len(way) == 1]
    orders = (["R", "W"], ["W", "R"]) if turns == ["RW"] else (turns, turns[::-1])
    ways = set(PASSES) if turns == ["RW"] else set()
    for order in orders:
        for chosen in product(tastes, repeat=len(order)):
            ways.add(tuple(replace(t, moves=m) for t, m in zip(chosen, order, strict=True)))
    work = backward_work(problem, choice)
    budget = problem.budget_bytes if problem.budget_bytes is not None else NEVER
    return [base, *(filled(base, work, budget, way) for way in sorted(ways, key=repr))]


def describe(problem: Problem, plan: Plan) -> dict[str, Any]:
    timeline = simulate(problem, plan)
    exposed: dict[str, float] = {}
    for exposure in timeline.exposures:
        again = exposure.issue.startswith("R:")
        kind = ("recomputed " if again else "") + exposure.issue.removeprefix("R:").rstrip(
            "_0123456789"
        )
        exposed[kind] = exposed.get(kind, 0.0) + exposure.exposed_ns / 1e6
    hidden = {issue for e in timeline.exposures for issue in e.hidden_by if issue.startswith("R:")}
    return {
        "step_ms": timeline.step_ns / 1e6,
        "exposed_ms": exposed,
        "recompute_ms": timeline.recompute_ns / 1e6,
        "recompute_hidden_ms": sum(problem.cost(i[2:]).compute_ns for i in hidden) / 1e6,
        "peak_bytes": timeline.peak_bytes,
        "status": plan.status,
    }


def print_row(row: dict[str, Any]) -> None:
    cells = []
    for name in COLUMNS:
        found = row["solvers"].get(name)
        cells.append(f"{found['step_ms']:8.1f}" if found else f"{'-':>8}")
    best = row["solvers"].get("opt", {}).get("step_ms", float("nan"))
    heu = row["solvers"].get("heu", {})
    gap = 100 * (1 - row["bound_ms"] / best)
    behind = 100 * (heu["step_ms"] / best - 1) if heu else float("nan")
    print(
        f"{row['case']:50}{row['bound_ms']:8.1f}{gap:6.2f}%{behind:6.2f}%"
        f"{heu.get('search_s', 0):7.2f}{''.join(cells)}",
        flush=True,
    )


def summarise(rows: list[dict[str, Any]]) -> None:
    proven = [r for r in rows if has(r, "opt")]
    gaps = {r["case"]: 1 - r["bound_ms"] / step(r, "opt") for r in proven}
    behind = {r["case"]: step(r, "heu") / step(r, "opt") - 1 for r in proven if has(r, "heu")}
    above = {r["case"]: step(r, "heu") / r["bound_ms"] - 1 for r in rows if has(r, "heu")}
    print(f"\n{len(rows)} cases, {len(proven)} with OPT")
    for name, found in (
        ("proven gap of opt", gaps),
        ("heu behind opt", behind),
        ("heu above the bound", above),
    ):
        if values := sorted(found.values()):
            print(
                f"{name}: mean {statistics.mean(values):.2%}, median "
                f"{statistics.median(values):.2%}, nine of ten below "
                f"{values[len(values) * 9 // 10]:.2%}, most {values[-1]:.2%}"
            )
    within = sum(gap <= 0.01 for gap in gaps.values())
    print(f"proven within 1%: {within} of {len(gaps)}; further off:")
    for case, gap in gaps.items():
        if gap > 0.01:
            print(f"    {case:50} {gap:.2%}")
    for hardware in ("", *sorted({r["hardware"] for r in rows})):
        here = [r for r in rows if hardware in r["hardware"]]
        for ours in ("heu", "opt"):
            print_ratios(hardware or "all", ours, [r for r in here if has(r, ours)])


def print_ratios(where: str, ours: str, rows: list[dict[str, Any]]) -> None:
    print(f"{where}: {ours} is faster, median (min..max), than")
    for name in (*FIELD, "torch", *SEPARATE):
        ratios = [step(r, name) / step(r, ours) for r in rows if has(r, name)]
        if ratios:
            print(f"    {name:10} {spread(ratios)}   fits {len(ratios)} of {len(rows)}")
    for name in ("none", "full"):
        shares = [1 - exposed(r, ours) / exposed(r, name) for r in rows if has(r, name)]
        if shares:
            print(f"    exposed communication less than {name}'s by {spread(shares)}")


def has(row: dict[str, Any], solver: str) -> bool:
    return solver in row["solvers"]


def step(row: dict[str, Any], solver: str) -> float:
    return float(row["solvers"][solver]["step_ms"])


def exposed(row: dict[str, Any], solver: str) -> float:
    return max(1e-9, sum(row["solvers"][solver]["exposed_ms"].values()))


def print_depths(depths: list[int], repeats: int = 15) -> None:
    """Seconds of HEU's search, measured: what is found once for a trace, then formulate and solve,
    then the schedules it makes of it."""
    print("GPT 20B, TP=8; measured, median (min..max) of", repeats)
    for layers in depths:
        problem = build(Case(Stage("20B", layers, 8, 2048, 4), "a100-sxm-80", 1, 0.35))
        needs = Needs(problem.trace)
        once, search, rest = [], [], []
        for _ in range(repeats):
            began = time.perf_counter()
            period = Period(problem, needs, find_repetition(problem.trace))
            totals = Totals.of(problem)
            found = time.perf_counter()
            Policy(problem, period, totals).keep(room=0)
            solved = time.perf_counter()
            once.append(found - began)
            search.append(solved - found)
        for _ in range(3):
            began = time.perf_counter()
            solve(problem, "heu")
            rest.append(time.perf_counter() - began)
        print(
            f"{layers:3} layers, {len(problem.trace.ops)} ops: structure {spread(once)} s, "
            f"formulate and solve {spread(search)} s, whole solve() {spread(rest)} s",
            flush=True,
        )


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.3f} ({min(values):.3f}..{max(values):.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="only cases whose name contains this")
    parser.add_argument("--every", type=int, default=1, help="only every N-th case")
    parser.add_argument(
        "--from", dest="first", type=int, default=0, help="number of the first case"
    )
    parser.add_argument("--opt-seconds", type=float, default=20.0)
    parser.add_argument("--opt-gap", type=float, default=0.003, help="proven gap that is enough")
    parser.add_argument("--thorough", action="store_true", help="the full cross product")
    parser.add_argument("--json", type=Path, help="file that keeps results and is continued")
    add_depths = {"type": lambda text: [int(word) for word in text.split(",")]}
    parser.add_argument("--depths", help="layers at which to time HEU's search", **add_depths)
    args = parser.parse_args()
    if args.depths:
        print_depths(args.depths)
        return
    chosen = [case for case in cases(args.thorough) if args.only in case.name][
        args.first :: args.every
    ]
    print(
        f"{'case':50}{'bound':>8}{'gap':>7}{'heu-opt':>7}{'heu s':>7}"
        + "".join(f"{name:>8.7}" for name in COLUMNS)
    )
    rows = json.loads(args.json.read_text()) if args.json and args.json.exists() else []
    known = {row["case"]: row for row in rows}
    for case in chosen:
        if case.name not in known:
            rows.append(measure(case, args.opt_seconds, args.opt_gap))
            if args.json:
                args.json.write_text(json.dumps(rows, indent=1) + "\n")
        print_row(known.get(case.name) or rows[-1])
    if rows:
        summarise(rows)


if __name__ == "__main__":
    main()
