"""Slices on the benchmark set: what a batch in slices takes against the whole batch, *predicted*.

    python benchmarks/sliced_plans.py [--slices 2] [--solver heu] [--only 7B] [--every 2]

A case is a GPT stage of the set (`problems.py`) whose gradients are added up, uncut and in slices,
in the same memory: the case's share of the way from the smallest plan of the uncut batch to all
saved. Costs are estimated at each size, matrices of half a batch with what half a batch reaches.
`auto` is the faster of the two, which is what one would run. `seconds` are processor time for
planning.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.lab import write_results
from benchmarks.problems import GPT_SHAPES, Case, captured, cases
from overlapc.core.errors import Infeasible
from overlapc.core.ir import Plan, Problem
from overlapc.core.simulate import simulate
from overlapc.passes.emit.parts import parameter_gradients
from overlapc.planning.problem import TrainingStep, eager_timeline, formulate
from overlapc.profiler.estimate import estimate
from overlapc.profiler.hardware import load_hardware
from overlapc.solvers import smallest_bytes, solve
from overlapc.solvers.choose.period import Periodic
from overlapc.solvers.order.slices import solve_slices
from overlapc.solvers.step import quick_start
from overlapc.tools.collecting import of_young_alone


@dataclass(frozen=True)
class Found:
    step_ns: int
    exposed_ns: int
    seconds: float

    @staticmethod
    def of(problem: Problem, make: Callable[[], Plan]) -> Found:
        began = time.process_time()
        with of_young_alone():  # as planning does
            plan = make()
        seconds = time.process_time() - began
        timeline = simulate(problem, plan)
        return Found(timeline.step_ns, timeline.exposed_ns, seconds)


def problems_of(case: Case, slices: int) -> tuple[Problem, Problem]:
    """The problem of all slices, and that of one; without budgets."""
    stage = replace(case.stage, batch=case.stage.batch // slices)
    graph = captured(stage)
    machine = replace(load_hardware(case.hardware), kernels=None)  # as the set is listed
    profile = estimate(graph, machine, {lane: stage.ranks for lane in graph.trace.lanes})
    step = TrainingStep(
        in_flight=case.in_flight,
        gradients=tuple(parameter_gradients(graph)),
        add_ns_per_kib=machine.add_ns_per_kib,
        slices=slices,
        loss=False,
    )
    return formulate(graph.trace, profile, None, step), step.slice(graph.trace, profile)


def measure(case: Case, slices: int, solver: str) -> dict[str, Any]:
    uncut, _ = problems_of(case, 1)
    most, least = eager_timeline(uncut).peak_bytes, smallest_bytes(uncut)
    budget = least + round(case.share * (most - least))
    uncut = replace(uncut, budget_bytes=budget)
    cut, lone = (replace(each, budget_bytes=budget) for each in problems_of(case, slices))
    whole = Found.of(uncut, lambda: solve(uncut, solver))

    def sliced() -> Plan:
        if solver != "heu":
            return solve_slices(cut, lone, solve(lone, solver))
        periodic = Periodic(lone, quick=True)
        start = quick_start(lone, periodic=periodic) or solve(lone, solver)
        return solve_slices(cut, lone, start, quick=True, periodic=periodic)

    row = {"case": case.name, "hardware": case.hardware, "whole_ms": whole.step_ns / 1e6}
    row |= {"whole_seconds": round(whole.seconds, 3), "whole_exposed_ms": whole.exposed_ns / 1e6}
    try:
        found = Found.of(cut, sliced)
    except Infeasible:  # a slice's plan holds more than the smallest of the uncut batch
        return row | {"faster": None, "auto": 1.0}
    faster = whole.step_ns / found.step_ns
    row |= {"slices_ms": found.step_ns / 1e6, "slices_exposed_ms": found.exposed_ns / 1e6}
    row |= {"slices_seconds": round(found.seconds, 3)}
    return row | {"faster": faster, "auto": max(1.0, faster)}


def spread(numbers: list[float]) -> str:
    low, high = min(numbers), max(numbers)
    return f"{statistics.median(numbers):.3f} ({low:.3f}..{high:.3f}) of {len(numbers)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--slices", type=int, default=2)
    parser.add_argument("--solver", choices=("heu", "overlap"), default="heu")
    parser.add_argument("--only", help="cases whose names have this")
    parser.add_argument("--every", type=int, default=1, help="only every so many-th case")
    args = parser.parse_args()
    listed = [case for case in cases() if case.stage.model in GPT_SHAPES]
    listed = [case for case in listed if (args.only or "") in case.name][:: args.every]
    rows = []
    for case in sorted(listed, key=lambda case: case.stage.name):  # captured once each
        rows.append(row := measure(case, args.slices, args.solver))
        faster = f"{row['faster']:.3f}x" if row["faster"] else "nothing fits"
        seconds = row.get("slices_seconds", 0.0)
        print(
            f"{case.name:50} {faster:>12}  {row['whole_seconds']:.1f} s, {seconds:.1f} s",
            flush=True,
        )
    ran = [row for row in rows if row["faster"]]
    print(f"faster: {spread([row['faster'] for row in ran])}")
    print(f"auto: {spread([row['auto'] for row in rows])}")
    print(f"planning: {spread([r['slices_seconds'] / r['whole_seconds'] for r in ran])}")
    print(f"seconds: {spread([r['slices_seconds'] for r in ran])}")
    note = {"what": "predicted", "slices": args.slices, "solver": args.solver}
    name = f"sliced_plans_{args.solver}"
    write_results(name if args.slices == 2 else f"{name}_{args.slices}", {**note, "rows": rows})


if __name__ == "__main__":
    main()
