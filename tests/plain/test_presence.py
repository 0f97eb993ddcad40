"""Who has ended, who is late, and where it is: by the kernel, without torch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from overlapc.ranks.presence import ENDED, LEFT, Presence, neighbours

WITHIN_S = 20.0


class Records:
    """A store within one process."""

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}

    def put(self, key: str, value: str) -> None:
        self.kept[key] = value.encode()

    def look(self, keys: Sequence[str]) -> list[bytes | None]:
        return [self.kept.get(key) for key in keys]


def until(what: Callable[[], Any]) -> Any:
    end = time.monotonic() + WITHIN_S
    while not (found := what()):
        assert time.monotonic() < end, f"not so after {WITHIN_S} s"
        time.sleep(0.01)
    return found


@pytest.fixture
def made() -> Iterator[Callable[..., Presence]]:
    records, found = Records(), list[Presence]()

    def make(rank: int, ranks: Sequence[int]) -> Presence:
        found.append(Presence(rank, ranks, records, lambda: {"at": f"rank {rank}"}))
        found[-1].begin()
        return found[-1]

    make.records = records  # type: ignore[attr-defined]
    yield make
    for each in found:
        each.close()


def test_a_rank_says_where_it_is(made: Any) -> None:
    first, _ = made(0, range(2)), made(1, range(2))
    first.ask([1])
    assert until(lambda: first.answers.get(1))[1] == {"at": "rank 1"}


def test_a_rank_that_is_not_there_yet_is_not_gone(made: Any) -> None:
    first = made(0, range(3))
    first.ask([1, 2])
    time.sleep(0.2)
    assert (first.gone, first.answers) == ({}, {})


def test_a_rank_that_leaves_lives_on(made: Any) -> None:
    first, second = made(0, range(2)), made(1, range(2))
    until(lambda: [link for link in first._links if link.greeted])
    second.close()
    assert until(lambda: first.gone) == {1: LEFT}
    assert first.lost([1]) is None
    made(1, range(2))  # it comes again
    until(lambda: not first.gone)


_OTHER = """
import os, sys, time
from overlapc.ranks.presence import Presence
from tests.plain.test_presence import Records
class Far(Records):
    def put(self, key, value): print(value, flush=True)
    def look(self, keys): return [sys.argv[1].encode() for key in keys]
Presence(1, range(3), Far(), dict)
if os.fork() == 0:
    time.sleep(30)  # a worker that outlives its parent
time.sleep(60)
"""


_RAISES = """
import os, sys, time
from overlapc.ranks.presence import Presence
from tests.plain.test_presence import Records
class Far(Records):
    def put(self, key, value): print(value, flush=True)
    def look(self, keys): return [sys.argv[1].encode() for key in keys]
class Slow(Presence):
    def _serve(self, *given):
        time.sleep(0.2)
        super()._serve(*given)
presence = Slow(1, range(2), Far(), dict)
while not [link for link in presence._links if link.greeted]:
    time.sleep(0.01)
presence.raises("ValueError: no")
os._exit(1)
"""


def test_what_ends_a_process_is_said_before_it_ends(made: Any) -> None:
    first = made(0, range(2))
    record = made.records.kept["presence/0"].decode()
    with subprocess.Popen([sys.executable, "-c", _RAISES, record], stdout=subprocess.PIPE):
        assert until(lambda: first.gone) == {1: f"{ENDED}, after it raised ValueError: no"}


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_process_that_ends_is_named_on_all_ranks(made: Any, how: int) -> None:
    """Even while a forked child of it lives; not while it is stopped."""
    first, third = made(0, range(3)), made(2, range(3))
    record = made.records.kept["presence/0"].decode()
    other = subprocess.Popen(
        [sys.executable, "-c", _OTHER, record], stdout=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        assert other.stdout is not None
        assert other.stdout.readline()
        until(lambda: 1 in [link.rank for link in first._links if link.greeted])
        other.send_signal(signal.SIGSTOP)
        os.waitpid(other.pid, os.WUNTRACED)  # until it is stopped
        first.ask([1])
        time.sleep(0.5)
        assert (first.gone, first.answers) == ({}, {})
        other.send_signal(signal.SIGCONT)
        until(lambda: 1 in first.answers)
        other.send_signal(how)
        assert until(lambda: first.gone) == {1: ENDED}
        assert until(lambda: third.gone) == {1: ENDED}  # though it was never connected with it
        assert "rank 1 is gone: its process has ended" in str(third.lost([0, 1]))
    finally:
        os.killpg(other.pid, signal.SIGKILL)  # its child, too
        other.communicate()


def test_an_error_of_this_rank_closes_no_connection(made: Any) -> None:
    first, second = made(0, range(2)), made(1, range(2))
    until(lambda: [link for link in first._links if link.greeted])
    second._here = lambda: 1 / 0
    first.ask([1])
    time.sleep(0.2)
    assert first.gone == {}


def test_many_ranks_are_connected_with_few_and_all_know() -> None:
    records = Records()
    count = 80
    every = [Presence(rank, range(count), records, dict) for rank in range(count)]
    try:
        for each in every:
            each.begin()
        until(lambda: all(len(each._links) >= 10 for each in every))
        assert max(len(each._links) for each in every) < 2 * 20
        every[0]._do(lambda: every[0]._is_gone(41, ENDED))
        until(lambda: all(each.lost([41]) for each in every if each.rank != 41))
    finally:
        for each in every:
            each.close()
    assert threading.active_count() < count


def test_who_watches_whom() -> None:
    assert neighbours([3, 5, 7], 5) == [3, 7]
    found = neighbours(range(1024), 0)
    assert found == sorted({2**k for k in range(10)} | {1024 - 2**k for k in range(10)})
    assert all(0 in neighbours(range(1024), other) for other in found)


_IMPORTS = """
import os, threading
import overlapc.api, overlapc.runtime.pipeline, overlapc.runtime.train_step, overlapc.megatron
held = [os.readlink(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd")[:-1]]
print(threading.active_count(), [each for each in held if "socket" in each])
"""


def test_an_import_starts_no_thread_and_no_socket() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _IMPORTS], capture_output=True, text=True, check=True
    )
    assert done.stdout == "1 []\n"
