"""`LinkGroup` emulates an alpha-beta link: gloo moves the data, and `wait()` ends when the link
would have moved it.

    begin of a transfer = the later of: launch on the last rank · end of the one before it
    end of a transfer   = begin + alpha + wire bytes / bandwidth
    wait() returns at   = the later of: end · gloo has delivered the data

A group is one in-order lane, as an NCCL communicator's stream is: a second collective in
flight begins when the first ends. Sends and receives have a lane for each ordered pair of
ranks. Groups do not slow each other down.

Ranks tell each other their launch times through shared memory: no message, no thread. The
times can be compared because the machine's clock is one for all of its processes; ranks on
different machines are refused. In virtual time (`overlapc.tools.timing`) each rank's clock is its
own, and each transfer sets the clocks of its ranks to its end if they are not later.

Choose a link slower than gloo over loopback (about 1 GB/s, and it costs CPU): the data must
have arrived before the modelled end for the model to be what is measured.
"""

from __future__ import annotations

import mmap
import os
import platform
import tempfile
import threading
import time
from collections import deque
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from overlapc.core.errors import RankError
from overlapc.emulate.group import (
    EmulatedGroup,
    EmulatedWork,
    register,
    settings_of_world,
    stand_until,
)
from overlapc.emulate.model import Link
from overlapc.tools.timing import clock_unless_failed, now_ns

BACKEND = "overlapc_link"


def init_link(link: Link, clock: str = "machine", **init: Any) -> None:
    """`torch.distributed.init_process_group` on the emulated link; `init` is passed on.

    With `clock="virtual"` nobody sleeps: times are to be read by `overlapc.emulate.now_ns`, and are
    those of ranks that have a core each (`overlapc.tools.timing`). overlapc measures by it as well,
    until `torch.distributed.destroy_process_group()`.

    Every later group (`new_group`, `DeviceMesh`) inherits `link`; give one its own with
    `dist.new_group(ranks, backend="overlapc_link", pg_options=Link(...))`.
    """
    with clock_unless_failed(clock):
        dist.init_process_group(BACKEND, pg_options=link, **init)


class LinkGroup(EmulatedGroup):
    """Real ranks over gloo, with waits as long as on the modelled link."""

    backend_name = BACKEND

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta, link: Link):
        super().__init__(rank, size, link)
        self.settings = link
        self._board = _Board(dist.PrefixStore("board", store), rank, size, timeout)
        loopback = dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")
        data = dist.PrefixStore("data", store)
        self._gloo = in_order_gloo(data, rank, size, timeout, loopback)
        self._collectives = _Lane(self._board, mine=rank, all_rows=list(range(size)))
        self._pairs: dict[tuple[int, int], _Lane] = {}

    def _start(self, call: str, wire_bytes: float, *args: Any) -> dist.Work:
        launched_ns = now_ns()
        lane = self._pair(call, args[1]) if call in ("send", "recv") else self._collectives
        transfer = lane.launch(launched_ns, self.duration_ns(wire_bytes))
        work = gloo_call(self._gloo, call, *args)
        return _Work(work, transfer, lane, result=args[0] if args else None)

    def _pair(self, call: str, peer: int) -> _Lane:
        """The lane of the sends from one rank to another; both ends write into it."""
        source, target = (self.rank(), peer) if call == "send" else (peer, self.rank())
        if (source, target) not in self._pairs:
            row = self.size() + 2 * (source * self.size() + target)
            mine = row if call == "send" else row + 1
            self._pairs[source, target] = _Lane(self._board, mine, all_rows=[row, row + 1])
        return self._pairs[source, target]

    def _get_sequence_number_for_group(self) -> int:
        return self._collectives.launched

    def shutdown(self) -> None:
        self._gloo.shutdown()
        super().shutdown()


class _Board:
    """Launch times in memory that all ranks of a group map: written by one, read by all.

    A row belongs to one writer: row r to rank r's collectives, then two rows to each ordered
    pair of ranks, for the sender and the receiver. A row is a ring of entries
    `(number + 1, launch ns, duration ns)`, the first word written last.
    """

    RING = 512  # most transfers of one row in flight

    def __init__(self, store: dist.Store, rank: int, ranks: int, timeout: timedelta) -> None:
        self._timeout_s = timeout.total_seconds()
        rows = ranks + 2 * ranks * ranks
        if rank == 0:
            shared = Path("/dev/shm")
            file, path = tempfile.mkstemp("", "overlapc-link-", shared if shared.exists() else None)
            os.ftruncate(file, rows * self.RING * 3 * 8)
            store.set("path", path)
            store.set("machine", _machine())
        else:
            if (machine := store.get("machine").decode()) != _machine():
                raise RankError(
                    f"rank {rank} runs on machine {_machine()}, rank 0 on {machine}; the emulated "
                    "link needs one clock and one memory: start all ranks on one machine, or use "
                    "a real backend"
                )
            file = os.open(store.get("path").decode(), os.O_RDWR)
        self._words = memoryview(mmap.mmap(file, 0)).cast("q")
        os.close(file)
        if rank == 0:
            store.wait([f"mapped {other}" for other in range(1, ranks)])
            os.unlink(path)
        else:
            store.set(f"mapped {rank}", "")

    def write(self, row: int, number: int, launched_ns: int, duration_ns: int) -> None:
        at = self._entry(row, number)
        self._words[at + 1] = launched_ns
        self._words[at + 2] = duration_ns
        self._words[at] = number + 1

    def read(self, row: int, number: int, block: bool) -> tuple[int, int] | None:
        """Return (launch, duration) once they are written; None if they are not yet and `block` is
        false.

        Gloo has usually had to wait for the other ranks anyway, so a read rarely polls.
        """
        at = self._entry(row, number)
        give_up = time.monotonic() + self._timeout_s
        while self._words[at] <= number:
            if not block:
                return None
            if time.monotonic() > give_up:
                raise RankError(
                    f"a rank has not launched transfer {number} after {self._timeout_s:g} s; "
                    "every rank must issue the same collectives in the same order"
                )
            time.sleep(1e-4)
        if self._words[at] != number + 1:
            raise RankError(
                f"more than {self.RING} transfers in flight on one group; wait for them earlier"
            )
        return self._words[at + 1], self._words[at + 2]

    def _entry(self, row: int, number: int) -> int:
        return (row * self.RING + number % self.RING) * 3


