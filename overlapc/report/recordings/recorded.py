"""`recorded_step` makes a problem of a recording's annotated ranges: what would this step take?

A range is what `torch.profiler.record_function` marks. Its name says its direction by one of its
words: forward, fwd or a last F; backward, bwd or a last B; weight, wgrad or a last W. If no range
is of a backward, that of each forward range is found by autograd's sequence numbers.

All kernels of a direction are one chain, in the order in which the host launched them: consecutive
kernels of a range are one op, collectives are waited for before the next op of their chain. Weight
gradients depend on the backward range before them, of the same name if there is one; each of their
kernels is an op, so that it may run wherever the GPU would wait.

Times are those of the recording. Where kernels of several streams compute at the same time, or
works of gloo's threads send, each has its share of that time. Sizes are not recorded, so memory
has no limit here, and nothing is recomputed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from overlapc.core.errors import FileError
from overlapc.core.files import StrPath, printable
from overlapc.core.ir import COMPUTE, Cost, Op, Piece, Problem, Profile, Role, Trace, Value
from overlapc.core.valid import validated
from overlapc.report.recordings.kineto import Event, Recording, read_recording, union
from overlapc.report.recordings.marked import Range, Twins, of_last_step

_ROLES: Mapping[str, Role] = {"F": "forward", "I": "input_grad", "W": "weight_grad"}


@dataclass
class _Group:
    """Consecutive kernels of one range on one lane."""

    range: Range
    lane: str  # COMPUTE, or that of its collectives
    begin: float  # of its first kernel
    end: float = 0.0  # of its last
    took: float = 0.0
    name: str = ""


@dataclass(frozen=True)
class RecordedStep:
    """A recorded step as a problem: one microbatch, whose forward and backward follow each other.

    `order` are the ops of `problem` as the host launched them. `ran_ns` is the time from the begin
    of the first kernel of a range to the end of the last.
    """

    problem: Problem
    order: tuple[str, ...]
    ran_ns: int
    idle_ns: int  # in which no kernel of a range ran
    ranges: Mapping[str, int]  # number of ranges by letter
    left_out_ns: int  # compute and traffic of kernels that are in no range


def recorded_step(path: StrPath) -> RecordedStep:
    """Read the last step of a recording of one rank."""
    recording = read_recording(Path(path))
    shown = printable(str(path))
    work = _in_ranges(recording, of_last_step(recording))
    if not {"F", "I"} <= {each.range.letter for each in work}:
        names = sorted({event.name for event in recording.marked})
        raise FileError(
            f"trace {shown} has no ranges of a forward and a backward in which anything was "
            f"launched, but {len(names)} of some names ({', '.join(names[:6])}); expected ranges "
            'of torch.profiler.record_function such as "attention forward" and "attention '
            'backward", or "attn(F)", "attn(B)" and "attn(W)"'
        )
    return _step(recording, work)


@dataclass(frozen=True)
class _Launched:
    """A kernel of a range (on a CPU an op, or a work of a process group)."""

    at: float  # when the host launched it
    range: Range
    event: Event
    lane: str
    begin: float  # when its lane began with it: what waits for it is launched behind

    @property
    def is_traffic(self) -> bool:
        return self.lane != COMPUTE


class _Launches:
    """When and on which thread the host launched events, and on which lanes they ran."""

    def __init__(self, recording: Recording) -> None:
        self.on_gpu = bool(recording.launches)
        self.by_correlation = {event.correlation: event for event in recording.launches}
        self.by_external = {event.external: event for event in recording.called}
        self.traffic = {id(event) for event in recording.traffic}
        self.streams = _of_traffic(recording)
        calls = [event for event in recording.called if event.name.startswith("c10d::")]
        works = [] if self.on_gpu else recording.traffic
        in_order = [sorted(each, key=lambda event: event.start) for each in (works, calls)]
        self.of_work: dict[int, Event] = {}
        if len(works) == len(calls):  # else nobody knows which call began a work
            self.of_work = {id(w): call for w, call in zip(*in_order, strict=True)}

    def of(self, event: Event) -> Event:
        if event.correlation in self.by_correlation:
            return self.by_correlation[event.correlation]
        if event.correlation >= 0 and event.external in self.by_external:
            return self.by_external[event.external]
        return self.of_work.get(id(event), event)

    def lane_of(self, event: Event) -> str:
        """A stream of a GPU, with all that runs on it beside its traffic; or gloo, whose works take
        turns on several threads; else the compute lane."""
        if self.on_gpu and event.lane in self.streams:
            return event.lane
        if id(event) not in self.traffic:
            return COMPUTE
        return event.lane if self.on_gpu else event.name.partition(":")[0]


def _of_traffic(recording: Recording) -> set[str]:
    """The streams that carry more traffic than they compute."""
    more: Counter[str] = Counter()
    for sign, events in ((1, recording.traffic), (-1, recording.compute)):
        for event in events:
            more[event.lane] += round(sign * event.took * 1000)
    return {lane for lane, ns in more.items() if ns > 0}


def _in_ranges(recording: Recording, ranges: Sequence[Range]) -> list[_Launched]:
    """All kernels of ranges, as they were launched. Of several ranges around a launch the shortest
    counts, first of those on the launch's thread: the host waits for the engine's thread while that
    runs a backward."""
    launches = _Launches(recording)
    marks_both = any(each.letter == "I" for each in ranges)
    twins = Twins(recording, () if marks_both else ranges)
    by_start = sorted(ranges, key=lambda each: each.event.start)
    starts = [each.event.start for each in by_start]
    found = []
    for event in (*recording.compute, *recording.traffic):
        launch = launches.of(event)
        around = [
            (each.event.lane != launch.lane, each.event.took, place)
            for place, each in enumerate(by_start[: bisect_right(starts, launch.start)])
            if launch.start <= each.event.end
        ]
        range_ = by_start[min(around)[2]] if around else twins.of(launch)
        if range_ is not None:
            begin = event.start if launches.on_gpu else launch.start
            lane = launches.lane_of(event)
            found.append(_Launched(launch.start, range_, event, lane, begin))
    return sorted(found, key=lambda each: (each.at, each.event.start))


def shares(events: Sequence[Event]) -> list[float]:
    """How long each event ran, if events that run at the same time share that time evenly."""
    points = sorted({point for event in events for point in (event.start, event.end)})
    place = {point: at for at, point in enumerate(points)}
    running = [0] * len(points)
    for event in events:
        for at in range(place[event.start], place[event.end]):
            running[at] += 1
    found = []
    for event in events:
        spans = range(place[event.start], place[event.end])
        found.append(sum((points[at + 1] - points[at]) / running[at] for at in spans))
    return found


def _step(recording: Recording, work: Sequence[_Launched]) -> RecordedStep:
    took: dict[int, float] = {}
    for lane in {each.lane for each in work}:
        ran = [each.event for each in work if each.lane == lane]
        took |= zip(map(id, ran), shares(ran), strict=True)
    groups: list[_Group] = []
    last: dict[str, _Group] = {}  # of each chain: of each weight range, too
    for each in work:
        letter, event = each.range.letter, each.event
        chain = letter if letter != "W" else f"W{each.range.event.start}"
        before = last.get(chain)
        same = before is not None and before.range is each.range and before.lane == each.lane
        if before is None or not same or (letter == "W" and not each.is_traffic):
            before = last[chain] = _Group(each.range, each.lane, each.begin)
            groups.append(before)
        before.end = max(before.end, event.end)
        before.took += took[id(event)]
    problem, order = _Builder().build(groups)
    busy = union((each.event.start, each.event.end) for each in work)
    span = busy[-1][1] - busy[0][0]
    every = sum(event.took for event in (*recording.compute, *recording.traffic))
    ranges = {id(each.range): each.range.letter for each in work}
    return RecordedStep(
        problem,
        order,
        round(span * 1000),
        round((span - sum(end - begin for begin, end in busy)) * 1000),
        Counter(ranges.values()),
        round((every - sum(each.event.took for each in work)) * 1000),
    )


@dataclass
class _Builder:
    """Makes ops of groups: forward first, then backward and weight gradients."""

    ops: list[Op] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    costs: dict[str, Cost] = field(default_factory=dict)
    outputs: list[str] = field(default_factory=list)
    issues: dict[int, tuple[str, ...]] = field(default_factory=dict)  # group -> its ops

    def build(self, groups: Sequence[_Group]) -> tuple[Problem, tuple[str, ...]]:
        for number, group in enumerate(groups):
            group.name = f"{group.range.stem or 'range'}_{group.range.letter}_{number}"
        forward = self.chain((each for each in groups if each.range.letter == "F"), "batch")
        self.backward([each for each in groups if each.range.letter != "F"], forward)
        trace = Trace(
            tuple(self.ops),
            (Value("batch", 0, "batch", ""), *self.values),
            ("batch",),
            tuple(self.outputs),
            {"batch": "batch"},
            {op: group.range.event.name for group in groups for op in self.issues[id(group)]},
        )
        problem = validated(Problem(trace, Profile(self.costs), budget_bytes=0))
        return problem, self.launched(groups)

    def chain(self, groups: Iterable[_Group], given: str) -> str:
        for group in groups:
            given = self.add(group, given)
        return given

    def backward(self, groups: Sequence[_Group], given: str) -> None:
        """Input gradients are one chain; each weight range is one of its own."""
        of_range: dict[str, str] = {}  # stem -> what its last backward range made
        of_weight: dict[int, str] = {}  # range -> what it has made so far
        for group in groups:
            range_ = group.range
            if range_.letter == "I":
                given = of_range[range_.stem] = self.add(group, given)
            else:
                before = of_weight.get(id(range_), of_range.get(range_.stem, given))
                of_weight[id(range_)] = self.add(group, before)
        self.outputs += [given, *of_weight.values()]

    def add(self, group: _Group, given: str) -> str:
        """Add the group's op, or start and wait; return the value it makes."""
        letter, took_ns = group.range.letter, round(group.took * 1000)
        if group.lane == COMPUTE:
            self.costs[group.name] = Cost(took_ns, source="measured")
            names: tuple[str, ...] = (group.name,)
        else:
            self.costs[group.name] = Cost(0, took_ns, source="measured")
            self.costs[f"{group.name}_wait"] = Cost(source="measured")
            names = group.name, f"{group.name}_wait"
        for place, name in enumerate(names):
            role: Role = _ROLES[letter]
            if group.lane != COMPUTE:
                role = "wait" if place else "start"
            lane = group.lane if role == "start" else COMPUTE
            made = f"{name}_made"
            piece = Piece(0, letter, 0)
            once = letter == "F"  # what a forward makes is kept: nothing is recomputed
            op = Op(name, role, lane, piece, (given,), (made,), name, recomputable=not once)
            self.ops.append(op)
            self.values.append(Value(made, 0, made, name))
            given = made
        self.issues[id(group)] = names
        return given

    @property
    def op(self) -> Mapping[str, Op]:
        return {op.name: op for op in self.ops}

    def launched(self, groups: Sequence[_Group]) -> tuple[str, ...]:
        """All ops in the order in which they ran. A collective starts as soon as what it reads was
        there, though its lane may not have been free. A wait comes right before the op that reads
        it."""
        op = {each.name: each for each in self.ops}
        made = {op[name].outputs[0]: group for group in groups for name in self.issues[id(group)]}
        before: dict[str, _Group | None] = {}  # group -> the one that it reads
        for group in groups:
            maker = made.get(op[group.name].inputs[0])
            if maker is not None and op[maker.name].is_forward != op[group.name].is_forward:
                maker = None  # that of an earlier step
            before[group.name] = maker
        at: dict[str, float] = {}
        lanes: dict[str, float] = {}
        for group in sorted(groups, key=lambda group: group.begin):
            at[group.name], maker = group.begin, before[group.name]
            if maker is not None and group.lane != COMPUTE:
                ready = max(maker.end, lanes.get(group.lane, maker.end))
                at[group.name] = min(group.begin, ready)
            lanes[group.lane] = at[group.name]
        order: dict[str, None] = {}
        for group in sorted(groups, key=lambda group: (at[group.name], group.lane == COMPUTE)):
            chain = [group]
            while (maker := before[chain[-1].name]) is not None and maker.name not in order:
                chain.append(maker)
            for each in reversed(chain):
                if (maker := before[each.name]) is not None:
                    order |= dict.fromkeys(self.issues[id(maker)])  # its wait, if it has one
                order[each.name] = None
        return tuple(dict.fromkeys((*order, *op)))
