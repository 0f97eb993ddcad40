"""A recorded run's exposure is what its intervals say, counted by hand."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest

from overlapc.cli import GOOD, main
from overlapc.core.errors import FileError
from overlapc.report.recordings.kineto import overlap, read_run, union


def kernel(name: str, start: float, took: float, stream: int) -> dict[str, Any]:
    event = {"ph": "X", "cat": "kernel", "name": name, "ts": start, "dur": took}
    return event | {"args": {"stream": stream}}


def op(name: str, start: float, took: float, thread: int = 1) -> dict[str, Any]:
    return {"ph": "X", "cat": "cpu_op", "name": name, "ts": start, "dur": took, "tid": thread}


def written(folder: Path, events: list[dict[str, Any]]) -> Path:
    path = folder / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    return path


GPU = [
    op("aten::mm", 0, 5),  # the host's side is no lane
    kernel("gemm", 1000, 100, 7),
    kernel("ncclDevKernel_AllReduce", 1050, 100, 20),  # 50 of 100 hidden
    kernel("gelu", 1150, 10, 7),
    kernel("ncclDevKernel_AllGather", 1200, 30, 20),  # nothing beside it, the host is late
    kernel("gemm", 1300, 100, 7),
]


def test_kernels_of_a_gpu(tmp_path: Path) -> None:
    run = read_run(written(tmp_path, GPU))
    assert (run.span, run.compute, run.traffic, run.both) == (400, 210, 130, 50)
    assert run.exposed == 80
    reduced, gathered = run.collectives
    assert (reduced.exposed, reduced.beside) == (50, (("gemm", 50),))
    assert reduced.why == "gelu waits for it"
    assert (gathered.exposed, gathered.beside) == (30, ())
    assert gathered.why == "the host was 70 us late with gemm"
    assert [stall[1:] for stall in run.stalls] == [(70, "gemm"), (40, "gemm")]
    assert dict(run.lanes) == {"stream 7": 210, "stream 20": 130}
    assert run.longest[0] == ("gemm", 200, 2)


def test_ops_of_a_cpu(tmp_path: Path) -> None:
    """Waits are no compute, an op that another calls is counted once, works are gloo's."""
    events = [
        op("aten::linear", 0, 100),
        op("aten::mm", 10, 80),
        op("c10d::allreduce_", 100, 5),
        op("gloo:all_reduce", 102, 200, thread=2),
        op("aten::gelu", 110, 50),
        op("_c10d_functional::wait_tensor", 160, 142),
    ]
    run = read_run(written(tmp_path, events))
    assert (run.compute, run.traffic, run.both) == (150, 200, 50)
    (reduced,) = run.collectives
    assert (reduced.exposed, reduced.beside) == (150, (("aten::gelu", 50),))


def test_a_run_on_gpus_without_kernels_is_said_to_have_the_hosts_times(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    events = [op("aten::mm", 0, 10), op("nccl:all_reduce", 10, 2)]
    path = written(tmp_path, events)
    assert main(["trace", str(path)]) == GOOD
    assert "the host's times, not the GPU's" in capsys.readouterr().out
    assert not read_run(written(tmp_path, [*events, kernel("gemm", 20, 5, 7)])).warning


def test_unions_and_overlaps_are_those_of_points() -> None:
    draw = random.Random(0)
    for _ in range(200):
        sets = []
        for _ in range(2):
            begins = [draw.randrange(40) for _ in range(draw.randrange(6))]
            sets.append([(float(b), float(b + draw.randrange(9))) for b in begins])
        points = [{i for a, b in each for i in range(int(a), int(b))} for each in sets]
        one, other = map(union, sets)
        assert sum(b - a for a, b in one) == len(points[0])
        assert overlap(one, other) == len(points[0] & points[1])


def test_the_command_prints_and_a_packed_file_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": GPU}).encode()))
    assert main(["trace", str(path)]) == GOOD
    printed = capsys.readouterr().out
    assert "0.1 of it exposed" in printed
    assert "gelu waits for it" in printed
    assert main(["trace", str(path), "--json"]) == GOOD
    assert json.loads(capsys.readouterr().out)[0]["exposed"] == 80


@pytest.mark.parametrize("text", ["", "{", "[]", '{"traceEvents": [{"ph": "X"}]}', '{"a": 1}'])
def test_what_is_no_trace_is_said(text: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(text)
    with pytest.raises(FileError, match=r"torch\.profiler"):
        read_run(path)


@pytest.mark.parametrize("flag", [(), ("--solve",)], ids=["shown", "solved"])
@pytest.mark.parametrize("key", ["ts", "dur"])
@pytest.mark.parametrize("time", ["NaN", "Infinity", "-Infinity", "1e999", "1" + "0" * 400])
def test_times_that_no_clock_shows_are_named(
    time: str, key: str, flag: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, [*GPU, op("aten::gelu", 4321, 4321) | {key: "here"}])
    path.write_text(path.read_text().replace('"here"', time))
    if (time, key) == ("-Infinity", "dur"):  # left out, as every negative duration
        assert main(["trace", str(path)]) == GOOD
        return
    assert main(["trace", str(path), *flag]) != GOOD
    said = capsys.readouterr()
    assert f"{key} of event 'aten::gelu' is " in said.err
    assert "expected a number of microseconds" in said.err
    assert not said.out
