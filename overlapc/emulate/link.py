"""The emulated link: gloo moves the data, and `wait()` ends when an alpha-beta link would.

    begin of a transfer = the later of: launch on the last rank · end of the one before it
    end of a transfer   = begin + alpha + wire bytes / bandwidth
    wait() returns at   = the later of: end · gloo has delivered the data

A group is one in-order lane, as an NCCL communicator's stream is: a second collective in
flight begins when the first ends. Sends and receives have a lane for each ordered pair of
ranks. Groups do not slow each other down.

Launch times travel on a second, private gloo group, asynchronously. They can be compared
because `time.monotonic_ns` is one clock for all processes of one machine; ranks on different
machines are refused.

Choose a link slower than gloo over loopback (about 1 GB/s, and it costs CPU): the data must
have arrived before the modelled end for the model to be what is measured.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from overlapc.emulate.group import EmulatedGroup, register, settings_of_world, sleep_until
from overlapc.emulate.model import Link
from overlapc.errors import RankError

BACKEND = "overlapc_link"


def init_link(link: Link, **init: Any) -> None:
    """`torch.distributed.init_process_group` on the emulated link; `init` is passed on.

    Every later group (`new_group`, `DeviceMesh`) inherits `link`; give one its own with
    `dist.new_group(ranks, backend="overlapc_link", pg_options=Link(...))`.
    """
    dist.init_process_group(BACKEND, pg_options=link, **init)


class LinkGroup(EmulatedGroup):
    """Real ranks over gloo, on a link that takes its time."""

    backend_name = BACKEND

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta, link: Link):
        super().__init__(rank, size, link)
        _check_one_machine(store, rank)
        self.settings = link
        self._data = _gloo(dist.PrefixStore("data", store), rank, size, timeout)
        self._clock = _gloo(dist.PrefixStore("clock", store), rank, size, timeout)
        self._collectives = _Lane()
        self._pairs: dict[tuple[int, int], _Lane] = {}

    def _start(self, call: str, wire_bytes: float, *args: Any) -> dist.Work:
        mine = torch.tensor([time.monotonic_ns(), self.duration_ns(wire_bytes)])
        if call in ("send", "recv"):
            lane, meet = self._meet_peer(mine, call, peer=args[1], tag=args[2])
        else:
            lane, meet = self._meet_all(mine)
        # The clock goes first: it must not queue behind the data on the way out.
        work = getattr(self._data, _GLOO_NAME.get(call, call))(*args)
        return lane.join(_Transfer(work, meet, lane, result=args[0] if args else None))

    def _meet_all(self, mine: torch.Tensor) -> tuple[_Lane, _Meet]:
        """The latest launch and the longest duration of any rank (splits may be uneven)."""
        opts = c10d.AllreduceOptions()
        opts.reduceOp = dist.ReduceOp.MAX
        work = self._clock.allreduce([mine], opts)

        def meet() -> list[int]:
            work.wait()
            return mine.tolist()

        return self._collectives, meet

    def _meet_peer(self, mine: torch.Tensor, call: str, peer: int, tag: int) -> tuple[_Lane, _Meet]:
        """The same between two ranks. Both tell each other; tags keep the directions apart."""
        sends = call == "send"
        pair = (self.rank(), peer) if sends else (peer, self.rank())
        theirs = torch.empty_like(mine)
        told = self._clock.send([mine], peer, 2 * tag + (not sends))
        heard = self._clock.recv([theirs], peer, 2 * tag + sends)

        def meet() -> list[int]:
            told.wait()
            heard.wait()
            return torch.maximum(mine, theirs).tolist()

        return self._pairs.setdefault(pair, _Lane()), meet

    def shutdown(self) -> None:
        self._data.shutdown()
        self._clock.shutdown()


# Blocks until every rank concerned has launched; gives [latest launch, longest duration] in ns.
_Meet = Callable[[], list[int]]


class _Lane:
    """Transfers in the order of their launch; each begins when the one before it has ended.

    All ranks compute the same ends, from the same launch times, without further messages.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._unmet: deque[_Transfer] = deque()
        self._free_ns = 0

    def join(self, transfer: _Transfer) -> _Transfer:
        self._unmet.append(transfer)
        return transfer

    def end_of(self, transfer: _Transfer) -> int:
        with self._lock:
            while transfer.end_ns is None:
                first = self._unmet[0]
                launched_ns, duration_ns = first.meet()
                first.end_ns = self._free_ns = max(self._free_ns, launched_ns) + duration_ns
                self._unmet.popleft()
        return transfer.end_ns


class _Transfer(dist.Work):
    """One operation in flight. `wait` may be called often and from any thread."""

    def __init__(self, work: dist.Work, meet: _Meet, lane: _Lane, result: Any) -> None:
        super().__init__()
        self.meet = meet
        self.end_ns: int | None = None
        self._work = work
        self._lane = lane
        self._result = result
        self._lock = threading.Lock()
        self._delivered = False

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        with self._lock:  # a second wait() on a gloo send or receive would hang
            if not self._delivered:
                if timeout > timedelta(0):
                    self._work.wait(timeout)
                else:
                    self._work.wait()
                sleep_until(self._lane.end_of(self))
                self._delivered = True
        return True

    def is_completed(self) -> bool:
        """As with gloo, a send or a receive is complete only once it was waited for."""
        if self._delivered:
            return True
        if not self._work.is_completed():
            return False
        return time.monotonic_ns() >= self._lane.end_of(self)

    def is_success(self) -> bool:
        return self.is_completed()

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> Any:
        return self._result

    def get_future(self) -> torch.futures.Future[Any]:
        """For DistributedDataParallel's hooks: a thread waits and then sets the result."""
        future: torch.futures.Future[Any] = torch.futures.Future()

        def finish() -> None:
            try:
                self.wait()
            except RuntimeError as error:
                future.set_exception(error)
            else:
                future.set_result(self._result)

        threading.Thread(target=finish, daemon=True).start()
        return future


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


def _gloo(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
    """A plain gloo group over loopback. One thread makes its collectives run in order."""
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timeout
    options._threads = 1
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    backend = dist.ProcessGroupGloo(store, rank, size, options)
    group = dist.ProcessGroup(store, rank, size)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    return group


def _check_one_machine(store: dist.Store, rank: int) -> None:
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    if not boot_id.exists():  # not Linux: trust the user
        return
    mine = boot_id.read_text().strip()
    if rank == 0:
        store.set("boot_id", mine)
    elif (first := store.get("boot_id").decode()) != mine:
        raise RankError(
            f"rank {rank} runs on another machine than rank 0 (boot {mine} and {first}); the "
            "emulated link compares one machine's clock: start all ranks on one machine, or use "
            "a real backend"
        )


def _create(backend: Any, options: Any) -> LinkGroup:
    link = options if isinstance(options, Link) else settings_of_world(Link, BACKEND)
    return LinkGroup(backend.store, backend.group_rank, backend.group_size, backend.timeout, link)


register(BACKEND, _create)
