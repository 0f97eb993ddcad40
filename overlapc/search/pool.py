"""`planners` starts processes that plan layouts in parallel with this one."""

from __future__ import annotations

import multiprocessing
import os
import threading
from concurrent.futures import ProcessPoolExecutor

WORKERS = min(2, os.cpu_count() or 1)


def planners(count: int = WORKERS) -> ProcessPoolExecutor:
    """Start the processes, by spawning: each needs its own process groups."""
    return ProcessPoolExecutor(count, multiprocessing.get_context("spawn"), _quiet)


def stop(pool: ProcessPoolExecutor) -> None:
    """Kill the processes, also in the middle of work."""
    processes = list((pool._processes or {}).values())
    pool.shutdown(wait=False, cancel_futures=True)
    for process in processes:
        process.terminate()


def _quiet() -> None:
    """Set up a worker: it ignores Ctrl-C (the parent handles it), uses one thread, and ends with
    its parent."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    threading.Thread(target=_follow, daemon=True, name="overlapc-follow").start()


def _follow() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
