"""Frames of another thread are looked at without a collection of garbage meanwhile."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from overlapc.tools.frames import frames_of, handled_by, local

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


def test_a_waiting_threads_frames() -> None:
    with waiting(deep) as thread:
        frames = frames_of(thread)
        own = [frame for frame in frames if frame.f_code is deep.__code__]
        assert len(own) == DEEP + 1
        assert (own[0].f_locals["left"], own[-1].f_locals["left"]) == (0, DEEP)
        assert [local(own[0], "group"), local(own[0], "none")] == ["experts", None]
        assert handled_by(thread) is None
    del frames, own
    assert frames_of(thread) == []  # it has ended


def test_what_a_thread_handles() -> None:
    with waiting(handling) as thread:
        assert str(handled_by(thread)) == "a shape"


def test_own_frames() -> None:
    assert frames_of(threading.get_ident())[-1].f_back is None


@pytest.mark.parametrize("enabled", [True, False])
def test_no_garbage_is_collected_while_frames_are_looked_at(enabled: bool) -> None:
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
            found = len(frames_of(thread))
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
