"""A run of a planned graph is matched with its plan, op by op, whatever else the run does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from overlapc.cli import GOOD, main
from overlapc.core.files import load_problem, save_plan
from overlapc.core.ir import parse_issue
from overlapc.core.simulate import simulate
from overlapc.report.recordings.beside import beside, by_name, called
from overlapc.report.recordings.kineto import read_run
from overlapc.solvers import solve

PROBLEM = Path(__file__).parent / "problems" / "7B-2L-x4-s2048-b8-a100-pcie-80-f1-m0.35.txt"
problem = load_problem(PROBLEM)
plan = solve(problem, "full")


def recorded(folder: Path, steps: int, on_gpu: bool = False, slower: int = 2) -> Path:
    """A trace of a run in which every op and every collective takes so much longer."""
    events: list[dict[str, Any]] = []
    now = 0.0

    def event(name: str, start: float, took: float, **more: Any) -> None:
        each = {"ph": "X", "cat": "cpu_op", "name": name, "ts": start, "dur": took, "tid": 1}
        events.append(each | more)

    for step in range(steps):
        begin = now
        event("aten::rand", now, 3)  # a loader's, which the plan knows nothing of
        now += 3
        for number, text in enumerate(plan.order):
            op = problem.trace.op[parse_issue(text)[0]]
            name, cost = called(op.signature), problem.cost(op.name)
            took = slower * cost.compute_ns / 1000
            if op.role == "start":
                event("gloo:all_reduce", now, slower * cost.comm_ns / 1000, tid=2)
                took = 1.0
            one = step * 10_000 + number
            on_host = 1.0 if on_gpu else took
            event(name, now, on_host, args={"External id": one})
            event("aten::empty", now, on_host / 2)  # that it calls
            if on_gpu and cost.compute_ns and op.role != "start":
                args = {"External id": one, "stream": 7}
                event("some_kernel", now + 500, took, cat="kernel", args=args)
            now += max(on_host, took) + 1
        event("CompiledFunction", begin, now - begin)
        event("autograd::engine::evaluate_function: CompiledFunctionBackward", begin, now - begin)
    path = folder / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    return path


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("steps", [1, 3])
def test_every_op_is_found_in_every_step(steps: int, on_gpu: bool, tmp_path: Path) -> None:
    found = beside(read_run(recorded(tmp_path, steps, on_gpu)), problem, plan)
    assert found.steps == steps
    assert found.unmatched == ()
    timed = [text for text in plan.order if problem.compute_ns[text]]
    starts = [text for text in timed if problem.trace.op[parse_issue(text)[0]].role == "start"]
    assert [pair.issue for pair in found.ops] == [text for text in timed if text not in starts]
    for pair in found.ops:
        assert pair.measured_ns == pytest.approx(2 * pair.predicted_ns, abs=1)
    assert sum(row[1] for row in by_name(found)) == len(found.ops)


def test_collectives_are_matched_in_their_order(tmp_path: Path) -> None:
    found = beside(read_run(recorded(tmp_path, 2)), problem, plan)
    exposures = simulate(problem, plan).exposures
    assert [pair.issue for pair in found.collectives] == [one.issue for one in exposures]
    for pair, one in zip(found.collectives, exposures, strict=True):
        assert pair.measured_ns == pytest.approx(2 * one.comm_ns, abs=1)


def test_the_command_prints_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, file = recorded(tmp_path, 1), tmp_path / "plan.txt"
    save_plan(file, plan)
    arguments = ["trace", str(path), "--plan", str(PROBLEM), str(file)]
    assert main(arguments) == GOOD
    assert "0 not found in the run" in capsys.readouterr().out
    assert main([*arguments, "--json"]) == GOOD
    (document,) = json.loads(capsys.readouterr().out)
    assert document["plan"]["steps"] == 1


def test_another_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 5, "tid": 1}
    path, file = tmp_path / "trace.json", tmp_path / "plan.txt"
    path.write_text(json.dumps({"traceEvents": [other]}))
    save_plan(file, plan)
    assert main(["trace", str(path), "--plan", str(PROBLEM), str(file)]) != GOOD
    assert "no step of the plan" in capsys.readouterr().err
