"""`Shared` makes a change to what belongs to the whole process while any thread asks for it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any


class Shared:
    """A change that the first to enter makes and the last to leave takes back, in all threads."""

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
    """Set an attribute of a module or a class for a while; gives what it was."""
    old = vars(owner)[name]
    setattr(owner, name, new)
    try:
        yield old
    finally:
        setattr(owner, name, old)
