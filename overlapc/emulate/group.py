"""`EmulatedGroup` is a process group written in Python; both emulations derive from it.

c10d calls a Python `ProcessGroup` from three sides: `torch.distributed.*` (Python names),
functional collectives (a C++ trampoline, which looks the same names up) and bookkeeping
(group names). torch 2.13 renamed several operations, so each is here under both names.

Every operation comes down to one call, which a subclass defines:

    _start(call, wire_bytes, *args) -> Work

`call` is the operation's name of torch 2.13 and `args` are its arguments, complete.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from overlapc.core.errors import OptionError
from overlapc.emulate.model import Kind, Link
from overlapc.tools.timing import use_clock, virtual_clock

SPIN_NS = 200_000  # a plain sleep may overshoot by about this; so long before the end a wait spins


def stand_until(end_ns: int, since_ns: int) -> None:
    """Let this thread wait for the end of a transfer, as it does since `since_ns`: asleep, or by
    moving its virtual clock."""
    if (clock := virtual_clock()) is None:
        sleep_until(end_ns)
    else:
        clock.stand(since_ns, end_ns)


def sleep_until(deadline_ns: int) -> None:
    """Sleep until the machine's clock reaches the deadline, leaving the core to others.

    The last stretch yields in a loop, so that the overshoot stays well under `SPIN_NS` on an
    idle core. The GIL is free while sleeping.
    """
    left_ns = deadline_ns - time.perf_counter_ns() - SPIN_NS
    if left_ns > 0:
        time.sleep(left_ns / 1e9)
    while time.perf_counter_ns() < deadline_ns:
        time.sleep(0)


def size_bytes(tensors: torch.Tensor | Iterable[Any]) -> int:
    """Return the bytes in a tensor or in nested lists of tensors."""
    if isinstance(tensors, torch.Tensor):
        return tensors.numel() * tensors.element_size()
    return sum(size_bytes(t) for t in tensors)


class EmulatedWork(dist.Work):
    """One operation in flight, whose `wait` and `is_completed` a subclass defines."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self._result = result

    def is_success(self) -> bool:
        return self.is_completed()

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> Any:
        return self._result

    def get_future(self) -> torch.futures.Future[Any]:
        """For DistributedDataParallel's hooks: a thread waits and then sets the result."""
        if virtual_clock() is not None:
            raise NotImplementedError(
                "a future of an emulated transfer is waited for by a thread of its own, which has "
                'no part in virtual time: call wait(), or measure with clock="machine"'
            )
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


