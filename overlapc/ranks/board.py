"""`Board` is a rank's connection to the store of its process group: what ranks tell each other
stands there. With it begins this rank's `Presence`."""

from __future__ import annotations

import queue
import socket
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError  # the builtin only from 3.11
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from overlapc.core.errors import RankError
from overlapc.ranks.gloo import mend_gathers
from overlapc.ranks.here import place_of
from overlapc.ranks.presence import Presence
from overlapc.tools.issued import issued

T = TypeVar("T")

PREFIX = "overlapc/2"
# The store's own limit. Callers have theirs, which may be longer than any default.
_STORE_S = 3600.0
_SLOW_S = 1.0  # for an answer of the store
_LOOK_S = 0.5  # so often who waits for one looks whether the board broke
_FEW = 8  # of the ranks that one waits for: none of them may be lost
IDLE = ""


# A step of planning: the group, the number of its round, the number of the step.
Step = tuple[str, int, int]


@dataclass(frozen=True, slots=True)
class Doing:
    """What this rank does, for others: the phase of planning, and the ranks that it waits for, at
    which step of planning. `pending` says of a wait for transfers whether it still lasts, which
    this rank itself may notice late. `number` tells one wait from the next."""

    phase: str = IDLE
    waits: tuple[int, ...] = ()
    step: Step | None = None
    pending: Callable[[], bool] = lambda: True
    number: int = 0


@dataclass(slots=True)
class History:
    """State that must outlive a broken board: by group, the number of rounds and the keys left
    behind, and the last step in which it did its part; what the rank does, innermost last; how
    often a front door was called; and the last call that failed, with what it raised."""

    rounds: Counter[str] = field(default_factory=Counter)
    written: dict[str, list[str]] = field(default_factory=dict)
    done: dict[str, tuple[int, int]] = field(default_factory=dict)
    doing: list[Doing] = field(default_factory=lambda: [Doing()])
    waits: int = 0
    calls: int = 0
    raised: tuple[int, str] = (0, "")
    presence: Presence | None = None


class Board:
    """One rank's connection to the store, on a daemon thread.

    A TCPStore call blocks for ever if the host is stopped or cut off, and one connection serves one
    thread at a time. So only this thread calls the store, on its own connection, and callers wait
    for the thread: as long as the store's process lives, and at most `limit_s`. After an error the
    board stays broken. `again`: it takes the place of a broken one.
    """

    def __init__(
        self, store: Any, rank: int, history: History, ranks: Sequence[int], again: bool = False
    ) -> None:
        self.history = history
        self.broken: RankError | None = None
        self.limit_s = group_timeout_s()
        self.rank, self._again = rank, again
        self._called = False  # within a call of a front door
        self._where = _address(store)
        self._requests: queue.SimpleQueue[Callable[[Any], object] | None] = queue.SimpleQueue()
        # The thread must not keep `store` alive: it is closed when its process group goes.
        self._store = [store]
        self._thread = threading.Thread(target=self._run, name="overlapc-board", daemon=True)
        self._thread.start()
        if history.presence is None:
            history.presence = _presence(self, store, rank, ranks)
        else:
            history.presence.meets(self)

    @property
    def presence(self) -> Presence:
        assert self.history.presence is not None
        return self.history.presence

    def call(self, request: Callable[[Any], T], within_s: float | None = None) -> T:
        """Return `request(store)`; raise RankError if the store fails, does not answer in time (in
        `limit_s`), or is slow because a rank is gone."""
        answer: Future[T] = Future()

        def run(store: Any) -> None:
            try:
                answer.set_result(request(store))
            except BaseException as error:
                answer.set_exception(error)
                raise

        self.send(run)
        began = time.monotonic()
        limit_s = self.limit_s if within_s is None else within_s
        while self.broken is None:
            waited_s = time.monotonic() - began
            try:
                return answer.result(max(0.0, min(limit_s - waited_s, _LOOK_S)))
            except FutureTimeoutError:
                if waited_s >= limit_s:
                    self._break(f"did not answer for {limit_s:g} s")
                gone = list(self.history.presence.gone) if self.history.presence else []
                if waited_s > _SLOW_S and (lost := self.presence.lost(gone)):
                    self._break(f"does not answer, and {lost}")
            except Exception as error:
                self._break(f"failed ({_first_line(error)})", error)
        raise RankError(str(self.broken)) from self.broken.__cause__

    def send(self, request: Callable[[Any], object]) -> None:
        """Have the thread run `request(store)`; an error breaks the board."""
        self._requests.put(request)

    def put(self, key: str, value: str | bytes) -> None:
        self.call(lambda store: store.set(key, value))

    def look(self, keys: Sequence[str]) -> list[bytes | None]:
        """The records under `keys`, without waiting for missing ones."""
        return self.call(lambda store: present(store, list(keys))) if keys else []

    @contextmanager
    def busy(self, phase: str) -> Iterator[Callable[[Doing], None]]:
        """Tell who asks that this rank does `phase` while the block runs; yields a function that
        says what it does now."""
        stack = self.history.doing
        stack.append(Doing(phase))
        place = len(stack) - 1

        def say(doing: Doing) -> None:
            if replace(stack[place], number=0) != doing:
                self.history.waits += 1
                stack[place] = replace(doing, number=self.history.waits)

        try:
            yield say
        finally:
            del stack[place:]

    @contextmanager
    def telling(self) -> Iterator[None]:
        """A call of a front door: tell who asks what it has raised."""
        history = self.history
        outermost, self._called = not self._called, True
        history.calls += outermost
        try:
            yield
        except Exception as error:
            history.raised = history.calls, f"{type(error).__name__}: {_first_line(error)}"
            self.presence.raises(history.raised[1])
            raise
        finally:
            self._called = not outermost

    def close(self) -> None:
        self._requests.put(None)
        # A daemon thread inside a C++ call while the interpreter ends can abort the process.
        if threading.current_thread() is not self._thread:
            self._thread.join(1.0)

    def _run(self) -> None:
        store: Any = None
        try:
            store = self._store.pop()
            if self._again:
                _reach(store)
            store = dist.PrefixStore(PREFIX, store.clone())
            store.set_timeout(timedelta(seconds=_STORE_S))
            while (request := self._requests.get()) is not None:
                request(store)
        except BaseException as error:
            self._break(f"failed ({_first_line(error)})", error)

    def _break(self, what: str, cause: BaseException | None = None) -> None:
        if self.broken is None:
            broken = RankError(
                f"rank {self.rank} cannot plan with the others: the process group's store "
                f"{self._where} {what}; expected it to live as long as the run: the process that "
                "holds it (rank 0, or torchrun's agent) has ended or is cut off; see its output"
            )
            broken.__cause__ = cause
            self.broken = broken


