"""`Waiter` waits for transfers on a thread.

Only a wait tells that a transfer over gloo has ended, and a wait that runs out breaks the
connection. So a thread waits, for long, and its caller decides when that is too long.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

_LONG = timedelta(days=1)


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
                work.wait(_LONG)
            except Exception as error:
                ended.set_exception(error)
                return
            del work  # its memory is freed on the thread that allocated it
            ended.set_result(None)
