"""`Shared` makes a process-wide change while any thread needs it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any


class Shared:
    """A change that the first thread to enter makes, and the last to leave undoes."""

    def __init__(self, change: Callable[[], contextlib.AbstractContextManager[Any]]) -> None:
        self._change = change
        self._lock = threading.Lock()
        self._inside = 0
        self._made = contextlib.ExitStack()

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._made.enter_context(self._change())
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._made.close()


@contextlib.contextmanager
def replaced(owner: Any, name: str, new: Any) -> Iterator[Any]:
    """Set an attribute of a module or a class for a while; yields the old value."""
    old = vars(owner)[name]
    setattr(owner, name, new)
    try:
        yield old
    finally:
        setattr(owner, name, old)
