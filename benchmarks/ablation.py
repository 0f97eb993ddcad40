"""What each generator of the solvers and each entry of their menus is worth, on the benchmark set.

    python benchmarks/ablation.py --every 6 --json benchmarks/results/ablation.json

Every plan that a solver's `generators` make for a case is judged, and says what found it. A word of
that ("hull", "room 15", "listed 4 by path") *wins* a case if the best plan without it is slower by
more than 0.2%; how much slower is its *gain*. Models are split: what to delete is decided on one
half, and the other, held out, says what that costs. Effort is counted in plans that were judged.
All figures are *predicted*, so a busy machine changes none.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.problems import Case, build, cases
from overlapc.core.files import load_problem
from overlapc.core.ir import Plan, Problem
from overlapc.core.simulate import peak_bytes, step_ns
from overlapc.solvers import generators

SOLVED = ("heu", "overlap")
CALIBRATION = ("1.3B", "7B", "20B", "lancet-S", "fine-grained")  # models; others are held out
WINS = 1.002
_CHOSEN = re.compile(r"rung \d+ of \d+|period of \d+|whole|exposing [\d.]+|room \d+|[a-z]+")


def half(case: str) -> str:
    return "calibration" if case.startswith(tuple(f"{m}-" for m in CALIBRATION)) else "held out"


def words(plan: Plan) -> list[str]:
    """What the plan says found it: what chose its saved values, then what ordered it."""
    chosen, *ordered = (plan.found_by or f"baseline {plan.solver}").split(", ")
    return [*_CHOSEN.findall(chosen), *ordered]


def measure(problem: Problem, solver: str) -> dict[str, Any]:
    """The best plan that fits, and the best without each generator and each word."""
    judged: list[tuple[int, frozenset[str]]] = []
    counts: Counter[str] = Counter()
    for name, plans in generators(problem, solver).items():
        for plan in plans:
            found_by = frozenset([f"[{name}]", *words(plan)])
            counts.update(found_by)
            if peak_bytes(problem, plan) <= (problem.budget_bytes or 0):
                judged.append((step_ns(problem, plan), found_by))
    best = min(judged, key=lambda item: item[0], default=(0, frozenset[str]()))
    without = {
        word: min((ns for ns, found_by in judged if word not in found_by), default=None)
        for word in counts
    }
    return {
        "best_ns": best[0],
        "best": sorted(best[1]),
        "plans": sum(n for word, n in counts.items() if word.startswith("[")),
        "words": {word: [counts[word], without[word]] for word in sorted(counts)},
    }


def summarise(rows: Iterable[dict[str, Any]]) -> None:
    """A table for each solver: a row for each word, columns for both halves."""
    by_solver: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        by_solver[row["solver"]].append(row)
    for solver, mine in by_solver.items():
        halves = {name: [r for r in mine if half(r["case"]) == name and r["best_ns"]]
                  for name in ("calibration", "held out")}  # fmt: skip
        print(f"\n{solver}, {statistics.mean(r['plans'] for r in mine):.0f} plans a case")
        print("| found by | plans | " + " | ".join(f"{n} ({len(h)})" for n, h in halves.items()))
        for word in sorted({word for row in mine for word in row["words"]}):
            plans = sum(row["words"].get(word, [0])[0] for row in mine)
            cells = [gained(found, word) for found in halves.values()]
            print(f"| {word:34} | {plans:6} | {' | '.join(cells)} |")


def gained(rows: list[dict[str, Any]], word: str) -> str:
    """How often a word wins, and by how much on the average of these and at most."""
    losses = []
    for row in rows:
        without = row["words"].get(word, [0, row["best_ns"]])[1]
        losses.append(without / row["best_ns"] if without else 2.0)
    won = [loss for loss in losses if loss > WINS]
    if not won:
        return f"{'0':>3} ({max(losses, default=1) - 1:.2%})"
    return f"{len(won):3} {statistics.mean(won) - 1:7.2%}, most {max(won) - 1:7.2%}"


def write(path: Path, document: Any) -> None:
    """All of it or nothing."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(document, indent=1) + "\n")
    os.replace(part, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--every", type=int, default=6, help="only every N-th case of the set")
    parser.add_argument("--solvers", default=",".join(SOLVED))
    parser.add_argument("--problems", type=Path, help="folder that `problems.py --write` wrote")
    parser.add_argument("--json", type=Path, help="file that keeps results and is continued")
    args = parser.parse_args()
    chosen: list[Case] = list(cases())[:: args.every]
    rows = json.loads(args.json.read_text()) if args.json and args.json.exists() else []
    known = {(row["case"], row["solver"]) for row in rows}
    for number, case in enumerate(chosen, 1):
        for solver in args.solvers.split(","):
            if (case.name, solver) in known:
                continue
            text = args.problems / f"{case.name}.txt" if args.problems else None
            problem = load_problem(text) if text else build(case)
            row = {"case": case.name, "solver": solver} | measure(problem, solver)
            rows.append(row)
            if args.json:
                write(args.json, rows)
            print(
                f"{number} of {len(chosen)}: {case.name} {solver}, {row['plans']} plans, "
                f"{row['best_ns'] / 1e6:.1f} ms found by {' '.join(row['best'])}",
                flush=True,
            )
    summarise(rows)


if __name__ == "__main__":
    main()
