"""What the step of a recording's ranges would take, counted by hand; and a recording of a merged
plan takes what is predicted of it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from overlapc.cli import GOOD, USAGE, main
from overlapc.core.errors import FileError
from overlapc.core.files import load_plan, load_problem
from overlapc.core.ir import COMPUTE
from overlapc.core.simulate import simulate
from overlapc.report.recordings.kineto import Event
from overlapc.report.recordings.marked import direction
from overlapc.report.recordings.recorded import recorded_step, shares
from overlapc.report.recordings.solved import Solved

# (range, thread that launches, stream, begin, time), in microseconds: one after the other.
SERIAL = [
    ("attn(F)", 1, 7, 1000, 100),
    ("send(F)", 1, 20, 1100, 100),
    ("mlp(F)", 1, 7, 1200, 100),
    ("mlp(B)", 2, 7, 1300, 100),
    ("send(B)", 2, 20, 1400, 100),
    ("attn(B)", 2, 7, 1500, 100),
    ("mlp(W)", 1, 7, 1600, 50),
]


def recording(kernels: Iterable[tuple[str, int, int, float, float]]) -> list[dict[str, Any]]:
    """The host launches all kernels long before they run, each in a range of its own; ranges are on
    thread 1, whichever thread launches."""
    events: list[dict[str, Any]] = []
    for at, (name, thread, stream, begin, took) in enumerate(kernels):
        mark = {"cat": "user_annotation", "name": name, "ts": 10 * at, "dur": 9, "tid": 1}
        ids = {"correlation": at, "External id": at}
        launch = {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 10 * at + 2, "dur": 1}
        kind = "ncclDevKernel" if stream == 20 else "gemm"
        kernel = {"cat": "kernel", "name": kind, "ts": begin, "dur": took}
        events += [mark, launch | {"tid": thread, "args": ids}]
        events.append(kernel | {"args": ids | {"stream": stream}})
    return [{"ph": "X", **event} for event in events]


def written(folder: Path, events: Sequence[dict[str, Any]]) -> Path:
    path = folder / "trace.json"
    path.write_text(json.dumps({"traceEvents": list(events)}))
    return path


def test_a_step_counted_by_hand(tmp_path: Path) -> None:
    found = Solved.of(recorded_step(written(tmp_path, recording(SERIAL))))
    assert found.step.ran_ns == 650_000
    assert found.step.idle_ns == 0
    assert found.step.ranges == {"F": 3, "I": 3, "W": 1}
    assert [op.lane for op in found.step.problem.trace.ops if op.role == "start"] == [
        "stream 20",
        "stream 20",
    ]
    assert found.as_ran.step_ns == 650_000
    assert found.alone.step_ns == 600_000  # the weight gradient runs beside `send(B)`
    assert found.merged.step_ns == found.merged.bound_ns == 450_000  # compute, without a wait
    assert found.merged.timeline.exposed_ns == 0


def test_a_recording_of_the_merged_plan_takes_what_is_predicted(tmp_path: Path) -> None:
    merged = Solved.of(recorded_step(written(tmp_path, recording(SERIAL)))).merged
    spans = sorted(merged.timeline.spans, key=lambda span: span.start_ns)
    again = recording(
        (
            merged.problem.trace.modules[span.issue],
            1,
            7 if span.lane == COMPUTE else 20,
            1000 + span.start_ns / 1000,
            (span.end_ns - span.start_ns) / 1000,
        )
        for span in spans
        if span.end_ns > span.start_ns
    )
    found = Solved.of(recorded_step(written(tmp_path, again)))
    assert found.step.ran_ns == found.as_ran.step_ns == merged.step_ns
    assert found.merged.step_ns == merged.step_ns


def test_kernels_in_no_range_and_earlier_steps_are_left_out(tmp_path: Path) -> None:
    events = recording([("optimizer", 1, 7, 500, 30), *SERIAL, *SERIAL])
    for begin, took in ((0, 78), (80, 70)):
        events.append(
            {"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{begin}", "ts": begin,
             "dur": took, "tid": 1}
        )  # fmt: skip
    found = recorded_step(written(tmp_path, events))
    assert found.ranges == {"F": 3, "I": 3, "W": 1}
    assert found.left_out_ns == 30_000 + 650_000


def test_kernels_beside_traffic_on_its_stream_are_part_of_it(tmp_path: Path) -> None:
    sent = ("send(F)", 1, 20, 1105, 95)
    events = recording([SERIAL[0], ("send(F)", 1, 20, 1100, 5), sent, *SERIAL[2:]])
    for event in events:
        if event["ts"] == 1100:
            event["name"] = "cast"
    found = recorded_step(written(tmp_path, events)).problem
    starts = [found.cost(op.name) for op in found.trace.ops if op.role == "start"]
    assert [(cost.compute_ns, cost.comm_ns) for cost in starts] == [
        (0, 5_000),
        (0, 95_000),
        (0, 100_000),
    ]
    assert sum(cost.compute_ns for cost in found.costs) == 450_000


def test_ops_and_works_of_a_cpu(tmp_path: Path) -> None:
    """Works are those of the calls in their order, though a work may begin after its range."""

    def event(cat: str, name: str, ts: float, dur: float, tid: int = 1) -> dict[str, Any]:
        return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid}

    events = [
        event("user_annotation", "mlp forward", 0, 100),
        event("cpu_op", "aten::mm", 10, 80),
        event("user_annotation", "reduce forward", 100, 20),
        event("cpu_op", "c10d::allreduce_", 105, 5),
        event("user_annotation", "mlp backward", 120, 200),
        event("user_annotation", "gloo:all_reduce", 125, 60, tid=2),
        event("cpu_op", "aten::mm", 200, 90),
    ]
    found = recorded_step(written(tmp_path, events))
    costs = {name: found.problem.cost(name) for name in found.problem.trace.op}
    assert [cost.compute_ns for cost in costs.values()] == [80_000, 0, 0, 90_000]
    assert [cost.comm_ns for cost in costs.values()] == [0, 60_000, 0, 0]
    assert found.problem.trace.lanes == ("gloo",)


def test_works_that_gloo_ran_at_once_share_their_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One behind the other they would take longer than the step that was recorded."""

    def event(cat: str, name: str, ts: float, dur: float, tid: int = 1) -> dict[str, Any]:
        return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid}

    path = written(
        tmp_path,
        [
            event("user_annotation", "mlp forward", 0, 90),
            event("cpu_op", "aten::mm", 0, 90),
            event("user_annotation", "mlp backward", 100, 200),
            event("cpu_op", "aten::mm", 100, 20),
            *(event("cpu_op", "c10d::allreduce_", 120 + 5 * i, 4) for i in range(2)),
            *(event("user_annotation", "gloo:all_reduce", 130, 60, tid=2 + i) for i in range(2)),
        ],
    )
    found = Solved.of(recorded_step(path))
    assert sum(c.comm_ns for c in found.step.problem.costs) == 60_000
    assert found.alone.step_ns <= found.step.ran_ns
    assert main(["trace", str(path)]) == GOOD
    assert "ran at once are each counted in full" in capsys.readouterr().out


