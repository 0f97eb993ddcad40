"""Long work reports on stderr what it does, and SIGTERM can stop it early.

    with doing("solving") as note:      # silent for 3 s
        note("12 plans tried")          # overlapc: solving, 4 s: 12 plans tried

At a terminal stderr gets one line that is rewritten and is gone at the end; elsewhere a line every
10 s. Only the first of several ranks reports.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

FIRST_S = 3.0
_EVERY_S, _REWRITE_S = 10.0, 0.5


@contextlib.contextmanager
def doing(what: str, rank: int | None = None) -> Iterator[Callable[[str], None]]:
    """Report on stderr what the block does, if it takes long; the yielded function adds details.
    `rank` is this process's rank among those that do the same, by default torchrun's."""
    rank = int(os.environ.get("RANK", "0") or 0) if rank is None else rank
    if rank:
        yield lambda _: None
        return
    task = _Task(what)
    with _lock:
        _tasks.append(task)
        if len(_tasks) == 1:
            _Reporter().start()
    try:
        yield task.note
    finally:
        with _lock:
            _tasks.remove(task)
            if not _tasks:
                _ended.set()


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """Make SIGTERM act like Ctrl-C in the block: it raises KeyboardInterrupt, and a search ends
    with the best plan so far. A program's own handler of SIGTERM stays."""

    def stop(number: int, frame: FrameType | None) -> Any:
        raise KeyboardInterrupt

    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


class _Task:
    def __init__(self, what: str) -> None:
        self.what = what
        self.detail = ""

    def note(self, detail: str) -> None:
        self.detail = detail


_lock = threading.Lock()
_ended = threading.Event()
_tasks: list[_Task] = []  # the innermost last


class _Reporter(threading.Thread):
    """The thread that writes to stderr; it lives while there are tasks."""

    def __init__(self) -> None:
        super().__init__(name="overlapc-progress", daemon=True)
        self.began = time.monotonic()
        global _ended
        _ended = self.ended = threading.Event()

    def run(self) -> None:
        terminal = sys.stderr is not None and sys.stderr.isatty()
        pause_s = FIRST_S
        said = False
        while not self.ended.wait(pause_s):
            with _lock:
                task = _tasks[-1] if _tasks else None
            if task is None:
                break
            seconds = time.monotonic() - self.began
            line = f"overlapc: {task.what}, {seconds:.0f} s"
            self.write(line + (f": {task.detail}" if task.detail else ""), terminal)
            said = True
            pause_s = _REWRITE_S if terminal else _EVERY_S
        if said and terminal:
            self.write("", terminal)

    def write(self, line: str, terminal: bool) -> None:
        text = f"\r\033[K{line}" if terminal else f"{line}\n"
        with contextlib.suppress(OSError, ValueError, AttributeError):  # stderr may be gone
            sys.stderr.write(text)
            sys.stderr.flush()
