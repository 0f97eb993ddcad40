"""The core types: what a solver takes (a Problem) and returns (a Plan). Torch-free, frozen.

Grammar (names are those of the FX nodes):

    trace    = value* op* kind*               ops in topological order
    value    = name bytes storage producer    values that alias share one storage
    kind     = parameter | buffer | batch | gradient      of an input
    op       = name role lane piece inputs -> outputs
    role     = forward | input_grad | weight_grad | start | wait
    piece    = stage letter microbatch        "0F0": letter is F, I or W (R appears in plans)
    plan     = saved values, issue order      "name" issues an op, "R:name" recomputes one
    problem  = trace + nanoseconds and bytes + budget + phases

How work runs: a rank has one *compute* lane and one lane per process group. Ops are issued in
the plan's order. A `start` costs its launch on the compute lane and then occupies its
group's lane; a `wait` blocks the compute lane until the matching start has finished. Whatever
is issued between the two is hidden under the collective.

How memory runs: it follows the issue order, as allocators do. A storage lives from the op that
makes it to the last op that reads any value on it. Between the *phases* of a problem (the
forward graph, then the backward graph) only saved values, inputs and outputs survive.

How microbatches run: a trace is one *step*, which runs again and again, each time on the next
microbatches. R has the microbatch of the backward that reads it. An op that reads a value of
another microbatch than its own reads what an earlier step saved: that value is in memory when the
step begins. Values saved of a microbatch whose backward is not in the trace are in memory when the
step ends.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from string import digits
from typing import Literal

from overlapc.core.errors import InvalidProblem
from overlapc.core.record import Record

Role = Literal["forward", "input_grad", "weight_grad", "start", "wait"]
ROLES: tuple[Role, ...] = ("forward", "input_grad", "weight_grad", "start", "wait")
Kind = Literal["parameter", "buffer", "batch", "gradient"]
KINDS: tuple[Kind, ...] = ("parameter", "buffer", "batch", "gradient")
COMPUTE = "compute"
RECOMPUTE = "R:"


@dataclass(frozen=True, slots=True, order=True)
class Piece:
    """One part of the work of one stage on one microbatch; prints as `2F0`."""

    stage: int
    letter: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.letter}{self.microbatch}"


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor (or symbolic number) of the graph.

    `bytes` is the size of the whole `storage`, so every value on one storage carries the same
    number. `producer` is the op that makes it, or "" for an input of the graph. A storage that
    belongs to an input is resident: it costs nothing to keep.
    """

    name: str
    bytes: int
    storage: str
    producer: str


@dataclass(frozen=True, slots=True)
class Op:
    """One call of the graph.

    `lane` is COMPUTE, or the process group a `start` communicates on. A `wait` reads the start's
    output, and also the start's inputs when the collective needs them until it ends. `signature`
    names the function and its shapes: ops of equal signature cost the same. `random` ops draw
    random numbers, in the trace's order. `seeded` ops need no order, as slices' attention that
    drops nothing. If a random or seeded op runs again, the generator's state is kept for it.
    `recomputable` is false for ops that may run only once (mutation, host synchronisation).
    """

    name: str
    role: Role
    lane: str
    piece: Piece
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    signature: str
    random: bool = False
    recomputable: bool = True
    seeded: bool = field(default=False, repr=False)  # not in digests: it makes no plan illegal

    @property
    def has_state(self) -> bool:
        """Is the generator's state kept for this op, if it runs again?"""
        return self.random or self.seeded

    @property
    def is_forward(self) -> bool:
        return self.piece.letter == "F"

    @property
    def group(self) -> str:
        """The process group of a start."""
        return self.lane


