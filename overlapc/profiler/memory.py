"""`measure_peak` measures the most memory that one call of a function holds at a time;
`available_bytes` says how much there is.

The peak is counted in bytes above the level at the call. On a GPU the caching allocator keeps
that count. On a CPU it is rebuilt from the allocator's own events, which PyTorch's profiler
records with their addresses.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

__all__ = ["available_bytes", "measure_peak"]


def measure_peak(fn: Callable[[], object], device: torch.device | str = "cpu") -> int:
    """Call `fn` once and return the most bytes held at one time on `device`, above the start.

    Whatever `fn` allocates counts, its results and gradients too, until it is freed. To compare
    two functions, start both from the same state (for a training step: `zero_grad()` first).

    On a CPU, memory that existed before the call never counts, even when `fn` frees it. The calling
    thread is recorded, and threads that inherit its state from PyTorch. Memory that another thread
    frees (as gloo's sometimes does when it drops a buffer last) counts until its address is used
    again. So the figure can be too high by a few buffers, never too low: the least of several calls
    is the best. Recording slows `fn` down: do not time the same call. On CUDA the peak covers every
    stream, and freeing older memory lowers it.
    """
    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        fn()
        torch.cuda.synchronize(device)
        return max(0, torch.cuda.max_memory_allocated(device) - before)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profiler:
        fn()
    recorded: Any = profiler.profiler.kineto_results  # type: ignore[union-attr]
    return peak_of(_cpu_allocations(recorded.experimental_event_tree()))


def available_bytes(device: torch.device) -> int:
    """Return how many bytes a process may still allocate on the device, as far as is known."""
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0] + kept)
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            (line,) = (line for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError):
        return sys.maxsize
    return int(line.split()[1]) * 1024


def peak_of(changes: Iterable[tuple[int, int, int]]) -> int:
    """Return the highest level that (time, address, bytes) changes reach, where a free is negative.

    Frees of unknown addresses are ignored: that memory is older than the recording. An allocation
    at an address that counts as live means that its free was not recorded: the older one ends
    there.
    """
    live: dict[int, int] = {}
    addresses: list[int] = []  # of `live`, in order
    level = peak = 0
    for _, address, size in sorted(changes, key=lambda change: change[0]):
        low = bisect_left(addresses, address)
        if size > 0 and low and addresses[low - 1] + live[addresses[low - 1]] > address:
            low -= 1
        high = bisect_left(addresses, address + max(size, 1))
        for ended in addresses[low:high]:
            level -= live.pop(ended)
        addresses[low:high] = [address] if size > 0 else []
        if size > 0:
            live[address] = size
            level += size
            peak = max(peak, level)
    return peak


def _cpu_allocations(events: Iterable[Any]) -> Iterator[tuple[int, int, int]]:
    stack = list(events)
    while stack:
        event = stack.pop()
        stack.extend(event.children)
        if event.tag == torch._C._profiler._EventType.Allocation:
            change = event.extra_fields
            if change.device.type == "cpu":
                yield event.start_time_ns, change.ptr, change.alloc_size
