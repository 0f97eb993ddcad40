"""This checkout's solvers against those of another, on the same problems.

    git worktree add /tmp/before f87da83
    python benchmarks/against.py /tmp/before [--every 5] [--solvers heu,overlap,opt]
    python benchmarks/against.py /tmp/before --solvers "" --merged 10 --random 1000 --pipelines

Each tree runs in a process of its own, one after the other in turn. Graphs are each tree's own
captures of the benchmark set; costs are this one's, and the budget is the larger of both trees',
since the smallest that works differs. Of every `--merged`-th case microbatches are merged;
`--random` draws so many small problems; `--pipelines` draws 200 pipelines and
places their rows. Every figure is *predicted*: by this tree's
simulator, but merged plans and rows by each tree's own. Ratios are this tree's over the other's.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_OPT_SECONDS, _OPT_GAP, _PIPELINES = 20.0, 0.003, 200
_WORSE = 1.005  # a plan that takes so many times as long is listed


class _Tree:
    """A checkout, as a process that answers one question a line."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, __file__, str(folder), "--answer"]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def ask(self, **question: Any) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(question) + "\n")
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.process.args}: ended at {question['do']}")
        return json.loads(line)


def answer(folder: str) -> None:
    """Answer questions from standard input with the code in `folder`."""
    sys.path.insert(0, folder)
    from dataclasses import replace

    from benchmarks.problems import build, cases
    from overlapc.core.errors import Infeasible
    from overlapc.core.ir import Plan, Problem
    from overlapc.core.merge import merge
    from overlapc.core.pipeline import StageCost, simulate_pipeline
    from overlapc.core.schedule import parse_schedule
    from overlapc.core.simulate import simulate
    from overlapc.core.text import parse_problem
    from overlapc.solvers import solve
    from overlapc.solvers.pipeline.rows import placed

    every = list(cases(False))
    problem: Problem | None = None

    def costs_of(problem: Problem) -> dict[str, Any]:
        costs = {
            name: [cost.compute_ns, cost.comm_ns, cost.workspace_bytes]
            for name, cost in problem.profile.costs.items()
        }
        slowdown = problem.profile.slowdown
        return {
            "costs": costs,
            "slowdown": [slowdown.compute_permille, slowdown.comm_permille],
            "budget": problem.budget_bytes,
            "resident": problem.resident_bytes,
            "in_flight": str(Fraction(problem.in_flight)),
        }

    def with_costs(problem: Problem, given: dict[str, Any]) -> Problem:
        names = ("compute_ns", "comm_ns", "workspace_bytes")
        found = problem.profile.costs
        if found.keys() != given["costs"].keys():
            raise ValueError(f"{folder} captures other ops than the other tree")
        costs = {
            name: replace(cost, **dict(zip(names, given["costs"][name], strict=True)))
            for name, cost in found.items()
        }
        compute, comm = given["slowdown"]
        slowdown = replace(problem.profile.slowdown, compute_permille=compute, comm_permille=comm)
        times = Fraction(given["in_flight"])
        return replace(
            problem,
            profile=replace(problem.profile, costs=costs, slowdown=slowdown),
            budget_bytes=given["budget"],
            resident_bytes=given["resident"],
            in_flight=times.numerator if times.denominator == 1 else times,
        )

    for line in sys.stdin:
        asked = json.loads(line)
        found: Any = None
        if asked["do"] == "build":
            case = every[asked["case"]] if asked["case"] < len(every) else None
            problem = build(case) if case is not None else None
            found = case and costs_of(problem) | {"name": case.name}
        elif asked["do"] == "parse":
            problem = parse_problem(asked["text"])
        elif asked["do"] == "costs":
            problem = with_costs(problem, asked["given"])
        elif asked["do"] == "solve":
            of = merge(problem) if asked["merged"] else problem
            began = time.perf_counter()
            try:
                plan = solve(of, asked["solver"], time_limit_s=_OPT_SECONDS, gap=_OPT_GAP)
                took = time.perf_counter() - began
                found = [simulate(of, plan).step_ns, took, plan.saved, plan.order]
            except Infeasible:
                pass
        elif asked["do"] == "judge":
            plan = Plan(problem.trace.digest, "other", *map(tuple, asked["plan"]))
            found = simulate(problem, plan).step_ns
        else:
            costs = [
                StageCost(**{**c, "working": tuple(map(tuple, c["working"]))})
                for c in asked["costs"]
            ]
            began = time.perf_counter()
            rows = placed(parse_schedule(asked["rows"]), costs, asked["limits"])
            took = time.perf_counter() - began
            found = [simulate_pipeline(rows, costs).step_ns, took]
        print(json.dumps(found), flush=True)


