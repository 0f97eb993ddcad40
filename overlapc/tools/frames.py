"""What another thread does now: its frames and exceptions.

To look at them, Python 3.11 makes objects, and it may collect garbage while it does. Finalizers
then let other threads run: one may wait for a lock that this thread holds, so that both wait for
ever (CPython's issue 106883), or leave the frame for which an object is being made, so that memory
is written that is no longer the frame's. So no garbage is collected meanwhile.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Mapping
from functools import partial
from itertools import accumulate, repeat, takewhile
from operator import is_not, methodcaller
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")

_CALLED = methodcaller("__call__")


def frames_of(thread: int) -> list[FrameType]:
    """The thread's frames, the innermost first; none if it has ended."""
    innermost = _without_collection(sys._current_frames).get(thread)
    if innermost is None:
        return []
    outward = accumulate(repeat("f_back"), getattr, initial=innermost)
    return _without_collection(partial(list, takewhile(partial(is_not, None), outward)))


def local(frame: FrameType, name: str) -> Any:
    """A local variable of another thread's frame, or None."""
    found: Mapping[str, Any] = _without_collection(partial(getattr, frame, "f_locals"))
    return found.get(name)


def handled_by(thread: int) -> BaseException | None:
    """The exception that the thread handles."""
    found: Any = _without_collection(sys._current_exceptions).get(thread)
    error: BaseException | None = found[1] if isinstance(found, tuple) else found  # Python 3.11
    return error


def _without_collection(look: Callable[[], T]) -> T:
    """Call a function of C while Python collects no garbage: in a single call of C, in which no
    other thread can run and find the collector off."""
    before = gc.get_threshold()
    off, on = partial(gc.set_threshold, 0), partial(gc.set_threshold, *before)
    seen: T
    _, seen, _ = map(_CALLED, (off, look, on))
    return seen
