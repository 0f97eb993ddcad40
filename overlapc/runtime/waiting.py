"""How a rank waits for others: `Waiter` waits for transfers on a thread, and `Peers` tells a rank
that is late because it compiles, which `told_of_compiling` says, from one that is lost.

Only a wait tells that a transfer over gloo has ended, and a wait that runs out breaks the
connection. So a thread waits, for long, and its caller decides when that is too long.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch.distributed as dist
from torch._dynamo.callback import callback_handler
from torch.distributed.distributed_c10d import _get_default_store

from overlapc.runtime.line import BEAT_S, IDLE, Beat, has_peers, line_to, own_rank, present

LIMIT_S = 600.0  # the longest wait for a rank that compiles
REST_S = 2 * BEAT_S  # between two looks at the beats, within which each busy rank sends one


class Waiter:
    """A daemon thread that waits for works, one after the other."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: SimpleQueue[tuple[Any, Future[None]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, work: Any) -> Future[None]:
        """Return what tells when the work has ended, or failed."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True, name=self._name)
            self._thread.start()
        ended: Future[None] = Future()
        self._queue.put((work, ended))
        return ended

    def close(self) -> None:
        """End the thread when it has waited for all works so far."""
        self._queue.put(None)

    def _run(self) -> None:
        while (given := self._queue.get()) is not None:
            work, ended = given
            del given
            try:
                work.wait(timedelta(seconds=LIMIT_S))
            except Exception as error:
                ended.set_exception(error)
                return
            del work  # its memory is freed on the thread that allocated it
            ended.set_result(None)


@contextlib.contextmanager
def told_of_compiling() -> Iterator[None]:
    """Beat whenever Dynamo compiles within the block, so that others wait for this rank."""
    if not has_peers():
        yield
        return
    beating, line = contextlib.ExitStack(), line_to(_get_default_store(), own_rank())

    def begins(_: object) -> None:
        beating.enter_context(line.busy("compiling within a step"))

    def ends(_: object) -> None:
        beating.close()

    callback_handler.register_start_callback(begins)
    callback_handler.register_end_callback(ends)
    try:
        yield
    finally:
        callback_handler.remove_start_callback(begins)
        callback_handler.remove_end_callback(ends)
        beating.close()


class Peers:
    """What the ranks of the default group say of themselves while a step runs."""

    def __init__(self) -> None:
        self._line = line_to(_get_default_store(), own_rank()) if has_peers() else None
        self._beats: dict[int, Beat] = {}

    def is_one_at_work(self, within_s: float) -> bool:
        """Has a rank's beat moved since this was last asked? Ask no sooner than `REST_S` later."""
        if self._line is None:
            return False
        ranks = [rank for rank in range(dist.get_world_size()) if rank != own_rank()]
        keys = [f"beat/{rank}" for rank in ranks]
        records = self._line.call(lambda store: present(store, keys), within_s)
        before, self._beats = self._beats, {}
        for rank, record in zip(ranks, records, strict=True):
            if record is not None:
                self._beats[rank] = Beat.parse(record)
        return any(b.phase != IDLE and b != before.get(r) for r, b in self._beats.items())