def planned(
    trees: tuple[_Tree, _Tree], every: int, merged: int, solvers: list[str]
) -> Iterator[tuple[str, str, float, float]]:
    """Each solver on the set: its name, the case, and the ratios of steps and of search times."""
    ours, other = trees
    number = 0
    while (mine := ours.ask(do="build", case=number)) is not None:
        theirs = other.ask(do="build", case=number)
        mine["budget"] = max(mine["budget"], theirs["budget"])
        for tree in trees:
            tree.ask(do="costs", given=mine)
        asked = [(solver, False) for solver in solvers]
        asked += [("overlap", True)] if merged and number % merged == 0 else []
        for solver, is_merged in asked:
            new, old = (tree.ask(do="solve", solver=solver, merged=is_merged) for tree in trees)
            what = "merged" if is_merged else solver
            if new is None or old is None:
                who = [name for name, one in (("this", new), ("the other", old)) if one is None]
                print(f"{mine['name']}: {what} finds nothing in {' and '.join(who)}", flush=True)
                continue
            step = old[0] if is_merged else ours.ask(do="judge", plan=old[2:])
            yield what, mine["name"], new[0] / step, new[1] / old[1]
        number += every


def drawn_problems(
    trees: tuple[_Tree, _Tree], count: int
) -> Iterator[tuple[str, str, float, float]]:
    """The solvers' plans of small random problems, as `planned` gives them; plans that are not the
    same are named."""
    sys.path.insert(0, str(ROOT))
    from random import Random

    from overlapc.core.text import format_problem
    from tests.plain.strategies import random_problem

    for seed in range(count):
        problem = random_problem(Random(seed), lags=True)
        for tree in trees:
            tree.ask(do="parse", text=format_problem(problem))
        for solver in ("heu", "overlap", "opt"):
            new, old = (tree.ask(do="solve", solver=solver, merged=False) for tree in trees)
            if (new is None) != (old is None):
                yield f"random {solver}", f"problem {seed}", math.inf, 1.0
            elif new is not None:
                if new[2:] != old[2:]:
                    print(f"problem {seed}: {solver} gives another plan", flush=True)
                yield (
                    f"random {solver}",
                    f"problem {seed}",
                    new[0] / max(1, old[0]),
                    new[1] / old[1],
                )


def pipelines(trees: tuple[_Tree, _Tree]) -> Iterator[tuple[str, str, float, float]]:
    """Rows that both trees place for drawn pipelines, as `planned` gives them."""
    sys.path.insert(0, str(ROOT))
    from dataclasses import asdict

    from benchmarks.drawn_pipelines import drawn
    from overlapc.core.schedule import format_schedule

    for seed in range(_PIPELINES):
        schedule, costs, limits = drawn(seed)
        given = {"costs": [asdict(cost) for cost in costs], "limits": limits}
        new, old = (t.ask(do="rows", rows=format_schedule(schedule), **given) for t in trees)
        yield "rows", f"pipeline {seed}", new[0] / old[0], new[1] / old[1]


def shown(found: Iterable[tuple[str, str, float, float]]) -> None:
    steps: dict[str, list[float]] = defaultdict(list)
    times: dict[str, list[float]] = defaultdict(list)
    for what, case, step, took in found:
        steps[what].append(step)
        times[what].append(took)
        if step > _WORSE:
            print(f"{case}: {what} takes {step:.4f} of the other's step", flush=True)
    for what, each in steps.items():
        print(
            f"{what}: {len(each)} cases, step median {statistics.median(each):.4f} "
            f"({min(each):.4f}..{max(each):.4f}), {sum(step > _WORSE for step in each)} above "
            f"{_WORSE}, search time median {statistics.median(times[what]):.2f}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tree", type=Path, help="the other checkout")
    parser.add_argument("--every", type=int, default=1, help="only every n-th case")
    parser.add_argument("--solvers", default="heu,overlap", help="joined by commas")
    parser.add_argument("--merged", type=int, default=0, help="also merged, every n-th case")
    parser.add_argument("--random", type=int, default=0, help="also so many random problems")
    parser.add_argument("--pipelines", action="store_true", help="also drawn pipelines")
    parser.add_argument("--answer", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.answer:
        answer(str(args.tree))
        return
    if not (args.tree / "overlapc").is_dir():
        raise SystemExit(f"{args.tree}: found no overlapc in it, expected a checkout")
    trees = _Tree(ROOT), _Tree(args.tree)
    solvers = [name for name in args.solvers.split(",") if name]
    if solvers or args.merged:
        shown(planned(trees, args.every, args.merged, solvers))
    if args.random:
        shown(drawn_problems(trees, args.random))
    if args.pipelines:
        shown(pipelines(trees))


if __name__ == "__main__":
    main()
