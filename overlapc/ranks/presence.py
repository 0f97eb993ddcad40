"""`Presence` tells which ranks' processes have ended, and where a living one is.

The kernel is the judge. From first use each process holds TCP connections to some others: to all
of up to 32 ranks, of more to those at distances of powers of two.

- End of file, or a reset: the process of that rank has ended.
- No answer of the other kernel for `HOST_S`: its host is lost. A kernel also answers for a process
  that is stopped, or whose Python is blocked.

What one rank finds it passes on over all its connections, so that every rank knows at once. Apart
from that a connection carries a question, "where are you?", and its answer; nobody sends beats.

    presence/<rank>        the record of a rank: its address, a secret, its process

Who comes connects to those that are there already. Messages are lines of JSON:

    {"hello": rank, "secret": …, "gone": {…}}   both sides begin with it
    {"gone": {rank: what, …}}                   found lost; passed on once
    {"where": 1}      {"here": {…}}             a question and its answer
    {"raised": text}                            what a front door of the rank has just raised
    {"bye": 1}                                  the rank leaves its process group, and lives on
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import queue
import secrets
import selectors
import socket
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

HOST_S = 8.0
_SAID_S = 2.0  # so long at most a rank that raises stays to say so
_JUST_S = 30.0  # so long an end is said to follow from what the rank has raised
_MANY = 32  # up to so many ranks are all connected with each other
_MOST_BYTES = 1 << 20  # of a line: a longer one is nobody's of ours
ENDED = "its process has ended"
HOST_LOST = f"its host has not answered for {HOST_S:g} s"
LEFT = "it has left its process group"
_HOST_ERRORS = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN)


class Records(Protocol):
    """Where ranks find each other: a store."""

    def put(self, key: str, value: str) -> None: ...

    def look(self, keys: Sequence[str]) -> list[bytes | None]: ...


class _Link:
    """A connection. `rank` is known from the beginning on the side that connects."""

    def __init__(self, sock: socket.socket, rank: int | None) -> None:
        self.sock, self.rank = sock, rank
        self.greeted = False  # has the other side said hello?
        self.asked = False  # does it owe an answer?
        self.came, self.goes = bytearray(), bytearray()


class Presence:
    """This rank's connections, on a daemon thread. `here` says where this rank is, for others;
    `toward` is an address from which others come."""

    def __init__(
        self,
        rank: int,
        ranks: Sequence[int],
        records: Records,
        here: Callable[[], dict[str, Any]],
        toward: str = "127.0.0.1",
    ) -> None:
        self.rank = rank
        self.gone: dict[int, str] = {}  # why a rank will not come any more
        self._news: dict[int, str] = {}  # of these, what has not been passed on yet
        self.unreached: dict[int, str] = {}  # why a rank cannot be watched
        self.answers: dict[int, tuple[float, dict[str, Any]]] = {}  # when, and where it was
        self._records, self._here, self._toward = records, here, toward
        self._raised: dict[int, tuple[float, str]] = {}  # what others have raised, and when
        self._secret = secrets.token_hex(8)
        self._links: set[_Link] = set()
        self._selector = selectors.PollSelector()  # an epoll would be shared with forked children
        self._requests: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._bell, self._rings = socket.socketpair()
        self._listener: socket.socket | None = None
        self._over = False
        self._begun = threading.Event()
        self._join = neighbours(ranks, rank)
        for end in (self._bell, self._rings):
            end.setblocking(False)
        self._selector.register(self._rings, selectors.EVENT_READ)
        _presences.add(self)
        self._thread = threading.Thread(target=self._run, name="overlapc-presence", daemon=True)
        self._thread.start()

    # For other threads

    def lost(self, ranks: Sequence[int]) -> str | None:
        """Which of the ranks has ended, with its number, or None. One that left may live."""
        for rank, what in list(self.gone.items()):
            if rank in ranks and what != LEFT:
                return f"rank {rank} is gone: {what}"
        return None

    def ask(self, ranks: Sequence[int]) -> None:
        """Ask the ranks where they are; `answers` has what they said, when it comes."""
        self._do(lambda: self._ask(ranks))

    def raises(self, text: str) -> None:
        """Tell the others what this rank has raised: its process may end by it, at once. So this
        returns when it is said."""
        said = threading.Event()

        def say() -> None:
            self._say_to_all({"raised": text})
            said.set()

        self._do(say)
        if not self._over:
            said.wait(_SAID_S)

    def begin(self, within_s: float = 5.0) -> None:
        """Return when others can find this rank."""
        self._begun.wait(within_s)

    def once_begun(self, do: Callable[[], object]) -> None:
        """Run `do` once other ranks can find this one, and so see its end."""
        self._do(do)

    def meets(self, records: Records) -> None:
        """Find others by these records from now on."""
        self._records = records

    def close(self) -> None:
        """Leave, and say so: this process lives on."""
        self._do(self._leave)
        if threading.current_thread() is not self._thread:
            self._thread.join(1.0)

    def forget(self) -> None:
        """Close all sockets in a forked child: else they would outlive the parent's process."""
        for sock in (self._bell, self._rings, self._listener, *(link.sock for link in self._links)):
            if sock is not None:
                sock.close()

    def _do(self, request: Callable[[], object]) -> None:
        self._requests.put(request)
        with contextlib.suppress(OSError):  # full: it rings already
            self._bell.send(b"1")

    # The thread

    def _run(self) -> None:
        with contextlib.suppress(Exception):  # the store has ended: its own callers say so
            self._begin()
        self._begun.set()
        while not self._over:
            for key, events in self._selector.select():
                # An error here must not close connections, which others would take for an end.
                with contextlib.suppress(Exception):
                    self._serve(key.fileobj, key.data, events)
            with contextlib.suppress(Exception):
                self._pass_on()

    def _begin(self) -> None:
        family, _, _, _, (host, *_) = socket.getaddrinfo(
            _own_address(self._toward), 0, type=socket.SOCK_STREAM
        )[0]
        self._listener = listener = socket.socket(family, socket.SOCK_STREAM)
        listener.bind((host, 0))
        listener.listen(1024)
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        place = [host, listener.getsockname()[1], self._secret, *own_process()]
        self._records.put(f"presence/{self.rank}", json.dumps(place))
        for rank, record in zip(self._join, self._found(self._join), strict=True):
            if record is not None:
                self._connect(rank, record)

    def _found(self, ranks: Sequence[int]) -> list[list[Any] | None]:
        keys = [f"presence/{rank}" for rank in ranks]
        return [None if r is None else json.loads(r) for r in self._records.look(keys)]

    def _serve(self, source: Any, link: _Link | None, events: int) -> None:
        if source is self._rings:
            with contextlib.suppress(OSError):
                self._rings.recv(4096)
            while not self._requests.empty():
                with contextlib.suppress(Exception):
                    self._requests.get()()
        elif link is None:
            sock, _ = source.accept()
            self._add(_Link(sock, None))
        else:
            try:
                if events & selectors.EVENT_WRITE:
                    self._write(link)
                if events & selectors.EVENT_READ:
                    self._read(link)
            except OSError as error:
                self._ended(link, error)

    def _connect(self, rank: int, record: list[Any]) -> None:
        host, port, secret = record[:3]
        sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        sock.setblocking(False)
        error = sock.connect_ex((host, port))
        link = _Link(sock, rank)
        self._add(link)
        if error not in (0, errno.EINPROGRESS):
            self._ended(link, OSError(error, os.strerror(error)))
            return
        self._say(link, {"hello": self.rank, "secret": secret, "gone": self._told()})

    def _add(self, link: _Link) -> None:
        link.sock.setblocking(False)
        _watch_the_other_kernel(link.sock)
        self._links.add(link)
        self._selector.register(link.sock, selectors.EVENT_READ, link)

    def _read(self, link: _Link) -> None:
        with contextlib.suppress(BlockingIOError):
            data = link.sock.recv(1 << 16)
            if not data:
                self._ended(link, None)
                return
            link.came += data
        *lines, rest = link.came.split(b"\n")
        link.came = bytearray(rest)
        for line in lines:
            self._heard(link, json.loads(line))
        if len(rest) > _MOST_BYTES or (lines and not link.greeted):
            self._drop(link)

    def _heard(self, link: _Link, said: dict[str, Any]) -> None:
        if "hello" in said:
            if link.rank is None:
                if said.get("secret") != self._secret:
                    return  # a stranger
                link.rank = int(said["hello"])
                self._say(link, {"hello": self.rank, "gone": self._told()})
            link.greeted = True
            self.unreached.pop(link.rank, None)
            if self.gone.get(link.rank) == LEFT:  # it is back
                del self.gone[link.rank]
        if link.rank is None:
            return
        for rank, what in said.get("gone", {}).items():
            self._is_gone(int(rank), what)
        if "where" in said:
            self._say(link, {"here": self._here()})
        if "here" in said:
            link.asked = False
            self.answers[link.rank] = time.monotonic(), said["here"]
        if "raised" in said:
            self._raised[link.rank] = time.monotonic(), said["raised"]
        if "bye" in said:
            self.gone.setdefault(link.rank, LEFT)
            self._drop(link)

    def _ended(self, link: _Link, error: OSError | None) -> None:
        """The connection has ended: find out why."""
        if link not in self._links:
            return
        self._drop(link)
        rank = link.rank
        if rank is None or rank in self.gone:
            return
        if link.greeted:
            is_host = error is not None and error.errno in _HOST_ERRORS
            when, text = self._raised.get(rank, (0.0, ""))
            why = f", after it raised {text}" if time.monotonic() - when < _JUST_S else ""
            self._is_gone(rank, HOST_LOST if is_host else f"{ENDED}{why}")
            return
        record = self._found([rank])[0]
        if record is not None and has_ended(*record[3:]):
            self._is_gone(rank, ENDED)
        else:
            self.unreached[rank] = str(error or "it closed the connection")

    def _is_gone(self, rank: int, what: str) -> None:
        if rank == self.rank or self.gone.get(rank, LEFT) != LEFT:
            return
        self.gone[rank] = self._news[rank] = what

    def _pass_on(self) -> None:
        """Tell the others what is new: of a host's ranks at once."""
        news, self._news = self._news, {}
        if news:
            self._say_to_all({"gone": news})

    def _say_to_all(self, what: Mapping[str, Any]) -> None:
        for link in list(self._links):
            if link.rank is not None:
                self._say(link, what)

    def _told(self) -> Mapping[int, str]:
        return {rank: what for rank, what in self.gone.items() if what != LEFT}

    def _ask(self, ranks: Sequence[int]) -> None:
        links = {link.rank: link for link in self._links}
        strange = [rank for rank in ranks if rank not in links and rank not in self.gone]
        for rank, record in zip(strange, self._found(strange), strict=True):
            if record is not None:
                self._connect(rank, record)
        for link in list(self._links):
            if link.rank in ranks and not link.asked:
                link.asked = True
                self._say(link, {"where": 1})

    def _say(self, link: _Link, what: Mapping[str, Any]) -> None:
        link.goes += json.dumps(what).encode() + b"\n"
        try:
            self._write(link)
        except OSError as error:
            self._ended(link, error)

    def _write(self, link: _Link) -> None:
        with contextlib.suppress(BlockingIOError):
            while link.goes:
                del link.goes[: link.sock.send(link.goes)]
        more = selectors.EVENT_WRITE if link.goes else 0
        self._selector.modify(link.sock, selectors.EVENT_READ | more, link)

    def _drop(self, link: _Link) -> None:
        if link in self._links:
            self._links.remove(link)
            self._selector.unregister(link.sock)
            link.sock.close()

    def _leave(self) -> None:
        self._over = True
        for link in list(self._links):
            self._say(link, {"bye": 1})
            self._drop(link)
        self.forget()