_boards: weakref.WeakKeyDictionary[Any, dict[int, Board]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def board_of(store: Any, rank: int, ranks: Sequence[int]) -> Board:
    """Return the board of `rank` at `store`; make a new one if there is none or it broke. `ranks`
    are all that the store joins."""
    with _lock:
        boards = _boards.setdefault(store, {})
        board = boards.get(rank)
        if board is None or board.broken is not None:
            again = board is not None
            history = History() if board is None else board.history
            board = Board(store, rank, history, ranks, again)
            # Runs when the process group drops the store, or at exit.
            weakref.finalize(store, board.close)
            if not again:  # at exit the kernel closes connections: this process has ended then
                weakref.finalize(store, board.presence.close).atexit = False
            boards[rank] = board
        return board


def own_board() -> Board | None:
    """This rank's board at the default group's store; None if there are no other ranks."""
    if not has_peers():
        return None
    return board_of(_get_default_store(), own_rank(), range(dist.get_world_size()))


def attend() -> None:
    """Let others see from now on whether this process lives. Every front door begins with it."""
    mend_gathers()
    if (board := own_board()) is not None:
        board.presence.begin()


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


def group_timeout_s() -> float:
    """The default group's own timeout: so long its collectives wait for a late rank."""
    if not (dist.is_available() and dist.is_initialized()):
        return _STORE_S
    group: Any = dist.distributed_c10d._get_default_group()
    found = [_timeout_s(group, device) for device in group._device_types]
    return max([s for s in found if s is not None], default=_STORE_S)


def _timeout_s(group: Any, device: Any) -> float | None:
    try:
        return float(group._get_backend(device).options._timeout.total_seconds())
    except (AttributeError, RuntimeError):  # a backend without such an option
        return None


def present(store: Any, keys: list[str]) -> list[bytes | None]:
    """The records under `keys`, without waiting for missing ones."""
    if keys and store.check(keys):
        return list(store.multi_get(keys))
    return [store.get(key) if store.check([key]) else None for key in keys]


def missing(store: Any, keys: Sequence[str], most: int) -> list[str]:
    """The first keys that are not there, at most so many. Halves are asked for together: to look
    at each of a thousand would take long."""
    if most < 1 or not keys or store.check(list(keys)):
        return []
    if len(keys) == 1:
        return list(keys)
    half = len(keys) // 2
    found = missing(store, keys[:half], most)
    return [*found, *missing(store, keys[half:], most - len(found))]


def _presence(board: Board, store: Any, rank: int, ranks: Sequence[int]) -> Presence:
    history, thread = board.history, threading.get_ident()

    def here() -> dict[str, Any]:
        doing = history.doing[-1]
        return {
            **place_of(thread),
            "phase": doing.phase,
            "waits": doing.waits[:_FEW] if doing.pending() else (),
            "step": doing.step,
            "done": history.done,
            "number": doing.number,
            "raised": history.raised,
            "issued": issued_by_name(),
        }

    host = getattr(_innermost(store), "host", "127.0.0.1")
    return Presence(rank, ranks, board, here, host)


def issued_by_name() -> dict[str, int]:
    """How many collectives this rank has issued, by the name of their process group."""
    return {group.group_name: count for group, count in issued().items()}


def _innermost(store: Any) -> Any:
    return getattr(store, "_underlying_non_prefix_store", store)


def _address(store: Any) -> str:
    """`TCPStore host:port` or `FileStore path`, as far as the store says."""
    store = _innermost(store)
    place = getattr(store, "path", None) or (
        f"{store.host}:{store.port}" if hasattr(store, "port") else ""
    )
    return f"{type(store).__name__} {place}".rstrip()


def _reach(store: Any) -> None:
    """Raise OSError if nobody listens at the store's address any more: a clone would try for
    long."""
    store = _innermost(store)
    if isinstance(store, dist.TCPStore):
        socket.create_connection((store.host, store.port), _SLOW_S).close()


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
