"""`now_ns` reads the clock that this process measures by: the machine's, or a virtual one.

In virtual time the clock of a process is the CPU time of its thread, plus how long that thread has
stood still for emulated transfers. Nobody sleeps. A step takes its compute as measured, which other
processes on the same cores do not lengthen, and its communication as modelled. So more ranks than
cores run as if each had a core of its own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from overlapc.core.errors import OptionError

__all__ = ["VirtualClock", "clock_unless_failed", "now_ns", "use_clock", "virtual_clock"]

CLOCKS = ("machine", "virtual")


class VirtualClock:
    """Virtual time. Where another thread takes over, as in planning, it goes on from the last
    reading: one thread works at a time, as a rank does that has one core."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread = threading.get_ident()
        self._ahead_ns = 0  # of this thread's CPU time
        self._last_ns = 0
        self.stood_ns = 0  # for transfers, since the clock was made

    def now_ns(self) -> int:
        with self._lock:
            return self._read()

    def _read(self) -> int:
        cpu_ns, thread = time.thread_time_ns(), threading.get_ident()
        if thread != self._thread or cpu_ns + self._ahead_ns < self._last_ns:
            self._thread, self._ahead_ns = thread, self._last_ns - cpu_ns
        self._last_ns = cpu_ns + self._ahead_ns
        return self._last_ns

    def stand(self, since_ns: int, until_ns: int) -> None:
        """Set the clock to `until_ns`, or back to `since_ns` if that is later: what the thread did
        in between was waiting, which takes no time of its own."""
        with self._lock:
            target_ns = max(since_ns, until_ns)
            self.stood_ns += target_ns - since_ns
            self._ahead_ns += target_ns - self._read()
            self._last_ns = target_ns


_virtual: VirtualClock | None = None


def use_clock(name: str) -> None:
    """Measure by the machine's clock from now on, or in virtual time."""
    global _virtual
    if name not in CLOCKS:
        raise OptionError(f"unknown clock {name!r}; known: {', '.join(CLOCKS)}")
    _virtual = VirtualClock() if name == "virtual" else None


@contextmanager
def clock_unless_failed(name: str) -> Iterator[None]:
    """Measure by this clock within the block and from then on; by the one before if it fails."""
    global _virtual
    before = _virtual
    use_clock(name)
    try:
        yield
    except BaseException:
        _virtual = before
        raise


def virtual_clock() -> VirtualClock | None:
    """The virtual clock, if this process measures by one."""
    return _virtual


def now_ns() -> int:
    """Nanoseconds, of which only differences mean something. The machine's clock is one for all of
    its processes."""
    return time.perf_counter_ns() if _virtual is None else _virtual.now_ns()