_presences: weakref.WeakSet[Presence] = weakref.WeakSet()


def _forget_all() -> None:
    for presence in list(_presences):
        presence.forget()
    _presences.clear()


os.register_at_fork(after_in_child=_forget_all)


def neighbours(ranks: Sequence[int], rank: int) -> list[int]:
    """The ranks that `rank` is connected with: all others, or of many those at distances of powers
    of two."""
    others = [other for other in ranks if other != rank]
    if len(others) > _MANY:
        at, count = list(ranks).index(rank), len(ranks)
        steps = [2**k for k in range(count.bit_length()) if 2**k < count]
        others = sorted({ranks[(at + step) % count] for step in (*steps, *(-s for s in steps))})
    return others


def own_process() -> tuple[str, int, str]:
    """The machine of this process, its number there, and when it began; for `has_ended`."""
    number = os.getpid()
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}", number, _began(number)
    except OSError:  # no Linux
        return "", number, ""


def has_ended(machine: str, number: int, began: str) -> bool:
    """Has that process of this machine ended? False for one of another machine."""
    if not machine or machine != own_process()[0]:
        return False
    try:
        return _began(number) != began
    except OSError:
        return True


def _began(number: int) -> str:
    said = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
    return "" if said[0] in "ZX" else said[19]  # a zombie has ended


def _own_address(toward: str) -> str:
    """The address of this machine on its way to another. Nothing is sent."""
    family, _, _, _, address = socket.getaddrinfo(toward, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.connect(address)
        return str(sock.getsockname()[0])


def _watch_the_other_kernel(sock: socket.socket) -> None:
    """End the connection when the other kernel has not answered for `HOST_S`."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    wanted = {
        "TCP_NODELAY": 1,
        "TCP_KEEPIDLE": 2,
        "TCP_KEEPINTVL": 1,
        "TCP_KEEPCNT": int(HOST_S) - 2,
        "TCP_USER_TIMEOUT": int(HOST_S * 1000),  # where data is on its way, keepalive does not ask
    }
    for name, value in wanted.items():
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
