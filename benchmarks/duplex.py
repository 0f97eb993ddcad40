"""Gloo with two of NCCL's manners, for the shaped link.

*An all-to-all posts its receives before it sends.* Gloo's own takes one of two times, by chance:
4 MB each way at 400 Mbit/s are there after 88 or after 173 ms. A rank's word that it is ready to
receive queues behind what it sends, and then the two directions of the link work in turn.

*Collectives run in the order of their launch*, on one thread, as on a stream. On gloo's two, the
second in flight takes half of the link from the first, which is waited for earlier.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from overlapc.emulate.group import EmulatedGroup, EmulatedWork, register
from overlapc.emulate.link import gloo_call, in_order_gloo
from overlapc.emulate.model import Link

BACKEND = "gloo_duplex"


class DuplexGroup(EmulatedGroup):
    backend_name = BACKEND

    def __init__(self, backend: Any) -> None:
        super().__init__(backend.group_rank, backend.group_size, Link(0.0, 1e12))
        link = os.environ["GLOO_SOCKET_IFNAME"]  # which the lab sets
        device = dist.ProcessGroupGloo.create_device(interface=link)
        place = backend.store, backend.group_rank, backend.group_size, backend.timeout
        self._gloo = in_order_gloo(*place, device)

    def _start(self, call: str, wire_bytes: float, *args: Any) -> dist.Work:
        if call != "all_to_all_single":
            return gloo_call(self._gloo, call, *args)
        output, source, output_splits, input_splits, _ = args
        coming, going = (
            tensor.split(splits or len(tensor) // self.size())
            for tensor, splits in ((output, output_splits), (source, input_splits))
        )
        others = [rank for rank in range(self.size()) if rank != self.rank()]
        works = [self._gloo.recv([coming[r]], r, 0) for r in others if coming[r].numel()]
        works += [self._gloo.send([going[r]], r, 0) for r in others if going[r].numel()]
        coming[self.rank()].copy_(going[self.rank()])
        return _Transfers(works, output)

    def shutdown(self) -> None:
        self._gloo.shutdown()


class _Transfers(EmulatedWork):
    """Several sends and receives, of which gloo lets each be waited for once."""

    def __init__(self, works: list[dist.Work], result: torch.Tensor) -> None:
        super().__init__(result)
        self._works = works

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        while self._works:
            self._works.pop().wait()
        return True

    def is_completed(self) -> bool:
        return not self._works


def init_duplex() -> None:
    """`torch.distributed.init_process_group` over gloo with this all-to-all."""
    register(BACKEND, lambda backend, _: DuplexGroup(backend))
    dist.init_process_group(BACKEND)