class EmulatedGroup(dist.ProcessGroup):
    """Base of the two emulations. `link` is what transfers cost on this group."""

    backend_name: str

    def __init__(self, rank: int, size: int, link: Link) -> None:
        super().__init__(rank, size)
        self._emulated_rank = rank
        self._emulated_size = size
        self._name = "unnamed"
        self._desc = "undefined"
        self.link = link

    def _start(self, call: str, wire_bytes: float, *args: Any) -> dist.Work:
        raise NotImplementedError

    def duration_ns(self, wire_bytes: float) -> int:
        """How long the link is busy with this transfer."""
        return round(self.link.wire_seconds(wire_bytes) * 1e9) if self.size() > 1 else 0

    # Bookkeeping. The C++ base keeps names in its backends and has none here, so it would raise.

    def rank(self) -> int:
        return self._emulated_rank

    def size(self) -> int:
        return self._emulated_size

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def pg_name(self) -> str:
        return self._name

    @property
    def group_desc(self) -> str:
        return self._desc

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    def name(self) -> str:
        return self.backend_name

    def getBackendName(self) -> str:
        return self.backend_name

    def shutdown(self) -> None:
        if self is dist.group.WORLD:  # `init_link` or `init_fabric` has set the clock
            use_clock("machine")

    def abort(self) -> None:
        self.shutdown()

    def __repr__(self) -> str:
        return f"<{self.backend_name} {self._name}: rank {self.rank()} of {self.size()}>"

    # Operations. Sizes are full sizes, as `Link.wire_bytes` wants them.

    def _wire(self, kind: Kind, tensors: Any) -> float:
        return self.link.wire_bytes(kind, size_bytes(tensors), self.size())

    def allreduce(self, tensors: Any, opts: Any = None) -> dist.Work:
        tensors = _as_list(tensors)
        opts = opts or c10d.AllreduceOptions()
        return self._start("allreduce", self._wire("all_reduce", tensors), tensors, opts)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> dist.Work:
        opts = opts or c10d.AllreduceCoalescedOptions()
        return self._start("allreduce_coalesced", self._wire("all_reduce", tensors), tensors, opts)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        opts = opts or c10d.AllgatherOptions()
        return self._start("allgather", self._wire("all_gather", outputs), outputs, inputs, opts)

    def all_gather_single(self, output: Any, input: Any, opts: Any = None) -> dist.Work:
        opts = opts or c10d.AllgatherOptions()
        wire = self._wire("all_gather", output)
        return self._start("all_gather_single", wire, output, input, opts)

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        opts = opts or c10d.AllgatherOptions()
        wire = self._wire("all_gather", outputs)
        return self._start("all_gather_single_coalesced", wire, outputs, inputs, opts)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        opts = opts or c10d.ReduceScatterOptions()
        wire = self._wire("reduce_scatter", inputs)
        return self._start("reduce_scatter", wire, outputs, inputs, opts)

    def reduce_scatter_single(self, output: Any, input: Any, opts: Any = None) -> dist.Work:
        opts = opts or c10d.ReduceScatterOptions()
        wire = self._wire("reduce_scatter", input)
        return self._start("reduce_scatter_single", wire, output, input, opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Any, inputs: Any, opts: Any = None
    ) -> dist.Work:
        opts = opts or c10d.ReduceScatterOptions()
        wire = self._wire("reduce_scatter", inputs)
        return self._start("reduce_scatter_single_coalesced", wire, outputs, inputs, opts)

    def all_to_all_single(
        self, output: Any, input: Any, output_splits: Any, input_splits: Any, opts: Any = None
    ) -> dist.Work:
        """The wire carries the bytes to, or from, *other* ranks, whichever are more."""
        opts = opts or c10d.AllToAllOptions()
        output_splits, input_splits = (  # which may be numpy's
            [] if splits is None else [int(rows) for rows in splits]
            for splits in (output_splits, input_splits)
        )
        wire = max(
            self._bytes_of_others(output, output_splits), self._bytes_of_others(input, input_splits)
        )
        return self._start(
            "all_to_all_single", wire, output, input, output_splits, input_splits, opts
        )

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        opts = opts or c10d.AllToAllOptions()
        mine = self.rank()
        wire = max(size_bytes(ts) - size_bytes(ts[mine]) for ts in (outputs, inputs))
        return self._start("alltoall", wire, outputs, inputs, opts)

    def broadcast(self, tensors: Any, opts: Any = None) -> dist.Work:
        tensors = _as_list(tensors)
        opts = opts or c10d.BroadcastOptions()
        return self._start("broadcast", self._wire("broadcast", tensors), tensors, opts)

    def reduce(self, tensors: Any, opts: Any = None) -> dist.Work:
        tensors = _as_list(tensors)
        opts = opts or c10d.ReduceOptions()
        return self._start("reduce", self._wire("reduce", tensors), tensors, opts)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        opts = opts or c10d.GatherOptions()
        wire = self.link.wire_bytes("gather", size_bytes(inputs) * self.size(), self.size())
        return self._start("gather", wire, outputs, inputs, opts)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        opts = opts or c10d.ScatterOptions()
        wire = self.link.wire_bytes("scatter", size_bytes(outputs) * self.size(), self.size())
        return self._start("scatter", wire, outputs, inputs, opts)

    def barrier(self, opts: Any = None) -> dist.Work:
        return self._start("barrier", 0.0, opts or c10d.BarrierOptions())

    def send(self, tensors: Any, dst: int, tag: int = 0) -> dist.Work:
        return self._start("send", self._wire("p2p", tensors), tensors, dst, tag)

    def recv(self, tensors: Any, src: int, tag: int = 0) -> dist.Work:
        return self._start("recv", self._wire("p2p", tensors), tensors, src, tag)

    def recv_anysource(self, tensors: Any, tag: int) -> dist.Work:
        raise NotImplementedError(
            f"{self.backend_name} cannot receive from any source: the link is a pair of ranks. "
            "Name the source: dist.recv(tensor, src=...)"
        )

    # Names before torch 2.13, which `torch.distributed` and the trampoline of 2.11/2.12 call.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def _bytes_of_others(self, tensor: torch.Tensor, splits: Sequence[int]) -> float:
        full = size_bytes(tensor)
        if not splits:
            return self.link.wire_bytes("all_to_all", full, self.size())
        return full * (1 - splits[self.rank()] / max(sum(splits), 1))


def _as_list(tensors: Any) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else tensors


def register(name: str, create: Any) -> None:
    """Make `create(backend_options, pg_options)` the backend called `name`, on CPU and CUDA."""
    if name not in dist.Backend.backend_list:
        dist.Backend.register_backend(name, create, extended_api=True, devices=["cpu", "cuda"])


def settings_of_world(kind: type, name: str) -> Any:
    """The settings a new group inherits: those the default group was made with."""
    world = dist.group.WORLD
    inherited = getattr(world, "settings", None)
    if isinstance(inherited, kind):
        return inherited
    raise OptionError(
        f"the backend {name!r} was asked for without its settings, and the default group has "
        f"none to inherit: pass pg_options={kind.__name__}(...), or start with "
        f"overlapc.emulate.{name.replace('overlapc_', 'init_')}(...)"
    )
