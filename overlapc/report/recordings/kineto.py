"""`read_run` reads a recorded step: time in compute, in hidden and in exposed communication.

A trace is the JSON of one rank that `torch.profiler` exports (Kineto's). On a GPU, the kernels of
NCCL, NVSHMEM and DeepEP are traffic and all others compute. On a CPU, PyTorch's ops are compute and
gloo's reports of its works are traffic; ops that only wait are neither.

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

from overlapc.core.errors import FileError
from overlapc.core.files import StrPath, printable

_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_TRAFFIC = ("nccl", "nvshmem", "ep::internode", "ep::intranode")  # in names of kernels
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_WORKS = ("gloo:", "nccl:", "mpi:")  # prefixes of a backend's report of a work
_WAITS = ("c10d::", "_c10d_functional::", "c10d_functional::", "record_param_comms")
_NO_OPS = (*_WORKS, "autograd::")
_HOST_ONLY = (
    "ran NCCL, but no kernels were recorded: these are the host's times, not the GPU's; record "
    "with CUDA activities"
)
_ENDLESS_US = 1e18  # 30,000 years: no time of a clock
_LATE_US = 20.0  # a kernel that begins so much later than it could waited for the host
STEP = "ProfilerStep#"

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
    correlation: int = -1  # by which a kernel names the host's call that launched it
    sequence: int = -1  # of the node of autograd that an op made, or is
    is_backward: bool = False  # is it run by autograd?

    @property
    def took(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class RecordedExposure:
    """A collective of the run: how long it was exposed, what hid it, and why the rest was not
    hidden."""

    event: Event
    exposed: float
    beside: tuple[tuple[str, float], ...]  # compute that ran beside it, the longest first
    why: str


@dataclass(frozen=True)
class RecordedRun:
    """The times of one rank, in microseconds."""

    name: str
    steps: int
    span: float  # from the first event to the last
    compute: float  # time in which compute ran
    traffic: float  # time in which a collective ran
    both: float
    lanes: tuple[tuple[str, float], ...]  # name, busy time
    collectives: tuple[RecordedExposure, ...]
    stalls: tuple[tuple[float, float, str], ...]  # (from, how long, next event) while neither ran
    longest: tuple[tuple[str, float, int], ...]  # compute: name, time, number
    ops: tuple[Event, ...] = ()  # PyTorch's, as long as their kernels take, in order
    warning: str = ""  # why the times are not what they seem

    @property
    def exposed(self) -> float:
        return self.traffic - self.both


@dataclass(frozen=True)
class Recording:
    """The events of one rank by what they are."""

    name: str
    compute: list[Event]
    traffic: list[Event]
    ops: list[Event]  # PyTorch's outermost, as long as their kernels take
    marked: list[Event]  # ranges that the user or the profiler marked on the host
    called: list[Event]  # all ops of PyTorch's
    launches: list[Event]  # the host's calls that launch kernels
    warning: str = ""  # why the times are not what they seem

    @property
    def steps(self) -> list[Event]:
        """The steps that the profiler marked."""
        return [event for event in self.marked if event.name.startswith(STEP)]


def read_run(path: StrPath) -> RecordedRun:
    """Read a trace file, compressed or not."""
    found = read_recording(path)
    run = _run(found.name, max(1, len(found.steps)), found.compute, found.traffic)
    return replace(run, ops=tuple(found.ops), warning=found.warning)


def read_recording(path: StrPath) -> Recording:
    """Read the events of a trace file, compressed or not."""
    of: dict[str, list[Event]] = {}
    works = []
    for event, category in _events(Path(path)):
        of.setdefault(category, []).append(event)
        if event.name.startswith(_WORKS):
            works.append(event)
    on_gpu = [event for category in _GPU for event in of.get(category, ())]
    called = of.get("cpu_op", [])
    ops = _outermost(called)
    if on_gpu:
        traffic = [event for event in on_gpu if _is_traffic(event)]
        compute = [event for event in on_gpu if not _is_traffic(event)]
        ops = _by_kernels(ops, called, compute)
    else:
        traffic, compute = works, list(ops)
    if not compute:
        raise FileError(
            f"trace {printable(str(path))} has neither kernels nor ops; expected what "
            "torch.profiler exports, recorded with its CPU or CUDA activities"
        )
    marked = [event for event in of.get("user_annotation", ()) if event not in works]
    launches = [event for category in _LAUNCHES for event in of.get(category, ())]
    name = printable(Path(path).name)
    of_nccl = any(event.name.startswith("nccl:") for event in works)
    warning = _HOST_ONLY if of_nccl and not on_gpu else ""
    return Recording(name, compute, traffic, ops, marked, called, launches, warning)


def _is_traffic(event: Event) -> bool:
    name = event.name.lower()
    return any(word in name for word in _TRAFFIC)


def _run(name: str, steps: int, compute: list[Event], traffic: list[Event]) -> RecordedRun:
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
    return RecordedRun(
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
) -> RecordedExposure:
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
    return RecordedExposure(event, exposed, tuple(found), why)


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


def _events(path: Path) -> list[tuple[Event, str]]:
    """Events with their categories."""
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
    found = []
    for each in given:
        if not isinstance(each, dict) or each.get("ph") != "X":
            continue
        event = _event(each, shown)
        if event is None:
            continue
        found.append((event, str(each.get("cat", "")).lower()))
    return found


def _event(each: dict[str, Any], shown: str) -> Event | None:
    start, took, name = each.get("ts"), each.get("dur"), each.get("name")
    if not isinstance(start, (int, float)) or not isinstance(took, (int, float)) or took < 0:
        return None
    for key, time in (("ts", start), ("dur", took)):
        if not abs(time) < _ENDLESS_US:  # NaN is not below it either
            raise FileError(
                f"trace {shown}: {key} of event {printable(str(name))!r} is {time!s:.20}, expected "
                "a number of microseconds, as torch.profiler writes; record again"
            )
    args = each.get("args")
    args = args if isinstance(args, dict) else {}
    stream = args.get("stream")
    lane = f"stream {stream}" if stream is not None else f"thread {each.get('tid')}"
    size, external, correlation = (
        args[key] if isinstance(args.get(key), int) else default
        for key, default in (("In msg nelems", 0), ("External id", -1), ("correlation", -1))
    )
    sequence, forward = args.get("Sequence number"), args.get("Fwd thread id")
    return Event(
        printable(str(name)),
        printable(lane),
        start,
        start + took,
        size,
        external,
        correlation,
        sequence if isinstance(sequence, int) else -1,
        forward not in (None, 0),
    )
