"""`guarded` interrupts a thread's long work if another rank is lost meanwhile.

Tracing, measuring and solving take seconds to minutes without a message between ranks. While such a
block runs, a second thread watches the other ranks. If one is lost, it raises in the block's
thread, at the next line of Python.
"""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from opcode import opname
from types import FrameType
from typing import TypeVar

from overlapc.core.errors import RankError
from overlapc.tools.frames import frames_of, handled_by
from overlapc.tools.shared_changes import Shared

T = TypeVar("T")

LOOK_S = 0.5
NAMING_S = 3.0  # between a broken connection and the word of the kernel that a process has ended
# An exception that is raised where C++ calls Python and expects none ends the process; so does one
# that leaves PyTorch's modes half set; one that ends an import leaves half a module. So the guard
# looks often for a moment at which the thread runs Python that Python called, between two lines;
# after so long it takes one that is not between two lines, and after twice as long any.
_OFTEN_S, _PATIENCE_S = 0.001, 1.0
_SOON = 1_000  # turns of a loop in which an exception that was sent arrives: the first, so far
_BETWEEN = ("RESUME", "JUMP_BACKWARD", "JUMP_ABSOLUTE")  # in names of ops that let others run
# In files whose functions C++ calls or that import; names of functions that C++ calls or set modes.
_CALLED_BACK = ("/torch/_library/", "/torch/fx/experimental/sym_node.py", "weakref", "importlib")
_UNBROKEN = ("__torch_dispatch__", "__torch_function__", "__del__", "__enter__", "__exit__")
# Files of wrappers of `__torch_dispatch__`, and how many frames they take until they call it.
_AROUND, _NEAR = ("/torch/_compile.py", "/torch/utils/_stats.py"), 6
# In what collectives say when the process of another rank has ended, or waits no more.
_BROKEN = ("onnection", "Broken pipe", "pair closure", "imed out", "NCCL")


class Lost(BaseException):
    """Ends the guarded block. It is no Exception, so that no handler in between catches it and goes
    on; `guarded` turns it into a RankError."""


_guarded = threading.local()


@contextlib.contextmanager
def guarded(look: Callable[[], str | None]) -> Iterator[None]:
    """Run the block; raise RankError as soon as `look`, called on another thread, says what is
    lost.

    A block within a guarded block of the same thread uses the outer guard.
    """
    if getattr(_guarded, "by", None) is not None:
        yield
        return
    guard = _Guard(look)
    _guarded.by = guard
    guard.start()
    try:
        try:
            yield
        finally:
            guard.stop()
    except BaseException as error:
        guard.stop()  # an interrupt may have come before the first call
        if guard.found is None or isinstance(error, RankError) or not _follows(error):
            raise
        raise RankError(guard.found) from (None if isinstance(error, Lost) else error)
    else:
        if guard.found is not None:
            raise RankError(guard.found)
    finally:
        _guarded.by = None


def lost() -> str | None:
    """What the guard of this thread has found lost, also while it may not interrupt."""
    guard = getattr(_guarded, "by", None)
    return None if guard is None else guard.found


@contextlib.contextmanager
def named_dead() -> Iterator[None]:
    """If a collective of the guarded block fails because a connection broke, wait until the guard
    finds out who died, and raise that."""
    try:
        yield
    except (RuntimeError, RankError) as error:
        until = time.monotonic() + NAMING_S
        while is_broken(error) and time.monotonic() < until:
            if (found := lost()) is not None:
                raise RankError(found) from error
            time.sleep(LOOK_S / 5)
        raise


def is_broken(error: BaseException) -> bool:
    """Has a collective failed because another rank is gone?"""
    kind = isinstance(error, (RuntimeError, RankError))
    return kind and any(word in str(error) for word in _BROKEN)


@contextlib.contextmanager
def unguarded() -> Iterator[None]:
    """Do not interrupt the block: it calls `lost` itself."""
    guard = getattr(_guarded, "by", None)
    if guard is None or guard.resting:
        yield
        return
    guard.rest(True)
    try:
        yield
    finally:
        guard.rest(False)


def started(make: Callable[[], T]) -> Future[T]:
    """Run `make` on a daemon thread, in a copy of this context."""
    answer: Future[T] = Future()
    context = contextvars.copy_context()

    def run() -> None:
        try:
            answer.set_result(context.run(make))
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=run, name="overlapc-make", daemon=True).start()
    return answer


