"""`Clock` reads a device's clock between calls: the host's for CPU, the stream's for CUDA."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch

from overlapc.tools.timing import now_ns, virtual_clock

__all__ = ["Clock", "conditions_of", "device_name"]


class Clock:
    """`mark()` is cheap and may be called in the middle of work; `read` turns marks into ns.

    On CUDA a mark is an event on the current stream, so a difference of two marks is time on
    the device, and the host does not wait before `read`.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self.on_device = self.device.type == "cuda"

    def mark(self) -> Any:
        if not self.on_device:
            return now_ns()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def wait(self) -> None:
        """Block until all work handed to the device has ended."""
        if self.on_device:
            torch.cuda.synchronize(self.device)

    def ahead(self, ns: int = 500_000) -> None:
        """Keep the device busy for about so long: the host runs ahead, so that marks and what is
        between them follow each other on the device as fast as it can."""
        if self.on_device:
            torch.cuda._sleep(2 * ns)  # cycles, of about 2 GHz

    def read(self, marks: Sequence[Any]) -> list[int]:
        """Return nanoseconds since the first mark."""
        if not self.on_device or not marks:
            return [mark - marks[0] for mark in marks]
        self.wait()
        return [round(marks[0].elapsed_time(mark) * 1e6) for mark in marks]


@cache
def device_name(device: torch.device) -> str:
    """Return the device's own name: times are comparable only under the same name."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            models = [line.split(":", 1)[1].strip() for line in lines if "model name" in line]
        return f"{models[0]} x{len(models)}"
    except (OSError, IndexError):
        return f"{platform.processor() or platform.machine()} x{os.cpu_count()}"


def conditions_of(device: torch.device) -> Mapping[str, str]:
    """Return the conditions on which a measured time depends, besides the op itself."""
    conditions = {
        "device": device_name(device),
        "torch": torch.__version__,
        "threads": str(torch.get_num_threads()),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "deterministic": str(torch.are_deterministic_algorithms_enabled()),
    }
    return conditions if virtual_clock() is None else {**conditions, "clock": "virtual"}


def section_of(device: torch.device) -> str:
    """Name the section of a cache for figures measured under these conditions."""
    return " ".join(f"{key}={text}" for key, text in conditions_of(device).items())
