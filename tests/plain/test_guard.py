"""A guarded block ends soon after a rank is lost, whatever it does, and cleans up undisturbed."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from overlapc.core.errors import RankError
from overlapc.ranks import guard

LOST = "rank 1 gives no sign of life"


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "LOOK_S", 0.02)


class _Swallows:
    """Python prints what is raised in a finalizer, and goes on."""

    def __del__(self) -> None:
        _work(0.1)


def _work(seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass


def _lost(block: Callable[[], None]) -> RankError:
    """The error of a block that runs while a rank is lost."""
    with pytest.raises(RankError, match=LOST) as raised, guard.guarded(lambda: LOST):
        block()
    return raised.value


def test_a_block_whose_finalizers_swallow_the_interrupt_is_interrupted_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    came = []

    def block() -> None:
        for i in range(3):
            _Swallows()
            came.append(i)
        _work(60.0)

    _lost(block)
    assert came


def test_a_block_that_cleans_up_is_left_alone() -> None:
    done = []

    def block() -> None:
        try:
            _work(60.0)
        finally:
            for i in range(20):
                _work(0.02)
                done.append(i)

    _lost(block)
    assert done == list(range(20))


def test_an_error_of_its_own_is_not_taken_for_the_lost_ranks() -> None:
    seen = threading.Event()

    def look() -> str:
        seen.set()
        return LOST

    def fails() -> None:
        with guard.guarded(look), guard.unguarded():
            assert seen.wait(10.0)
            raise ZeroDivisionError("a bug on this rank")

    with pytest.raises(ZeroDivisionError):
        fails()


def test_what_is_made_of_the_interrupt_is_left_alone_too() -> None:
    done = []

    def block() -> None:
        try:
            _work(60.0)
        except BaseException as error:
            try:
                raise ValueError("as some library wraps it") from error
            finally:
                _work(0.2)
                done.append(True)

    assert isinstance(_lost(block).__cause__, ValueError)
    assert done


def test_a_block_that_looks_itself_is_told() -> None:
    told = []

    def block() -> None:
        with guard.unguarded():
            _work(0.2)
            told.append(guard.lost())
        _work(60.0)

    _lost(block)
    assert told == [LOST]


def test_the_interrupt_comes_between_two_lines_of_python(monkeypatch: pytest.MonkeyPatch) -> None:
    at = []
    interrupt = guard._interrupt

    def seen(thread: int, frame: Any = None, op: int = -1) -> bool:
        if threading.get_ident() != thread:
            at.append(guard._is_between(frame, op))
        return interrupt(thread, frame, op)

    def block() -> None:
        until = time.monotonic() + 60.0
        while time.monotonic() < until:
            for _ in range(10_000):
                pass

    monkeypatch.setattr(guard, "_interrupt", seen)
    _lost(block)
    assert at == [True]


@pytest.mark.parametrize("wrap", [lambda method: method, torch._disable_dynamo])
def test_code_that_the_dispatcher_calls_is_not_interrupted(
    monkeypatch: pytest.MonkeyPatch, wrap: Any
) -> None:
    monkeypatch.setattr(guard, "_PATIENCE_S", 60.0)
    broken = []

    class Slow(TorchDispatchMode):
        @wrap
        def __torch_dispatch__(
            self, op: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            try:
                for _ in range(100_000):
                    pass
                return op(*args, **(kwargs or {}))
            except guard.Lost:
                broken.append(op)
                raise

    def block() -> None:
        until = time.monotonic() + 60.0
        with Slow():
            while time.monotonic() < until:
                torch.ones(1)
                for _ in range(100_000):
                    pass

    with Slow():
        torch.ones(1)  # imports what it needs
    for _ in range(5):
        _lost(block)
    assert not broken


def test_a_wait_for_who_died_ends_when_that_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "_PATIENCE_S", 60.0)

    def block() -> None:
        with guard.named_dead():
            raise RuntimeError("Connection closed by peer")

    began = time.monotonic()
    assert "Connection" in str(_lost(block).__cause__)
    assert time.monotonic() - began < 30.0


def test_a_thread_within_a_call_of_c_is_interrupted_in_the_end() -> None:
    def block() -> None:
        for _ in range(600):
            time.sleep(0.1)

    began = time.monotonic()
    _lost(block)
    assert time.monotonic() - began < 30.0


_PROFILED = """
import cProfile, time
from overlapc.core.errors import RankError
from overlapc.ranks import guard

guard.LOOK_S = 0.02
lost = {lost!r}
try:
    with guard.guarded(lambda: lost):
        until = time.monotonic() + 0.2
        while time.monotonic() < until:
            pass
except RankError as error:
    assert str(error) == lost
cProfile.run("sorted([2, 1])")
"""


@pytest.mark.parametrize("lost", [None, LOST])
def test_python_is_left_as_it_was(lost: str | None) -> None:
    """An exception that is still looked for makes a profiled call endless: so in a process."""
    code = _PROFILED.format(lost=lost)
    subprocess.run([sys.executable, "-c", code], check=True, timeout=360, capture_output=True)
