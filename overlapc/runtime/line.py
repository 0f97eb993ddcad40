"""`Line` is a rank's connection to the store of its process group; it also sends the rank's beats.

A *beat*, under the key `overlapc/<version>/beat/<rank>`, says "I live, and this is what I do". A
busy rank sends one each second.
"""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError  # the builtin only from 3.11
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from overlapc.errors import RankError

T = TypeVar("T")

PREFIX = "overlapc/1"
BEAT_S = 1.0
# With beats each second, 7 s keep every rank's error within 10 s of a death.
TIMEOUT_S = 7.0
# The store's own limit. Callers have theirs, which may be longer than any default.
_STORE_S = 600.0
IDLE = "idle"


@dataclass(frozen=True, slots=True)
class Beat:
    """A rank's last beat. `count` grows while the rank is busy, and while Megatron is patched."""

    count: int
    phase: str
    waits_for: tuple[int, ...] = ()

    def text(self) -> str:
        return json.dumps([self.count, self.phase, self.waits_for])

    @staticmethod
    def parse(text: bytes) -> Beat:
        count, phase, waits_for = json.loads(text)
        return Beat(count, phase, tuple(waits_for))


@dataclass(slots=True)
class History:
    """State that must outlive a broken line: by group, the number of rounds and the keys left
    behind; and whether an idle rank sends beats, too."""

    rounds: Counter[str] = field(default_factory=Counter)
    written: dict[str, list[str]] = field(default_factory=dict)
    beats: bool = False


class Line:
    """One rank's connection to the store, on a daemon thread that also sends its beat.

    A TCPStore call blocks for ever if the host is stopped or cut off, and one connection serves one
    thread at a time. So only this thread calls the store, on its own connection, and callers wait
    for the thread with a time limit. After an error the line stays broken. `again`: it takes the
    place of a broken one.
    """

    def __init__(self, store: Any, rank: int, history: History, again: bool = False) -> None:
        self.history = history
        self.broken: RankError | None = None
        self._rank, self._again = rank, again
        self._where = _address(store)
        self._phases: list[tuple[str, tuple[int, ...]]] = [(IDLE, ())]
        self._said: tuple[str, tuple[int, ...]] | None = None
        self._requests: queue.SimpleQueue[Callable[[Any], object] | None] = queue.SimpleQueue()
        # The thread must not keep `store` alive: it is closed when its process group goes.
        self._store = [store]
        self._thread = threading.Thread(target=self._run, name="overlapc-exchange", daemon=True)
        self._thread.start()

    def call(self, request: Callable[[Any], T], within_s: float) -> T:
        """Return `request(store)`; raise RankError if the store fails or does not answer."""
        answer: Future[T] = Future()

        def run(store: Any) -> None:
            try:
                answer.set_result(request(store))
            except BaseException as error:
                answer.set_exception(error)
                raise

        self.send(run)
        until = time.monotonic() + within_s
        while self.broken is None:
            left_s = until - time.monotonic()
            try:
                return answer.result(max(0.0, min(left_s, 0.1)))
            except FutureTimeoutError:
                if left_s <= 0:
                    self._break(f"did not answer for {within_s:g} s")
            except Exception as error:
                self._break(f"failed ({_first_line(error)})", error)
        raise RankError(str(self.broken)) from self.broken.__cause__

    def send(self, request: Callable[[Any], object]) -> None:
        """Have the thread run `request(store)`; an error breaks the line."""
        self._requests.put(request)

    @contextlib.contextmanager
    def busy(self, phase: str) -> Iterator[Callable[[str, tuple[int, ...]], None]]:
        """Beat as `phase` while the block runs; yields a function that changes `phase` and
        `waits_for`."""
        self._phases.append((phase, ()))
        place = len(self._phases) - 1
        self.send(_nothing)

        def say(phase: str, waits_for: tuple[int, ...]) -> None:
            # Name eight at most: none of the ranks that one waits for may be lost.
            state = (phase, waits_for[:8])
            if self._phases[place] != state:
                self._phases[place] = state
                self.send(_nothing)

        try:
            yield say
        finally:
            del self._phases[place:]
            self.send(_nothing)

    def close(self) -> None:
        self._requests.put(None)
        # A daemon thread inside a C++ call while the interpreter ends can abort the process.
        if threading.current_thread() is not self._thread:
            self._thread.join(1.0)

    def _run(self) -> None:
        store: Any = None
        count = 0
        last = 0.0
        try:
            store = self._store.pop()
            if self._again:
                _reach(store)
            store = dist.PrefixStore(PREFIX, store.clone())
            store.set_timeout(timedelta(seconds=_STORE_S))
            while True:
                try:
                    request = self._requests.get(timeout=self._rest_s(last))
                except queue.Empty:
                    request = _nothing
                if request is None:
                    return
                request(store)
                state = self._phases[-1]
                if state != self._said or self._rest_s(last) == 0:
                    count += 1
                    last = time.monotonic()
                    store.set(f"beat/{self._rank}", Beat(count, *state).text())
                    self._said = state
        except BaseException as error:
            self._break(f"failed ({_first_line(error)})", error)

    def _rest_s(self, last: float) -> float | None:
        """Seconds until the next beat is due; None for an idle rank that sends none."""
        if self._phases[-1][0] == IDLE and not self.history.beats:
            return None
        return max(0.0, last + BEAT_S - time.monotonic())

    def _break(self, what: str, cause: BaseException | None = None) -> None:
        if self.broken is None:
            broken = RankError(
                f"rank {self._rank} cannot plan with the others: the process group's store "
                f"{self._where} {what}; expected it to live as long as the run: the process that "
                "holds it (rank 0, or torchrun's agent) has ended or is cut off; see its output"
            )
            broken.__cause__ = cause
            self.broken = broken


_lines: weakref.WeakKeyDictionary[Any, dict[int, Line]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def line_to(store: Any, rank: int) -> Line:
    """Return the line of `rank` to `store`; make a new one if there is none or it broke."""
    with _lock:
        lines = _lines.setdefault(store, {})
        line = lines.get(rank)
        if line is None or line.broken is not None:
            again = line is not None
            line = Line(store, rank, History() if line is None else line.history, again)
            # Runs when the process group drops the store, or at exit.
            weakref.finalize(store, line.close)
            lines[rank] = line
        return line


def has_peers() -> bool:
    """Are there other processes (or threads) in the default group? The fake backend has none."""
    return (
        dist.is_available()
        and dist.is_initialized()
        and dist.get_world_size() > 1
        and dist.get_backend() != "fake"
    )


def own_rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def present(store: Any, keys: list[str]) -> list[bytes | None]:
    """The records under `keys`, without waiting for missing ones."""
    return [store.get(key) if store.check([key]) else None for key in keys]


def _nothing(store: Any) -> None:
    """A request that only wakes the thread, which then sends its changed state."""


def _address(store: Any) -> str:
    """`TCPStore host:port` or `FileStore path`, as far as the store says."""
    store = getattr(store, "_underlying_non_prefix_store", store)
    place = getattr(store, "path", None) or (
        f"{store.host}:{store.port}" if hasattr(store, "port") else ""
    )
    return f"{type(store).__name__} {place}".rstrip()


def _reach(store: Any) -> None:
    """Raise OSError if nobody listens at the store's address any more: a clone would try for
    long."""
    store = getattr(store, "_underlying_non_prefix_store", store)
    if isinstance(store, dist.TCPStore):
        socket.create_connection((store.host, store.port), BEAT_S).close()


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
