"""Traces for Perfetto: every track is a stack of intervals, and nothing is lost."""

from __future__ import annotations

import json
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest

from overlapc.core.ir import Problem
from overlapc.core.pipeline import StageCost, simulate_pipeline
from overlapc.core.simulate import simulate
from overlapc.report.trace import chrome_trace, pipeline_json
from overlapc.solvers import solve
from overlapc.solvers.pipeline.schedules import SCHEDULES, make_schedule
from tests.plain.strategies import random_problem


def assert_nested(trace: dict[str, Any]) -> None:
    tracks: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for event in json.loads(json.dumps(trace))["traceEvents"]:
        if event["ph"] == "X":
            assert event["dur"] >= 0
            key = event["pid"], event["tid"]
            begin, took = (round(event[name] * 1000) for name in ("ts", "dur"))  # whole ns
            tracks.setdefault(key, []).append((begin, begin + took))
    for spans in tracks.values():
        open_: list[tuple[int, int]] = []
        for start, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            while open_ and open_[-1][1] <= start:
                open_.pop()
            assert not open_ or end <= open_[-1][1]
            open_.append((start, end))


def free_problems() -> Iterator[Problem]:
    """Without a budget, forward first."""
    for seed in range(60):
        problem = random_problem(Random(seed), 6)
        if problem.budget_bytes is None and problem.phases == ("F", "IW"):
            yield problem


def test_of_a_plan():
    for problem in free_problems():
        timeline = simulate(problem, solve(problem, "none"))
        trace = chrome_trace(timeline)
        assert_nested(trace)
        assert sum(event["ph"] == "X" for event in trace["traceEvents"]) == len(timeline.spans)


@pytest.mark.parametrize("name", SCHEDULES)
def test_of_a_pipeline(name):
    schedule = make_schedule(name, 4, 8)
    costs = [StageCost(4, 5, 3, sent_ns=2) for _ in range(schedule.stages)]
    timeline = simulate_pipeline(schedule, costs)
    trace = chrome_trace(timeline)
    assert_nested(trace)
    names = {event["args"]["name"] for event in trace["traceEvents"] if event["ph"] == "M"}
    assert {"rank 0", "rank 3", "compute", "to rank 1"} <= names or name == "merged"
    found = pipeline_json(timeline)
    assert found["step_ns"] == timeline.step_ns
    assert sum(len(rank["steps"]) for rank in found["ranks"]) == sum(map(len, schedule.rows))
    assert len(found["transfers"]) == len(timeline.transfers)
