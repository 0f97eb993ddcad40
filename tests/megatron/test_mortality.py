"""A rank is killed while chunks are planned: the others get an error that names it, in time."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import pytest
import torch
import torch.distributed as dist

from overlapc.core.errors import RankError
from tests.megatron import cpu
from tests.megatron.models import Layout, Trained, set_up
from tests.multiprocess.mortal import caught
from tests.multiprocess.spawn import free_port, processes_that_know_torch

pytestmark = pytest.mark.multiprocess

PROMISED_S = 10.0
LAYOUTS = {
    "tp": Layout(tp=2),
    "pp": Layout(pp=2),
    "dp": Layout(),
}


def _main(pipe: Connection, port: int, name: str, rank: int, options: dict[str, Any]) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    cpu.use("0.16.1")
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=60),
    )
    import overlapc.megatron as patched

    set_up(LAYOUTS[name])
    trained = Trained(LAYOUTS[name])
    dist.barrier()
    patched.patch(**options)
    pipe.send("planning")

    def go() -> None:
        trained.step(0)
        pipe.send("planned")

    pipe.send(caught(go))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name", ["tp", *(pytest.param(n, marks=pytest.mark.slow) for n in ("pp", "dp"))]
)
@pytest.mark.parametrize(
    "after_s",
    [1.0, pytest.param(0.1, marks=pytest.mark.slow), pytest.param(3.0, marks=pytest.mark.slow)],
)
def test_a_rank_is_killed_while_it_plans(name: str, victim: int, after_s: float) -> None:
    cpu.need("0.16.1")
    with _two_planning(name, {}) as (pipes, processes):
        if wait([pipes[victim]], timeout=after_s):
            assert _next(pipes[victim]) == "planned"
            assert after_s > 1.0  # no machine plans sooner
            pytest.skip(f"planned in less than {after_s} s: nothing to kill a rank in")
        os.kill(processes[victim].pid or 0, signal.SIGKILL)
        struck = time.monotonic()
        kind, text, _, when = _next(pipes[1 - victim])
        assert kind == RankError.__name__, text
        assert f"rank {victim}" in text or "store" in text, text
        assert when - struck <= PROMISED_S


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("victim", [0, 1])  # rank 0 has the store
def test_a_rank_that_stops_for_a_while_is_waited_for(victim: int) -> None:
    cpu.need("0.16.1")
    with _two_planning("tp", {}) as (pipes, processes):
        time.sleep(1.0)
        os.kill(processes[victim].pid or 0, signal.SIGSTOP)
        time.sleep(11.0)
        os.kill(processes[victim].pid or 0, signal.SIGCONT)
        assert [_next(pipe) for pipe in pipes] == ["planned"] * 2


@contextmanager
def _two_planning(
    name: str, options: dict[str, Any]
) -> Iterator[tuple[list[Connection], list[BaseProcess]]]:
    """Two ranks of a layout that have begun to plan; they are killed in the end."""
    server, port = processes_that_know_torch(), free_port()
    pipes, processes = [], []
    try:
        for rank in range(2):
            ours, theirs = server.Pipe(duplex=False)
            process = server.Process(target=_main, args=(theirs, port, name, rank, options))
            process.start()
            processes.append(process)
            theirs.close()
            pipes.append(ours)
        assert [_next(pipe) for pipe in pipes] == ["planning"] * 2
        yield pipes, processes
    finally:
        for process in processes:
            process.kill()
            process.join()


def _next(pipe: Connection) -> Any:
    assert pipe.poll(60), "a hang"
    return pipe.recv()