def test_the_backward_of_marked_forwards_is_found_by_autograds_numbers(tmp_path: Path) -> None:
    def event(name: str, ts: float, dur: float, tid: int, **args: int) -> dict[str, Any]:
        named = {key.replace("_", " "): value for key, value in args.items()}
        return {"ph": "X", "cat": "cpu_op", "name": name, "ts": ts, "dur": dur, "tid": tid,
                "args": named}  # fmt: skip

    node = "autograd::engine::evaluate_function: "
    numbers = [{"Sequence_number": number, "Fwd_thread_id": 1} for number in range(4)]
    events = [
        {"ph": "X", "cat": "user_annotation", "name": name, "ts": ts, "dur": 90, "tid": 1}
        for name, ts in (("one forward", 0), ("two forward", 100))
    ]
    events += [
        event(
            "aten::mul", 5, 10, 1, Sequence_number=1
        ),  # makes no node: the last with a number does
        event("aten::mm", 20, 40, 1, Sequence_number=1),
        event("aten::mm", 120, 60, 1, Sequence_number=2),
        event("aten::sum", 200, 5, 1, Sequence_number=3),  # in no range
        event(node + "SumBackward0", 300, 10, 2, **numbers[3]),
        event("aten::expand", 301, 5, 2),
        event(node + "MmBackward0", 320, 100, 2, **numbers[2]),
        event("aten::mm", 325, 70, 2),
        event(node + "torch::autograd::AccumulateGrad", 430, 20, 2),
        event("aten::add_", 431, 15, 2),
        event(node + "MmBackward0", 460, 60, 2, **numbers[1]),
        event("aten::mm", 465, 50, 2),
    ]
    found = recorded_step(written(tmp_path, events))
    assert found.ranges == {"F": 2, "I": 2}
    took = [cost.compute_ns for cost in found.problem.costs]
    assert took == [50_000, 60_000, 85_000, 50_000]
    assert found.left_out_ns == 10_000


@pytest.mark.parametrize(
    ("name", "letter", "stem"),
    [
        ("attn(F)", "F", "attn"),
        ("attn(B)", "I", "attn"),
        ("attn(W)", "W", "attn"),
        ("layers.3.mlp forward", "F", "layers_3_mlp"),
        ("backward_layer 3", "I", "layer_3"),
        ("mlp backward weight", "W", "mlp"),
        ("layer wgrad", "W", "layer"),
        ("1F1B", None, ""),
        ("forward backward", None, ""),
        ("w projection", None, ""),
        ("ProfilerStep#3", None, ""),
    ],
)
def test_directions_are_read_from_names(name: str, letter: str | None, stem: str) -> None:
    found = direction(Event(name, "thread 1", 0.0, 1.0))
    assert (found and found.letter) == letter
    assert found is None or found.stem == stem


def test_compute_at_the_same_time_is_shared() -> None:
    """What ran alone counts whole, what two ran at once counts half for each."""
    spans = (0.0, 10.0), (6.0, 16.0), (20.0, 21.0), (6.0, 6.0)
    assert shares([Event("gemm", "stream 7", *span) for span in spans]) == [8.0, 8.0, 1.0, 0.0]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = written(tmp_path, recording(SERIAL)), tmp_path / "out"
    assert main(["trace", str(path), "--solve", "--out", str(out)]) == GOOD
    printed = capsys.readouterr().out
    assert "merged, predicted" in printed
    assert "0.450" in printed
    problem, plan = load_problem(out / "problem.txt"), load_plan(out / "plan.txt")
    assert simulate(problem, plan).step_ns == 450_000
    assert main(["trace", str(path), "--solve", "--json"]) == GOOD
    (document,) = json.loads(capsys.readouterr().out)
    assert document["solved"]["plans"]["merged"]["step_ns"] == 450_000
    assert main(["trace", str(path), "--out", str(out)]) == USAGE
    assert "with --solve" in capsys.readouterr().err


def test_a_recording_without_ranges_says_what_is_expected(tmp_path: Path) -> None:
    events = recording(("mlp", *kernel[1:]) for kernel in SERIAL)
    with pytest.raises(FileError, match=r"1 of some names \(mlp\); expected ranges of torch\.prof"):
        recorded_step(written(tmp_path, events))
