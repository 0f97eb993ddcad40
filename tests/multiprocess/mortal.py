"""Processes that may die: `spawn.run_ranks` takes a death for a failure of the test."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.multiprocess.spawn import PATIENCE, free_port, processes_that_know_torch

DEAD = "dead"


def _main(pipe: Connection, init: str, fn: Callable[..., Any], rank: int, world: int) -> None:
    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=world)
    pipe.send(fn(rank))
    left = [t.name for t in threading.enumerate() if not t.daemon and t.name != "MainThread"]
    pipe.send(left)


def launch(
    fn: Callable[[int], Any], world: int, init: str = "", timeout_s: float = 60
) -> list[Any]:
    """`fn(rank)` in each process; DEAD for those that ended, or stopped, without an answer."""
    server = processes_that_know_torch()
    init = init or f"tcp://127.0.0.1:{free_port()}"
    processes, pipes = [], []
    for rank in range(world):
        ours, theirs = server.Pipe(duplex=False)
        processes.append(server.Process(target=_main, args=(theirs, init, fn, rank, world)))
        processes[-1].start()
        theirs.close()
        pipes.append(ours)
    deadline = time.monotonic() + PATIENCE * timeout_s
    results: list[Any] = [None] * world
    try:
        while None in results:
            waiting = [pipe for pipe, result in zip(pipes, results, strict=True) if result is None]
            if not wait(waiting, timeout=0.2) and time.monotonic() > deadline:
                late = [rank for rank, result in enumerate(results) if result is None]
                raise AssertionError(f"ranks {late} hung for {timeout_s} s")
            for rank, pipe in enumerate(pipes):
                if results[rank] is not None:
                    continue
                if _stopped(processes[rank].pid):
                    results[rank] = DEAD
                elif pipe.poll():
                    try:
                        results[rank] = pipe.recv()
                        assert pipe.recv() == [], "threads left that keep the process alive"
                    except EOFError:
                        results[rank] = DEAD
        for process, result in zip(processes, results, strict=True):
            if result != DEAD:
                process.join(10)
                assert process.exitcode == 0
        return results
    finally:
        for process in processes:
            process.kill()
            process.join()


def _stopped(pid: int | None) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T"
    except OSError:
        return False


def caught(fn: Callable[[], Any]) -> tuple[str, str, float, float]:
    """What `fn` raised: type, text, how long it took, and when, on the clock all share."""
    start = time.monotonic()
    try:
        fn()
    except Exception as error:
        now = time.monotonic()
        return type(error).__name__, str(error), now - start, now
    return "", "", time.monotonic() - start, time.monotonic()