@dataclass(eq=False)
class _Transfer:
    number: int  # its number within the lane
    end_ns: int | None = None  # known once all its ranks have launched


class _Lane:
    """Transfers in the order of their launch; each begins when the one before it has ended.

    All ranks compute the same ends, from the same launch times, without further messages.
    """

    def __init__(self, board: _Board, mine: int, all_rows: list[int]) -> None:
        self._board = board
        self._mine = mine
        self._all_rows = all_rows
        self._lock = threading.Lock()
        self.launched = 0
        self._open: deque[_Transfer] = deque()
        self._free_ns = 0

    def launch(self, launched_ns: int, duration_ns: int) -> _Transfer:
        transfer = _Transfer(self.launched)
        self._board.write(self._mine, transfer.number, launched_ns, duration_ns)
        self._open.append(transfer)
        self.launched += 1
        # Works that nobody waits for must not fill the ring; the holder of the lock removes them.
        if self._lock.acquire(blocking=False):
            try:
                self._settle(transfer, block=False)
            finally:
                self._lock.release()
        return transfer

    def end_of(self, transfer: _Transfer, block: bool = True) -> int | None:
        with self._lock:
            return self._settle(transfer, block)

    def _settle(self, transfer: _Transfer, block: bool) -> int | None:
        while transfer.end_ns is None:
            first = self._open[0]
            entries = [self._board.read(row, first.number, block) for row in self._all_rows]
            known = [entry for entry in entries if entry is not None]
            if len(known) < len(entries):
                return None
            # Uneven splits take as long as the rank with the most bytes.
            launched_ns, duration_ns = (max(column) for column in zip(*known, strict=True))
            first.end_ns = self._free_ns = max(self._free_ns, launched_ns) + duration_ns
            self._open.popleft()
        return transfer.end_ns


class _Work(EmulatedWork):
    """One operation in flight. `wait` may be called often and from any thread."""

    def __init__(self, work: dist.Work, transfer: _Transfer, lane: _Lane, result: Any) -> None:
        super().__init__(result)
        self._work = work
        self._transfer = transfer
        self._lane = lane
        self._lock = threading.Lock()
        self._delivered = False

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        with self._lock:  # a second wait() on a gloo send or receive would hang
            if not self._delivered:
                since_ns = now_ns()
                if timeout > timedelta(0):
                    self._work.wait(timeout)
                else:
                    self._work.wait()
                end_ns = self._lane.end_of(self._transfer)
                assert end_ns is not None
                stand_until(end_ns, since_ns)
                self._delivered = True
        return True

    def is_completed(self) -> bool:
        """As with gloo, a send or a receive is complete only once it was waited for."""
        if self._delivered:
            return True
        if not self._work.is_completed():
            return False
        end_ns = self._lane.end_of(self._transfer, block=False)
        return end_ns is not None and now_ns() >= end_ns


# Under torch < 2.13 the wrapped group knows these by their older names.
_GLOO_NAME = (
    {}
    if hasattr(dist.ProcessGroup, "all_gather_single")
    else {
        "all_gather_single": "_allgather_base",
        "reduce_scatter_single": "_reduce_scatter_base",
        "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
        "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
        "all_to_all_single": "alltoall_base",
    }
)


def gloo_call(gloo: dist.ProcessGroup, call: str, *args: Any) -> dist.Work:
    """Find an operation of the wrapped group by its name of torch 2.13."""
    work: dist.Work = getattr(gloo, _GLOO_NAME.get(call, call))(*args)
    return work


def in_order_gloo(
    store: dist.Store, rank: int, size: int, timeout: timedelta, device: Any
) -> dist.ProcessGroup:
    """A plain gloo group. One thread makes its collectives run in order."""
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timeout
    options._threads = 1
    options._devices = [device]
    backend = dist.ProcessGroupGloo(store, rank, size, options)
    group = dist.ProcessGroup(store, rank, size)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    return group


def _machine() -> str:
    """A name of this machine, and of this boot if the system gives one."""
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    return boot_id.read_text().strip() if boot_id.exists() else platform.node()


def _create(backend: Any, options: Any) -> LinkGroup:
    link = options if isinstance(options, Link) else settings_of_world(Link, BACKEND)
    return LinkGroup(backend.store, backend.group_rank, backend.group_size, backend.timeout, link)


register(BACKEND, _create)
