"""Processes that plan beside this one."""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

WORKERS = min(2, os.cpu_count() or 1)


def planners(count: int = WORKERS) -> ProcessPoolExecutor:
    """Each has process groups of its own, so it starts afresh."""
    return ProcessPoolExecutor(count, multiprocessing.get_context("spawn"), _quiet)


def _quiet() -> None:
    """In a worker: Ctrl-C is the parent's business, and one thread is enough."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
