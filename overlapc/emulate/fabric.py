"""The fabric is a process group of N ranks of which only one, this process, exists.

The model believes it is rank r of N: `dist.get_world_size()` says N, shards have a rank's
size, and collectives give what N ranks with the *same* data would compute (`values.py`).
So each rank's compute and memory are real, and only the link is modelled.

On CPU, values are ready at launch and `wait()` sleeps until the link would have delivered.
On a CUDA device nothing blocks the host: collectives run on side streams (`gpu_lane.py`), and
`wait()` makes the current stream wait. Report such results as "emulated fabric, real kernels",
and as a bracket over the three modes of `Fabric`.

A group is one in-order lane; sends have a lane of their own, and receives another. Groups do
not slow each other down.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist

from overlapc.core.errors import OptionError
from overlapc.emulate import values
from overlapc.emulate.group import (
    EmulatedGroup,
    EmulatedWork,
    register,
    settings_of_world,
    stand_until,
)
from overlapc.emulate.model import Link
from overlapc.tools.timing import clock_unless_failed, now_ns, virtual_clock

BACKEND = "overlapc_fabric"

Mode = Literal["ideal", "copy_engine", "contending"]


@dataclass(frozen=True, slots=True)
class Fabric:
    """How a fabric behaves. All but `link` matters on CUDA only; see `gpu_lane.py`."""

    link: Link
    mode: Mode = "ideal"
    blocks: int = 16  # thread blocks that `contending` takes; NCCL takes about 8 to 32
    high_priority: bool = False  # of its streams; NCCL's have it if TORCH_NCCL_HIGH_PRIORITY=1

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise OptionError(f"mode is {self.mode!r}; choose one of {', '.join(get_args(Mode))}")
        if self.blocks < 1:
            raise OptionError(f"blocks is {self.blocks}; a copy kernel has one block or more")


def init_fabric(
    fabric: Fabric | Link, *, world_size: int, rank: int = 0, clock: str = "machine", **init: Any
) -> None:
    """Make this process rank `rank` of `world_size`; nothing waits for the other ranks. `clock` is
    as in `init_link`; in virtual time, collectives' values take no time to compute.

    Every later group (`new_group`, `DeviceMesh`) inherits `fabric`; give one its own with
    `dist.new_group(ranks, backend="overlapc_fabric", pg_options=Fabric(...))`.
    """
    init.setdefault("store", dist.HashStore())
    settings = fabric if isinstance(fabric, Fabric) else Fabric(fabric)
    with clock_unless_failed(clock):
        dist.init_process_group(
            BACKEND, pg_options=settings, world_size=world_size, rank=rank, **init
        )


class FabricGroup(EmulatedGroup):
    """The fabric as `torch.distributed` sees it: N ranks in one process."""

    backend_name = BACKEND

    def __init__(self, rank: int, size: int, settings: Fabric) -> None:
        super().__init__(rank, size, settings.link)
        self.settings = settings
        self._free_ns: dict[str, int] = {}
        self._gpu_lanes: dict[tuple[str, torch.device], Any] = {}
        self._mail = _Mail(rank, size)

    def _start(self, call: str, wire_bytes: float, *args: Any) -> dist.Work:
        tensors = list(_tensors(args))
        device = tensors[0].device if tensors else _default_device()
        duration_ns = self.duration_ns(wire_bytes)
        lane, settle = call, None
        if call in ("send", "recv"):
            settle = self._mail.post(call, *args)
        else:
            lane = "collectives"

        def compute() -> None:
            if settle is None:
                getattr(values, call)(self.rank(), self.size(), *args)

        result = args[0] if tensors else None
        if device.type == "cuda":
            gpu = self._gpu_lane(lane, device)
            end = gpu.launch(duration_ns, wire_bytes, compute)
            return _OnStream(end, gpu.stream, tensors, result, settle)
        launched_ns = now_ns()
        end_ns = max(self._free_ns.get(lane, 0), launched_ns) + duration_ns
        self._free_ns[lane] = end_ns
        compute()
        if (clock := virtual_clock()) is not None:
            clock.stand(launched_ns, launched_ns)
        return _Timed(end_ns, result, settle)

    def _gpu_lane(self, lane: str, device: torch.device) -> Any:
        if (lane, device) not in self._gpu_lanes:
            from overlapc.emulate.gpu_lane import GpuLane  # needs triton

            self._gpu_lanes[lane, device] = GpuLane(
                device, self.settings.mode, self.settings.blocks, self.settings.high_priority
            )
        return self._gpu_lanes[lane, device]


class _Timed(EmulatedWork):
    """A transfer on CPU: its values are ready, and `wait` sleeps until its end."""

    def __init__(self, end_ns: int, result: Any, settle: _Settle | None) -> None:
        super().__init__(result)
        self._end_ns = end_ns
        self._settle = settle

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        stand_until(self._end_ns, now_ns())
        if self._settle:
            self._settle()
        return True

    def is_completed(self) -> bool:
        return now_ns() >= self._end_ns


class _OnStream(EmulatedWork):
    """A transfer on a CUDA device.

    Its tensors stay alive until some stream has waited for the end, as NCCL's do; a transfer
    dropped without a wait tells the allocator which stream may still use them.
    """

    def __init__(
        self,
        end: torch.cuda.Event,
        stream: torch.cuda.Stream,
        tensors: list[torch.Tensor],
        result: Any,
        settle: _Settle | None,
    ) -> None:
        super().__init__(result)
        self._end = end
        self._stream = stream
        self._tensors = tensors
        self._settle = settle

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        torch.cuda.current_stream(self._stream.device).wait_event(self._end)
        self._tensors = []
        if self._settle:
            self._settle()
        return True

    def is_completed(self) -> bool:
        return self._end.query()

    def get_future(self) -> torch.futures.Future[Any]:
        """The future carries the end of the transfer to whichever stream waits for it."""
        future: torch.futures.Future[Any] = torch.futures.Future(devices=[self._stream.device])
        with torch.cuda.stream(self._stream):
            self.wait()
            future.set_result(self._result)
        return future

    def __del__(self) -> None:
        for tensor in self._tensors:
            tensor.record_stream(self._stream)


# Called when a send or a receive has been waited for; moves the data if the other is posted.
_Settle = Callable[[], None]


@dataclass(eq=False)
class _Letter:
    """A send and the receive it belongs to; one of them may still be missing."""

    sent: list[torch.Tensor] | None = None
    received: list[torch.Tensor] | None = None
    settled: bool = False


class _Mail:
    """Matches sends and receives of ranks that all do the same.

    When this rank sends to rank + d, rank - d sends to this one. So a receive from rank - d gets
    the tensors that this rank sends to rank + d, whichever is posted first, as long as neither has
    been waited for. A receive without such a send (in a pipeline, whose ranks differ) gets zeros.
    """

    def __init__(self, rank: int, ranks: int) -> None:
        self._rank = rank
        self._ranks = ranks
        # All letters of a queue lack the same side; the next post of that side takes the oldest.
        self._open: defaultdict[tuple[int, int], deque[_Letter]] = defaultdict(deque)

    def post(self, call: str, tensors: list[torch.Tensor], peer: int, tag: int) -> _Settle:
        side = "sent" if call == "send" else "received"
        away = (peer - self._rank if call == "send" else self._rank - peer) % self._ranks
        queue = self._open[away, tag]
        if queue and getattr(queue[0], side) is None:
            letter = queue.popleft()
        else:
            letter = _Letter()
            queue.append(letter)
        setattr(letter, side, tensors)

        @torch.no_grad()
        def settle() -> None:
            if letter.settled:
                return
            letter.settled = True
            if letter in queue:
                queue.remove(letter)
            for i, target in enumerate(letter.received or []):
                if letter.sent:
                    target.copy_(letter.sent[i])
                else:
                    target.zero_()

        return settle


def _tensors(args: Any) -> Iterator[torch.Tensor]:
    for arg in args:
        if isinstance(arg, torch.Tensor):
            yield arg
        elif isinstance(arg, (list, tuple)):
            yield from _tensors(arg)


def _default_device() -> torch.device:
    """The device of a barrier."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _create(backend: Any, options: Any) -> FabricGroup:
    settings = options if isinstance(options, Fabric) else settings_of_world(Fabric, BACKEND)
    return FabricGroup(backend.group_rank, backend.group_size, settings)


register(BACKEND, _create)
