"""`GpuLane` runs modelled collectives on a CUDA device, asynchronously to the host, as NCCL does.

    launch: the lane's stream waits for the current stream, then two things run side by side,
            the *delay* (as long as the link would take) and the *values* (real kernels)
    end:    both are done; whoever waits makes its stream wait for the event

Three kinds of delay bracket what a real collective does to the compute beside it:

    ideal        one warp watches the clock: it takes a multiprocessor from products that would
                 fill all of them (1.07 to 1.3 times as long on an H200), and nothing else
    copy_engine  the wire bytes also go to pinned host memory and come from it, on the copy
                 engines: memory traffic, no multiprocessor. Takes at least as long as the
                 host bus does, which may be slower than the link asked for
    contending   a few thread blocks copy the wire bytes inside the GPU, paced to last exactly
                 as long as the link: memory traffic and multiprocessors, as NCCL's kernels.
                 As theirs, a block is so large that a multiprocessor has room for one. (Beside a
                 product small ones land on one multiprocessor together, and copy slowly.)

Memory is bounded: one scratch buffer for each device, whatever the size of the collectives.
Triton, which CUDA builds of torch ship, compiles the two kernels on first use.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]
from triton.language.extra.cuda import globaltimer  # type: ignore[import-not-found]

_SCRATCH_BYTES = 64 << 20  # larger than a last-level cache, so that the copies reach memory
_STAGE_BYTES = 16 << 20
_WORD_BYTES = 4  # everything here is copied as int32
_PIECE_BYTES = 128 << 10  # what one block copies before it looks at the clock
_WARPS = 32  # of a block: its 32 words a thread, and their addresses, take most of the registers


class GpuLane:
    """Runs the collectives of one group on one device, in order."""

    def __init__(
        self, device: torch.device, mode: str, blocks: int, high_priority: bool = False
    ) -> None:
        self._device = device
        self._mode = mode
        self._blocks = blocks
        priority = -1 if high_priority else 0
        self.stream = torch.cuda.Stream(device, priority)
        # Streams beside the delay: one for the values and for bytes that leave the GPU, one for
        # bytes that enter it.
        self._outbound = torch.cuda.Stream(device, priority)
        self._inbound = torch.cuda.Stream(device, priority)
        # Compile and allocate now, not inside a measurement.
        self.launch(duration_ns=1, wire_bytes=1.0, values=lambda: None)
        self.stream.synchronize()

    def launch(
        self, duration_ns: int, wire_bytes: float, values: Callable[[], None]
    ) -> torch.cuda.Event:
        """Enqueue a transfer after what the current stream holds; returns its end.

        `values` issues the kernels that write the results. The caller keeps every tensor
        involved alive until a stream it may be reused on waits for the end.
        """
        with torch.cuda.device(self._device):
            self.stream.wait_stream(torch.cuda.current_stream(self._device))
            self._outbound.wait_stream(self.stream)  # after all earlier transfers, too
            self._inbound.wait_stream(self.stream)
            with torch.cuda.stream(self._outbound):
                values()
            if duration_ns > 0:
                self._delay(duration_ns, wire_bytes)
            self.stream.wait_stream(self._outbound)
            self.stream.wait_stream(self._inbound)
            return self.stream.record_event()

    def _delay(self, duration_ns: int, wire_bytes: float) -> None:
        if self._mode == "copy_engine":
            self._through_host(wire_bytes)
        with torch.cuda.stream(self.stream):
            if self._mode == "contending":
                self._paced(duration_ns, wire_bytes)
            else:
                _watch_clock[(1,)](duration_ns, num_warps=1)

    def _paced(self, duration_ns: int, wire_bytes: float) -> None:
        source, target = _scratch(self._device)
        _paced_copy[(self._blocks,)](
            source,
            target,
            duration_ns,
            math.ceil(wire_bytes / (_PIECE_BYTES * self._blocks)),
            SLOTS=_SCRATCH_BYTES // _PIECE_BYTES,
            WORDS=_PIECE_BYTES // _WORD_BYTES,
            num_warps=_WARPS,
        )

    def _through_host(self, wire_bytes: float) -> None:
        """Copy in both directions at once, in pieces, so that pinned memory stays small."""
        source, target = _scratch(self._device)
        outbox, inbox = _stage(self._device)
        left = math.ceil(wire_bytes / _WORD_BYTES)
        while left > 0:
            now = min(left, outbox.numel())
            with torch.cuda.stream(self._outbound):
                outbox[:now].copy_(source[:now], non_blocking=True)
            with torch.cuda.stream(self._inbound):
                target[:now].copy_(inbox[:now], non_blocking=True)
            left -= now


@triton.jit(do_not_specialize=["duration_ns"])
def _watch_clock(duration_ns):
    begin = globaltimer()
    now = begin
    while now - begin < duration_ns:
        now = globaltimer()


@triton.jit(do_not_specialize=["duration_ns", "pieces"])
def _paced_copy(source, target, duration_ns, pieces, SLOTS: tl.constexpr, WORDS: tl.constexpr):
    """Copy `pieces` pieces in each block, the i-th no earlier than i/pieces of the duration."""
    block = tl.program_id(0)
    blocks = tl.num_programs(0)
    word = tl.arange(0, WORDS)
    begin = globaltimer()
    now = begin
    for i in range(pieces):
        due = duration_ns.to(tl.int64) * i // pieces
        while now - begin < due:
            now = globaltimer()
        slot = ((i * blocks + block) % SLOTS) * WORDS
        tl.store(target + slot + word, tl.load(source + slot + word))
    while now - begin < duration_ns:
        now = globaltimer()


@lru_cache
def _scratch(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Scratch memory: bytes to copy and a place to copy them to."""
    return (
        torch.zeros(_SCRATCH_BYTES // _WORD_BYTES, dtype=torch.int32, device=device),
        torch.zeros(_SCRATCH_BYTES // _WORD_BYTES, dtype=torch.int32, device=device),
    )


@lru_cache
def _stage(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    return (
        torch.zeros(_STAGE_BYTES // _WORD_BYTES, dtype=torch.int32, pin_memory=True),
        torch.zeros(_STAGE_BYTES // _WORD_BYTES, dtype=torch.int32, pin_memory=True),
    )
