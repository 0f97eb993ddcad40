"""What `overlapc trace` finds exposed in a recorded run is what the run itself waited."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from overlapc.report.recordings.kineto import read_run
from tests.multiprocess.spawn import measures, run_ranks

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(120)]
STEPS, LATE_S = 3, 0.3


def recorded(rank: int, ranks: int, folder: str) -> float:
    """Seconds that this rank waited for collectives that the last rank joins late."""
    dist.init_process_group("gloo")
    weight, sums, waited = torch.randn(400, 400), torch.ones(1 << 16), 0.0
    weight @ weight
    dist.barrier()
    with profile(activities=[ProfilerActivity.CPU]) as record:
        for _ in range(STEPS):
            if rank == ranks - 1:
                time.sleep(LATE_S)
            work = dist.all_reduce(sums, async_op=True)
            for _ in range(20):
                weight @ weight
            begin = time.monotonic()
            work.wait()
            waited += time.monotonic() - begin
    record.export_chrome_trace(f"{folder}/{rank}.json")
    dist.destroy_process_group()
    return waited


@measures
def test_exposure_is_what_the_run_waited(tmp_path: Path) -> None:
    waited = run_ranks(recorded, 2, str(tmp_path), timeout_s=90)
    runs = [read_run(tmp_path / f"{rank}.json") for rank in range(2)]
    assert [len(run.collectives) for run in runs] == [STEPS, STEPS]
    assert waited[0] > STEPS * LATE_S / 2
    assert runs[0].exposed / 1e6 == pytest.approx(waited[0], rel=0.03)
    assert sum(one.exposed for one in runs[0].collectives) / 1e6 == pytest.approx(
        waited[0], rel=0.03
    )
    assert runs[1].exposed < runs[0].exposed / 3