@dataclass(frozen=True)
class Trace(Record):
    """Ops in topological order and the values between them.

    `inputs` are resident values; `outputs` are values that outlive the trace (results and
    gradients). `modules` maps ops to the module of the model that they belong to, where known;
    traces that differ only in it are equal. `kinds` maps inputs to their kind; a captured trace has
    all of them. A `parameter` (which gets a gradient) and a `buffer` (a frozen parameter or a
    constant, which gets none) last from step to step. A `batch` and an incoming `gradient` belong
    to one microbatch.
    """

    ops: tuple[Op, ...]
    values: tuple[Value, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    kinds: Mapping[str, Kind] = field(default_factory=dict, hash=False)
    modules: Mapping[str, str] = field(default_factory=dict, compare=False)

    def of_kind(self, *kinds: Kind) -> tuple[str, ...]:
        """Return the inputs of one of these kinds, in order."""
        return tuple(name for name in self.inputs if self.kinds.get(name) in kinds)

    @cached_property
    def op(self) -> Mapping[str, Op]:
        return {op.name: op for op in self.ops}

    @cached_property
    def value(self) -> Mapping[str, Value]:
        return {value.name: value for value in self.values}

    @cached_property
    def users(self) -> Mapping[str, tuple[Op, ...]]:
        """Value name -> the ops that read it, in order."""
        users: dict[str, list[Op]] = {value.name: [] for value in self.values}
        for op in self.ops:
            for name in dict.fromkeys(op.inputs):
                users[name].append(op)
        return {name: tuple(ops) for name, ops in users.items()}

    @cached_property
    def resident(self) -> frozenset[str]:
        """Storages that belong to inputs."""
        return frozenset(self.value[name].storage for name in self.inputs)

    @cached_property
    def start_of(self) -> Mapping[str, str]:
        """Wait op -> its start op."""
        found: dict[str, str] = {}
        for op in self.ops:
            if op.role == "wait":
                starts = [
                    producer
                    for name in op.inputs
                    if (producer := self.value[name].producer) and self.op[producer].role == "start"
                ]
                if len(starts) != 1:
                    raise InvalidProblem(
                        f"wait {op.name} reads {len(starts)} started collectives, expected one"
                    )
                found[op.name] = starts[0]
        return found

    @cached_property
    def wait_of(self) -> Mapping[str, str]:
        """Start op -> its (first) wait op."""
        found: dict[str, str] = {}
        for wait, start in self.start_of.items():
            found.setdefault(start, wait)
        return found

    @cached_property
    def numbered(self) -> Numbered:
        return Numbered.of(self)

    @cached_property
    def ahead(self) -> Mapping[int, int]:
        """Microbatch whose backward a later step runs -> the earlier microbatch whose backward this
        step runs in its place."""
        begun = {op.piece.microbatch for op in self.ops if op.is_forward}
        ended = {op.piece.microbatch for op in self.ops if not op.is_forward}
        if begun <= ended or ended <= begun:
            return {}
        for steps in range(1, max(begun) + 1):
            found = {late: late - steps * len(begun) for late in begun - ended}
            if not (ended - begun).isdisjoint(found.values()):
                return found
        raise InvalidProblem(
            f"microbatches {sorted(ended)} are not whole steps behind {sorted(begun)}"
        )

    @cached_property
    def lag(self) -> int:
        """How many steps ago the forward ran that this step's backward reads; 0 if in this step."""
        begun = {op.piece.microbatch for op in self.ops if op.is_forward}
        return next((late - early for late, early in self.ahead.items()), 0) // max(1, len(begun))

    def microbatch(self, op: Op, recomputed: bool = False) -> int:
        """The microbatch of an issue; recompute has the microbatch whose backward runs in this
        step."""
        mine = op.piece.microbatch
        return self.ahead.get(mine, mine) if recomputed else mine

    @cached_property
    def lanes(self) -> tuple[str, ...]:
        """Communication lanes, in order of first use."""
        return tuple(dict.fromkeys(op.lane for op in self.ops if op.role == "start"))

    @cached_property
    def groups(self) -> tuple[str, ...]:
        """Process groups, in order of first use."""
        return tuple(dict.fromkeys(op.group for op in self.ops if op.role == "start"))

    @cached_property
    def digest(self) -> str:
        """Identifies the trace: it changes whenever structure, shapes or order do."""
        return _digest(self)


@dataclass(frozen=True)
class Numbered:
    """A trace with numbers in place of names, for code that goes through it often. It has only the
    values whose memory the trace allocates: made by an op, and not on an input's storage."""

    op: Mapping[str, tuple[int, bool]]  # issue -> its op, whether it is recompute
    sync: Mapping[str, tuple[str, str, str]]  # start or wait -> op, lane, start; issues
    value: Mapping[str, int]
    forward: Sequence[bool]  # by op
    ahead: Sequence[bool]  # by op: a later step runs its backward
    reads: Sequence[tuple[int, ...]]
    makes: Sequence[tuple[int, ...]]
    producer: Sequence[int]  # by value: the op that makes it
    storage: Sequence[int]
    bytes: Sequence[int]

    @staticmethod
    def of(trace: Trace) -> Numbered:
        op = {}
        for i, each in enumerate(trace.ops):
            op[each.name] = i, False
            op[issue(each.name, True)] = i, True
        mine = [v for v in trace.values if v.producer and v.storage not in trace.resident]
        value = {v.name: i for i, v in enumerate(mine)}
        storages = {v.storage: i for i, v in enumerate(mine)}

        def numbers(names: Iterable[str]) -> tuple[int, ...]:
            return tuple(value[name] for name in names if name in value)

        sync = {
            issue(each.name, again): (each.name, each.lane, issue(start, again))
            for each in trace.ops
            if each.role in ("start", "wait")
            for start in (trace.start_of.get(each.name, each.name),)
            for again in (False, True)
        }
        return Numbered(
            op,
            sync,
            value,
            [each.is_forward for each in trace.ops],
            [each.piece.microbatch in trace.ahead for each in trace.ops],
            [numbers(each.inputs) for each in trace.ops],
            [numbers(each.outputs) for each in trace.ops],
            [op[v.producer][0] for v in mine],
            [storages[v.storage] for v in mine],
            [v.bytes for v in mine],
        )


@dataclass(frozen=True, slots=True)
class Cost:
    """What one op takes: compute-lane time, communication-lane time, transient bytes.

    For a start `compute_ns` is the launch and `comm_ns` the collective alone on its lane.
    """

    compute_ns: int = 0
    comm_ns: int = 0
    workspace_bytes: int = 0
    source: str = "default"  # measured | estimated | default


@dataclass(frozen=True, slots=True)
class Slowdown:
    """Work takes so many thousandths of its time while the other kind of work runs beside it."""

    compute_permille: int = 1000
    comm_permille: int = 1000


@dataclass(frozen=True)
class Profile:
    """Costs by op name. `conditions` says where and how they were measured or estimated."""

    costs: Mapping[str, Cost]
    slowdown: Slowdown = Slowdown()
    conditions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Problem(Record):
    """A trace with its costs, its limits and the phases it is run in.

    phases      sets of piece letters run one after the other. A lone graph under autograd has
                ("F", "IW"): all of the forward, then all of the backward, where recomputed
                ops belong to the backward. One phase means no such border: *merged* pieces, such
                as F of microbatch 1 with R, I and W of microbatch 0, have one
    in_flight   how many microbatches hold their saved values at the worst moment, beside those
                between a forward and the backward it is merged with; a fraction where the trace
                stands for more or fewer blocks than its own
    resident_bytes  counted into the peak on top of what the trace allocates
    """

    trace: Trace
    profile: Profile
    budget_bytes: int | None = None
    resident_bytes: int = 0
    in_flight: int | Fraction = 1
    phases: tuple[str, ...] = ("F", "IW")

    def __post_init__(self) -> None:
        if len(self.phases) != 1 and self.trace.ahead:
            raise InvalidProblem(
                f"a forward that is ahead of the backward, in phases {', '.join(self.phases)}; "
                "expected both in one phase"
            )
        if self.in_flight <= 0:
            raise InvalidProblem(f"{self.in_flight} microbatches in flight: expected some")

    @property
    def copies(self) -> int | Fraction:
        """Extra copies of the saved set: one per microbatch in flight beyond the traced one."""
        return self.in_flight - 1 + max(0, self.trace.lag - 1)

    def phase_of(self, op: Op, recomputed: bool = False) -> int:
        letter = "I" if recomputed else op.piece.letter
        for index, letters in enumerate(self.phases):
            if letter in letters:
                return index
        raise InvalidProblem(f"{op.name}: no phase holds piece {op.piece}")

    def cost(self, op: str) -> Cost:
        return self.profile.costs[op]

    @cached_property
    def costs(self) -> Sequence[Cost]:
        """The costs of the trace's ops, in their order."""
        return [self.profile.costs[op.name] for op in self.trace.ops]

    @cached_property
    def compute_ns(self) -> Mapping[str, int]:
        """Issue -> its time on the compute lane."""
        costs = self.costs
        return {text: costs[op].compute_ns for text, (op, _) in self.trace.numbered.op.items()}


@dataclass(frozen=True)
class Plan(Record):
    """A solver's answer: which values are saved, and in which order ops are issued.

    status is `optimal`, `feasible` or `baseline`; `bound_ns` a proven lower bound on the step time
    of any legal plan (0 when none is known). `found_by` names the part of the solver that chose the
    saved values, the part that ordered the issues, and how many plans were judged; it is empty
    where the solver's name says it all. `found_by` does not count when plans are compared.
    """

    digest: str
    solver: str
    saved: tuple[str, ...]
    order: tuple[str, ...]
    status: str = "feasible"
    bound_ns: int = 0
    found_by: str = field(default="", compare=False)

    @cached_property
    def recomputed(self) -> tuple[str, ...]:
        return tuple(name[len(RECOMPUTE) :] for name in self.order if name.startswith(RECOMPUTE))


@dataclass(frozen=True, slots=True)
class Span:
    """An interval of a lane of `rank`. `issue` is the plan's word for it ("R:gelu")."""

    lane: str
    issue: str
    start_ns: int
    end_ns: int
    rank: int = 0

    @property
    def is_recompute(self) -> bool:
        return self.issue.startswith(RECOMPUTE)


@dataclass(frozen=True, slots=True)
class Exposure:
    """One collective: how long it ran, and how long compute waited for it.

    `hidden_by` are the issues that ran on the compute lane while it was in flight.
    """

    issue: str
    lane: str
    comm_ns: int
    exposed_ns: int
    hidden_by: tuple[str, ...]


@dataclass(frozen=True)
class Timeline:
    """What a plan does and takes, as predicted by `simulate`."""

    spans: tuple[Span, ...]
    step_ns: int
    phase_ns: tuple[int, ...]
    exposures: tuple[Exposure, ...]
    memory: tuple[int, ...]  # bytes alive while the n-th issue runs
    peak_bytes: int
    recompute_ns: int

    @property
    def exposed_ns(self) -> int:
        return sum(e.exposed_ns for e in self.exposures)

    @property
    def comm_ns(self) -> int:
        return sum(e.comm_ns for e in self.exposures)


def issue(op: str, recomputed: bool = False) -> str:
    """Write an issue of a plan: `gelu`, or `R:gelu` for its recompute."""
    return RECOMPUTE + op if recomputed else op


def parse_issue(text: str) -> tuple[str, bool]:
    """Split an issue: `R:gelu` -> ("gelu", True)."""
    if text.startswith(RECOMPUTE):
        return text[len(RECOMPUTE) :], True
    return text, False


def issues(order: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """Split each issue of an order."""
    return (parse_issue(text) for text in order)


def _digest(trace: Trace) -> str:
    """Compute a text that changes whenever the trace's structure, shapes or order change.

    Ranks that do the same work have the same digest. So process groups count by their order of
    first use: they have other names on other ranks. An op's inputs are sorted by name, since a
    rank may pass its own part of a tensor at another position. Inputs that nothing reads do not
    count: some ranks may lack them. A forward counts the same whether or not it runs ahead of
    its backward: a plan saves the same values for both.
    """
    groups = {name: str(i) for i, name in enumerate(trace.groups)}
    named = _as_if_alone(trace)
    h = hashlib.sha256()
    for op in trace.ops:
        lane = groups.get(op.group, op.group)
        inputs = tuple(sorted(named.get(name, name) for name in op.inputs))
        piece = replace(op.piece, microbatch=trace.microbatch(op, recomputed=True))
        h.update(ascii(replace(op, lane=lane, piece=piece, inputs=inputs)).encode())
    for value in trace.values:
        if value.producer or value.name in named:
            names = (named.get(name, name) for name in (value.name, value.storage))
            h.update(ascii((*names, value.producer)).encode())
    outputs = tuple(named.get(name, name) for name in trace.outputs)
    h.update(ascii((tuple(named.values()), outputs)).encode())
    return h.hexdigest()[:16]


def _as_if_alone(trace: Trace) -> dict[str, str]:
    """Rename the inputs that are read as if the unread ones did not exist: `x_3` becomes `x_2` if
    nothing reads `x_1`."""
    read = {*trace.outputs, *(name for name, users in trace.users.items() if users)}
    free: dict[str, list[str]] = {}
    for name in reversed(trace.inputs):
        free.setdefault(name.rstrip(digits), []).append(name)
    return {name: free[name.rstrip(digits)].pop() for name in trace.inputs if name in read}
