"""These processes plan beside this one."""

from __future__ import annotations

import multiprocessing
import os
import threading
from concurrent.futures import ProcessPoolExecutor

WORKERS = min(2, os.cpu_count() or 1)


def planners(count: int = WORKERS) -> ProcessPoolExecutor:
    """Start the processes; each has process groups of its own, so it starts afresh."""
    return ProcessPoolExecutor(count, multiprocessing.get_context("spawn"), _quiet)


def stop(pool: ProcessPoolExecutor) -> None:
    """End the processes, in the middle of what they do."""
    processes = list((pool._processes or {}).values())
    pool.shutdown(wait=False, cancel_futures=True)
    for process in processes:
        process.terminate()


def _quiet() -> None:
    """In a worker: Ctrl-C is the parent's business, one thread is enough, and without a parent
    there is nothing to do."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    threading.Thread(target=_follow, daemon=True, name="overlapc-follow").start()


def _follow() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
