"""A step recorded by torch.profiler over two ranks: its problem has what was recorded, and a merged
plan of it hides what the run waited for."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from overlapc.report.recordings.kineto import read_run
from overlapc.report.recordings.recorded import recorded_step
from overlapc.report.recordings.solved import Solved
from tests.multiprocess.spawn import measures, run_ranks

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(120)]
BLOCKS, LATE_S = 2, 0.05


def recorded(rank: int, ranks: int, folder: str, marks_backward: bool) -> None:
    """A step of annotated blocks, each with a collective which the last rank joins late."""
    dist.init_process_group("gloo")
    layer, given = torch.nn.Linear(512, 512), torch.randn(512, 512, requires_grad=True)
    sums = torch.ones(1 << 16)
    layer(given).sum().backward()
    dist.all_reduce(sums)

    def reduce() -> None:
        if rank == ranks - 1:
            time.sleep(LATE_S)
        dist.all_reduce(sums)

    with profile(activities=[ProfilerActivity.CPU]) as record:
        made = []
        for _ in range(BLOCKS):
            with record_function("mlp(F)"):
                for _ in range(30):
                    out = layer(given)
                made.append(out.sum())
            with record_function("reduce(F)"):
                reduce()
        for each in made:
            if marks_backward:
                with record_function("reduce(B)"):
                    reduce()
            with record_function("mlp(B)" if marks_backward else "the rest"):
                each.backward()
    record.export_chrome_trace(f"{folder}/{rank}.json")
    dist.barrier()
    dist.destroy_process_group()


@measures
def test_the_step_of_a_recording(tmp_path: Path) -> None:
    run_ranks(recorded, 2, str(tmp_path), True, timeout_s=90)
    path = tmp_path / "0.json"
    run, found = read_run(path), Solved.of(recorded_step(path))
    step = found.step
    assert step.ranges == {"F": 2 * BLOCKS, "I": 2 * BLOCKS}
    assert len(run.collectives) == 2 * BLOCKS
    costs = step.problem.costs
    assert sum(cost.comm_ns for cost in costs) / 1000 == pytest.approx(run.traffic, rel=0.01)
    assert sum(cost.compute_ns for cost in costs) / 1000 == pytest.approx(run.compute, rel=0.01)
    # One after the other, as it ran: all but the time in which no op ran.
    ran_ns = step.ran_ns - step.idle_ns
    assert found.alone.step_ns == pytest.approx(ran_ns, rel=0.03)
    assert found.as_ran.step_ns == pytest.approx(ran_ns, rel=0.03)
    merged = found.merged
    assert merged.bound_ns <= merged.step_ns < 0.9 * found.as_ran.step_ns
    assert merged.timeline.exposed_ns < found.as_ran.timeline.exposed_ns


def test_the_backward_of_marked_forwards(tmp_path: Path) -> None:
    run_ranks(recorded, 2, str(tmp_path), False, timeout_s=90)
    step = recorded_step(tmp_path / "0.json")
    assert step.ranges == {"F": 2 * BLOCKS, "I": BLOCKS}  # what is reduced has no gradient
    run = read_run(tmp_path / "0.json")
    took = sum(cost.compute_ns for cost in step.problem.costs) / 1000
    assert took == pytest.approx(run.compute, rel=0.1)  # without what no node of a range does