@contextlib.contextmanager
def _switched_often() -> Iterator[None]:
    """Have a thread that runs Python let others run within such a time: else it does so nearly only
    in calls of C++, and those are no good moments."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(_OFTEN_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


_switching_often = Shared(_switched_often)


class _Guard(threading.Thread):
    def __init__(self, look: Callable[[], str | None]) -> None:
        super().__init__(name="overlapc-guard", daemon=True)
        self.found: str | None = None
        self.resting = False
        self._sent = False  # has a Lost been sent?
        self._look = look
        self._whom = threading.get_ident()
        self._over = threading.Event()
        self._lock = threading.Lock()

    def run(self) -> None:
        # Python drops exceptions in finalizers and callbacks of weak references, so a block that
        # goes on is interrupted again.
        while not self._over.wait(LOOK_S):
            try:
                found = self.found or self._look()
            except RankError as error:
                found = str(error)
            if found is not None:
                with _switching_often:
                    self._interrupt_at_a_good_moment(found)

    def _interrupt_at_a_good_moment(self, found: str) -> None:
        began = time.monotonic()
        while not self._over.wait(_OFTEN_S):
            with self._lock:
                if self._over.is_set():
                    return
                self.found = found
                if self.resting or _ends(self._whom):
                    return
                frames = frames_of(self._whom)
                at = frames[0].f_lasti if frames else -1
                if _is_good(frames, at, time.monotonic() - began):
                    self._sent = True
                    if _interrupt(self._whom, frames[0], at):
                        return

    def rest(self, resting: bool) -> None:
        with self._lock:
            self.resting = resting

    def stop(self) -> None:
        """Stop raising, and take an exception that is on its way."""
        while not self._over.is_set():
            with contextlib.suppress(Lost), self._lock:
                self._over.set()
        # Python can take an exception back, but then goes on looking for it between any two lines:
        # all Python is slower, and under a profiler or debugger the next call never ends. So one
        # more is sent, in the place of any that is on its way, and caught.
        with contextlib.suppress(Lost):
            if self._sent:
                _interrupt(self._whom)
                for _ in range(_SOON):
                    pass


def _ends(thread: int) -> bool:
    """Is the thread already handling a Lost?"""
    error = handled_by(thread)
    while error is not None and not isinstance(error, Lost):
        error = error.__context__
    return error is not None


def _follows(error: BaseException | None) -> bool:
    """Did the error come of a lost rank? One of this rank's own is what its user must see."""
    while error is not None:
        if isinstance(error, Lost) or any(word in str(error) for word in _BROKEN):
            return True
        error = error.__context__
    return False


def _is_good(frames: list[FrameType], at: int, waited_s: float) -> bool:
    """Is it a good moment to interrupt the innermost frame at this op, after so long a search?"""
    if not frames or waited_s >= 2 * _PATIENCE_S:
        return bool(frames)
    return (waited_s >= _PATIENCE_S or _is_between(frames[0], at)) and _may_break(frames)


def _may_break(frames: list[FrameType]) -> bool:
    """May an exception end all these frames, as far as their names tell?"""
    return not any(
        found.f_code.co_name in _UNBROKEN
        or _is_of(found, _CALLED_BACK)
        or (depth < _NEAR and _is_of(found, _AROUND))
        for depth, found in enumerate(frames)
    )


def _is_of(frame: FrameType, files: tuple[str, ...]) -> bool:
    return any(file in frame.f_code.co_filename for file in files)


def _is_between(frame: FrameType, at: int) -> bool:
    """Is this op of the frame Python alone, not C++ that may call Python?"""
    return at >= 0 and any(name in opname[frame.f_code.co_code[at]] for name in _BETWEEN)


def _interrupt(thread: int, frame: FrameType | None = None, at: int = -1) -> bool:
    """Raise Lost in the thread, if its frame is still at that op; else return False."""
    send = ctypes.pythonapi.PyThreadState_SetAsyncExc
    whom, what = ctypes.c_ulong(thread), ctypes.py_object(Lost)
    # Python lets no other thread run between this comparison and the call.
    if frame is None or frame.f_lasti == at:
        send(whom, what)
        return True
    return False
