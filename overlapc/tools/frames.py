"""What another thread does now: its calls, frames and exceptions.

Who looks must leave no trace of it in that thread. Whoever holds a frame while its function returns
keeps what is in its variables: PyTorch, which counts references to see whether a tensor is its own,
then records another op. And Python 3.11 makes an object for each frame, and may collect garbage
while it does. Finalizers let other threads run: one may wait for a lock that this thread holds, so
that both wait for ever (CPython's issue 106883), or leave the frame for which an object is being
made, so that memory is written that is no longer the frame's. So all is looked at in a single call
of C, in which no other thread runs and no garbage is collected.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate, chain, islice, repeat, takewhile
from operator import attrgetter, is_not, methodcaller
from types import CodeType, FrameType
from typing import Any, TypeVar

T = TypeVar("T")

_CALLED = methodcaller("__call__")


def calls_of(thread: int) -> list[tuple[CodeType, int]]:
    """The code of each call that the thread is in, and its line, the innermost first; none if the
    thread has ended."""
    return _at_once(partial(list, map(attrgetter("f_code", "f_lineno"), _outward(thread))))


def local(thread: int, depth: int, name: str) -> Any:
    """A variable of the thread's call that is `depth` calls from the innermost, or None."""
    variables = map(attrgetter("f_locals"), islice(_outward(thread), depth, depth + 1))
    return next(iter(_at_once(partial(list, map(methodcaller("get", name), variables)))), None)


def frames_of(thread: int) -> list[FrameType]:
    """The thread's frames, the innermost first. They are held: only for a thread that is to be
    interrupted."""
    return _at_once(partial(list, _outward(thread)))


def handled_by(thread: int) -> BaseException | None:
    """The exception that the thread handles."""
    found: Any = _at_once(sys._current_exceptions).get(thread)
    error: BaseException | None = found[1] if isinstance(found, tuple) else found  # Python 3.11
    return error


def _outward(thread: int) -> Iterator[FrameType]:
    """The thread's frames, which are looked up when the first is asked for. All of it is C."""
    innermost = map(methodcaller("get", thread), map(_CALLED, [sys._current_frames]))
    outward: Iterator[Any] = accumulate(chain(innermost, repeat("f_back")), getattr)
    return takewhile(partial(is_not, None), outward)


def _at_once(look: Callable[[], T]) -> T:
    """Call a function of C while no garbage is collected, and turn that off and on in the same call
    of C: no other thread finds it off."""
    if not gc.isenabled():
        return look()
    seen: T
    try:
        _, seen, _ = map(_CALLED, (gc.disable, look, gc.enable))
    except BaseException:
        gc.enable()
        raise
    return seen
