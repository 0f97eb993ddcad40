"""`read_run` reads a recorded step: time in compute, in hidden and in exposed communication.

A trace is the JSON of one rank that `torch.profiler` exports (Kineto's). On a GPU, NCCL's kernels
are traffic and all other kernels compute. On a CPU, PyTorch's ops are compute and gloo's reports of
its works are traffic; ops that only wait are neither.

A collective is *exposed* while it runs and no compute runs.
"""

from __future__ import annotations

import gzip
import json
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from overlapc.errors import FileError
from overlapc.files import StrPath, printable

_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_WORKS = ("gloo:", "nccl:", "mpi:")  # prefixes of a backend's report of a work
_WAITS = ("c10d::", "_c10d_functional::", "c10d_functional::", "record_param_comms")
_NO_OPS = (*_WORKS, "autograd::")
_LATE_US = 20.0  # a kernel that begins so much later than it could waited for the host
_STEP = "ProfilerStep#"

Interval = tuple[float, float]


@dataclass(frozen=True)
class Event:
    """An event of a trace, in microseconds."""

    name: str
    lane: str
    start: float
    end: float
    bytes: int = 0
    external: int = -1  # by which a kernel names the op that launched it

    @property
    def took(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class Exposure:
    """A collective of the run: how long it was exposed, what hid it, and why the rest was not
    hidden."""

    event: Event
    exposed: float
    beside: tuple[tuple[str, float], ...]  # compute that ran beside it, the longest first
    why: str


@dataclass(frozen=True)
class Run:
    """The times of one rank, in microseconds."""

    name: str
    steps: int
    span: float  # from the first event to the last
    compute: float  # time in which compute ran
    traffic: float  # time in which a collective ran
    both: float
    lanes: tuple[tuple[str, float], ...]  # name, busy time
    collectives: tuple[Exposure, ...]
    stalls: tuple[tuple[float, float, str], ...]  # (from, how long, next event) while neither ran
    longest: tuple[tuple[str, float, int], ...]  # compute: name, time, number
    ops: tuple[Event, ...] = ()  # PyTorch's, as long as their kernels take, in order

    @property
    def exposed(self) -> float:
        return self.traffic - self.both


def read_run(path: StrPath) -> Run:
    """Read a trace file, compressed or not."""
    events, steps = _events(Path(path))
    on_gpu = [event for event, category in events if category in _GPU]
    called = [event for event, category in events if category == "cpu_op"]
    ops = _outermost(called)
    if on_gpu:
        traffic = [event for event in on_gpu if "nccl" in event.name.lower()]
        compute = [event for event in on_gpu if "nccl" not in event.name.lower()]
        ops = _by_kernels(ops, called, compute)
    else:
        traffic = [event for event, _ in events if event.name.startswith(_WORKS)]
        compute = list(ops)
    if not compute:
        raise FileError(
            f"trace {printable(str(path))} has neither kernels nor ops; expected what "
            "torch.profiler exports, recorded with its CPU or CUDA activities"
        )
    run = _run(printable(Path(path).name), max(1, steps), compute, traffic)
    return replace(run, ops=tuple(ops))


def _run(name: str, steps: int, compute: list[Event], traffic: list[Event]) -> Run:
    compute.sort(key=lambda event: event.start)
    traffic.sort(key=lambda event: event.start)
    busy, sent = (union((e.start, e.end) for e in each) for each in (compute, traffic))
    both = overlap(busy, sent)
    begin = min(each[0][0] for each in (busy, sent) if each)
    end = max(each[-1][1] for each in (busy, sent) if each)
    lanes: dict[str, list[Interval]] = {}
    for event in (*compute, *traffic):
        lanes.setdefault(event.lane, []).append((event.start, event.end))
    by_name: dict[str, list[float]] = {}
    for event in compute:
        by_name.setdefault(event.name, []).append(event.took)
    starts = [event.start for event in compute]
    stalls = []
    for (_, left), (right, _) in zip(merged := union([*busy, *sent]), merged[1:], strict=False):
        following = compute[min(bisect_left(starts, right), len(compute) - 1)]
        stalls.append((left - begin, right - left, following.name))
    longest = sorted(
        ((n, sum(took), len(took)) for n, took in by_name.items()), key=lambda r: -r[1]
    )
    return Run(
        name,
        steps,
        end - begin,
        _size(busy),
        _size(sent),
        both,
        tuple(sorted((lane, _size(union(each))) for lane, each in lanes.items())),
        tuple(_exposure(event, compute, starts, busy) for event in traffic),
        tuple(sorted(stalls, key=lambda stall: -stall[1])),
        tuple(longest),
    )


def _exposure(
    event: Event, compute: Sequence[Event], starts: Sequence[float], busy: Sequence[Interval]
) -> Exposure:
    hidden = overlap([(event.start, event.end)], busy)
    beside: dict[str, float] = {}
    last = bisect_left(starts, event.end)
    for other in compute[max(0, last - 5000) : last]:
        shared = min(other.end, event.end) - max(other.start, event.start)
        if shared > 0:
            beside[other.name] = beside.get(other.name, 0.0) + shared
    exposed = event.took - hidden
    following = compute[last] if last < len(compute) else None
    if exposed <= 0.01 * event.took:
        why = "hidden"
    elif following is None:
        why = "nothing runs behind it"
    elif following.start - event.end > _LATE_US:
        why = f"the host was {following.start - event.end:.0f} us late with {following.name}"
    else:
        why = f"{following.name} waits for it"
    found = sorted(beside.items(), key=lambda item: -item[1])
    return Exposure(event, exposed, tuple(found), why)


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The union of intervals, as sorted intervals that do not touch."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found


def overlap(left: Sequence[Interval], right: Sequence[Interval]) -> float:
    """How long two unions of intervals overlap."""
    total, i, j = 0.0, 0, 0
    while i < len(left) and j < len(right):
        total += max(0.0, min(left[i][1], right[j][1]) - max(left[i][0], right[j][0]))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return total


def _size(intervals: Sequence[Interval]) -> float:
    return sum(end - start for start, end in intervals)


def _outermost(ops: list[Event]) -> list[Event]:
    """Ops that no other op called, without those that only start or wait for traffic. What is no
    op, as autograd's nodes and compiled regions, has no namespace or autograd's."""
    found: list[Event] = []
    until: dict[str, float] = {}
    for event in sorted(ops, key=lambda event: (event.start, -event.end)):
        if event.name.startswith(_NO_OPS) or event.start < until.get(event.lane, -1.0):
            continue
        if "::" not in event.name and event.name not in _WAITS:
            continue
        until[event.lane] = event.end
        if not event.name.startswith(_WAITS):
            found.append(event)
    return found


def _by_kernels(
    ops: Sequence[Event], called: Sequence[Event], kernels: Sequence[Event]
) -> list[Event]:
    """The ops, each as long as the kernels that it and the ops it called have launched."""
    took: dict[int, float] = {}
    for kernel in kernels:
        took[kernel.external] = took.get(kernel.external, 0.0) + kernel.took
    by_lane: dict[str, list[Event]] = {}
    for event in sorted(called, key=lambda event: event.start):
        by_lane.setdefault(event.lane, []).append(event)
    starts = {lane: [event.start for event in each] for lane, each in by_lane.items()}
    found = []
    for op in ops:
        first, last = (bisect_left(starts[op.lane], at) for at in (op.start, op.end))
        ids = {event.external for event in by_lane[op.lane][first:last]} - {-1}
        found.append(replace(op, end=op.start + sum(took.get(each, 0.0) for each in ids)))
    return found


def _events(path: Path) -> tuple[list[tuple[Event, str]], int]:
    """(events with their categories, steps that the profiler marked)."""
    shown = printable(str(path))
    try:
        packed = path.read_bytes()
        text = gzip.decompress(packed) if packed[:2] == b"\x1f\x8b" else packed
        data = json.loads(text)
    except (OSError, ValueError, EOFError) as error:
        raise FileError(f"trace {shown}: {error}; expected JSON of torch.profiler") from error
    given = data.get("traceEvents") if isinstance(data, dict) else data
    if not isinstance(given, list):
        raise FileError(f"trace {shown}: no traceEvents, expected JSON of torch.profiler")
    found, steps = [], 0
    for each in given:
        if not isinstance(each, dict) or each.get("ph") != "X":
            continue
        event = _event(each)
        if event is None:
            continue
        category = str(each.get("cat", "")).lower()
        steps += event.name.startswith(_STEP) and category != "gpu_user_annotation"
        found.append((event, category))
    return found, steps


def _event(each: dict[str, Any]) -> Event | None:
    start, took, name = each.get("ts"), each.get("dur"), each.get("name")
    if not isinstance(start, (int, float)) or not isinstance(took, (int, float)) or took < 0:
        return None
    args = each.get("args")
    args = args if isinstance(args, dict) else {}
    stream = args.get("stream")
    lane = f"stream {stream}" if stream is not None else f"thread {each.get('tid')}"
    moved, external = args.get("In msg nelems"), args.get("External id")
    size = moved if isinstance(moved, int) else 0
    launched = external if isinstance(external, int) else -1
    return Event(printable(str(name)), printable(lane), start, start + took, size, launched)
