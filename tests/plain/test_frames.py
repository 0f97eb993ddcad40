"""Another thread is looked at and does not notice."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from overlapc.tools.frames import calls_of, frames_of, handled_by, local

DEEP = 400


@contextmanager
def waiting(here: Callable[[threading.Event, threading.Event], None]) -> Iterator[int]:
    """A thread that runs `here`, which says when it has come to where it waits."""
    come, leave = threading.Event(), threading.Event()
    thread = threading.Thread(target=here, args=(come, leave))
    thread.start()
    try:
        assert come.wait(60)
        assert thread.ident is not None
        yield thread.ident
    finally:
        leave.set()
        thread.join()


def deep(come: threading.Event, leave: threading.Event, left: int = DEEP) -> None:
    if left:
        return deep(come, leave, left - 1)
    group = "experts"
    come.set()
    leave.wait(60)
    assert group


def handling(come: threading.Event, leave: threading.Event) -> None:
    try:
        raise ValueError("a shape")
    except ValueError:
        deep(come, leave, 0)


def test_a_waiting_threads_calls() -> None:
    with waiting(deep) as thread:
        calls = calls_of(thread)
        own = [depth for depth, (code, _) in enumerate(calls) if code is deep.__code__]
        assert len(own) == DEEP + 1
        line = deep.__code__.co_firstlineno
        assert [calls[depth][1] - line for depth in (own[0], own[-1])] == [5, 2]
        assert [local(thread, own[0], name) for name in ("group", "none")] == ["experts", None]
        assert [local(thread, own[-1], "left"), local(thread, len(calls), "left")] == [DEEP, None]
        assert [frame.f_code for frame in frames_of(thread)] == [code for code, _ in calls]
        assert handled_by(thread) is None
    assert calls_of(thread) == frames_of(thread) == []  # it has ended
    assert local(thread, 0, "left") is None


def test_what_a_thread_handles() -> None:
    with waiting(handling) as thread:
        assert str(handled_by(thread)) == "a shape"


@pytest.mark.parametrize("enabled", [True, False])
def test_no_garbage_is_collected_meanwhile(enabled: bool) -> None:
    """Nor is the collector left otherwise than it was."""
    starts = []

    def started(phase: str, info: dict[str, int]) -> None:
        starts.append(phase)

    before = gc.get_threshold()
    with waiting(deep) as thread:
        gc.callbacks.append(started)
        try:
            gc.set_threshold(20, 7, 7)
            (gc.enable if enabled else gc.disable)()
            found = len(calls_of(thread))
            kept = gc.isenabled(), gc.get_threshold()
            count = len(starts)
        finally:
            gc.callbacks.remove(started)
            gc.set_threshold(*before)
            gc.enable()
    assert kept == (enabled, (20, 7, 7))
    assert found > DEEP
    # Around it there are a few objects; a frame for each call would be DEEP of them.
    assert count <= 4, (count, sys.version)


def made() -> object:
    group = object()
    return group


def test_nothing_of_a_thread_is_held() -> None:
    """A result has one reference, its reader's, also if the function that made it is looked at
    while it returns."""
    own = threading.get_ident()

    def look() -> None:
        for _ in range(2_000):
            calls_of(own)
            local(own, 0, "group")

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    looking = threading.Thread(target=look)
    looking.start()
    counts = set()
    try:
        while looking.is_alive():
            counts.add(sys.getrefcount(made()))
    finally:
        looking.join()
        sys.setswitchinterval(before)
    assert counts == {1}
