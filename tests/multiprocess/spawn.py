"""Run one function in several processes, each a rank, and never hang."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import multiprocessing
import os
import pickle
import secrets
import socket
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

PRELOADED = [
    "torch",
    "torch._dynamo",
    "torch.distributed",
    "overlapc.api",
    "overlapc.runtime.hosted",
    "overlapc.runtime.pipeline",
    "overlapc.runtime.train_step",
    "hypothesis",
    "pytest",
]


PATIENCE = 6  # a machine that has other work takes so many times as long


class RankFailed(AssertionError):
    """A rank raised, died or ran out of time; the message says which and how."""


def run_ranks(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 60
) -> list[Any]:
    """`fn(rank, world_size, *args)` in `world_size` new processes; their results by rank.

    `fn` must be importable (top level of a module), and what it takes and gives picklable.
    MASTER_ADDR, MASTER_PORT, RANK, LOCAL_RANK and WORLD_SIZE are set, so that
    `dist.init_process_group("gloo")` works as it is. The first failure ends all ranks. They hang if
    they take more than `timeout_s` of a machine of their own.
    """
    timeout_s *= PATIENCE
    server = processes_that_know_torch()
    port = free_port()
    processes, answers = [], {}
    deadline = time.monotonic() + timeout_s
    try:
        for rank in range(world_size):
            ours, theirs = server.Pipe(duplex=False)
            process = server.Process(
                target=_rank_main,
                args=(theirs, port, fn, rank, world_size, args, timeout_s),
                daemon=True,
            )
            process.start()
            theirs.close()
            processes.append(process)
            answers[ours] = rank
        results: list[Any] = [None] * world_size
        while answers:
            ready = wait(list(answers), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                late = sorted(answers.values())
                raise RankFailed(f"ranks {late} of {world_size} not done after {timeout_s} s")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = answers.pop(pipe)
                results[rank] = _receive(pipe, rank)
        return results
    finally:
        for process in processes:
            # A rank that has answered needs a moment to leave; one that has not, no mercy.
            process.join(timeout=0 if answers else 5)
            process.kill()
            process.join()
            process.close()
        for pipe in answers:
            pipe.close()


def measures(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test that compares nothing but measured times with what they should be.

    Other work on the machine makes times longer, so such a test may fail twice before it fails,
    and is skipped where the machine has much else to do. A rank that raises or hangs fails it at
    once.
    """

    @functools.wraps(test)
    def up_to_three_times(*args: Any, **kwargs: Any) -> None:
        for _ in range(2):
            try:
                return test(*args, **kwargs)
            except RankFailed:
                raise
            except AssertionError as error:
                print(f"not as it should be, once more: {error}")
        try:
            return test(*args, **kwargs)
        except RankFailed:
            raise
        except AssertionError as error:
            if (load := os.getloadavg()[0]) > 3 * (os.cpu_count() or 1):
                import pytest  # ranks load this module, too, and need none

                pytest.skip(f"the machine has other work (load {load:.0f}): {error}")
            raise

    return up_to_three_times


def processes_that_know_torch() -> Any:
    """A context of multiprocessing whose processes are forks of one that has imported what a rank
    needs, and has run nothing: an import takes seconds."""
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(PRELOADED)
    return server


def _receive(pipe: Connection, rank: int) -> Any:
    try:
        answer = pipe.recv_bytes()
    except EOFError:
        raise RankFailed(f"rank {rank} died without a word") from None
    finally:
        pipe.close()
    failed, result = pickle.loads(answer)
    if failed:
        raise RankFailed(f"rank {rank} raised:\n{result}")
    return result


def _rank_main(
    pipe: Connection,
    port: int,
    fn: Callable[..., Any],
    rank: int,
    world_size: int,
    args: tuple[Any, ...],
    timeout_s: float,
) -> None:
    faulthandler.dump_traceback_later(max(1.0, timeout_s - 5))  # a hang says where
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        OMP_NUM_THREADS="1",
    )
    try:
        import torch

        torch.set_num_threads(1)
        gc.set_threshold(20_000, 10, 10)  # as in conftest.py
        # pickle copies tensors; multiprocessing's own pickler would share memory that is gone
        # once this process ends.
        answer = pickle.dumps((False, fn(rank, world_size, *args)))
    except BaseException:
        answer = pickle.dumps((True, traceback.format_exc()))
    faulthandler.cancel_dump_traceback_later()
    pipe.send_bytes(answer)
    pipe.close()


def free_port() -> int:
    """A free port that no connection takes meanwhile: those are given ports from 32,768 on."""
    while True:
        port = secrets.randbelow(22_000) + 10_000
        with contextlib.suppress(OSError), socket.socket() as sock:
            sock.bind(("127.0.0.1", port))
            return port
