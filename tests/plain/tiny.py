"""Problems small enough to compute by hand, written as text.

    problem = tiny('''
        gather  F tp | x     > raw   | 1 + 10       a start: on lane tp, launch 1 ns, 10 ns there
        wait    F    | raw   > whole
        gelu    F    | whole > y     | 3            compute ops and waits: ns on the compute lane
        grad    I    | t whole > dx  | 4
    ''', outputs="y dx")

What no op makes is an input. A name that begins with "wait" is a wait. `v~x` among the outputs
makes v a view of x; storages have 8 bytes unless `sizes` says otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from overlapc.core.check import check
from overlapc.core.ir import (
    COMPUTE,
    Cost,
    Op,
    Piece,
    Plan,
    Problem,
    Profile,
    Role,
    Slowdown,
    Timeline,
    Trace,
    Value,
)
from overlapc.core.valid import validate_trace

_ROLES: dict[str, Role] = {"F": "forward", "I": "input_grad", "W": "weight_grad"}


def tiny(
    text: str,
    outputs: str = "",
    *,
    sizes: Mapping[str, int] | None = None,
    workspace: Mapping[str, int] | None = None,
    slowdown: Slowdown = Slowdown(),  # noqa: B008 (frozen)
    phases: tuple[str, ...] = ("F", "IW"),
    resident_bytes: int = 0,
    in_flight: int = 1,
) -> Problem:
    ops, costs = [], {}
    values: dict[str, Value] = {}

    def value(name: str, producer: str) -> str:
        name, _, base = name.partition("~")
        storage = values[base].storage if base else name
        values[name] = Value(name, (sizes or {}).get(storage, 8), storage, producer)
        return name

    lines = [[part.strip() for part in line.split("|")] for line in text.strip().splitlines()]
    made = {name.partition("~")[0] for line in lines for name in line[1].partition(">")[2].split()}
    inputs = dict.fromkeys(
        name for line in lines for name in line[1].partition(">")[0].split() if name not in made
    )
    for name in inputs:
        value(name, "")
    for head, flow, *took in lines:
        name, letter, *lane = head.split()
        role: Role = "start" if lane else "wait" if name.startswith("wait") else _ROLES[letter]
        reads, _, makes = flow.partition(">")
        results = tuple(value(result, name) for result in makes.split())
        ops.append(
            Op(
                name, role, lane[0] if lane else COMPUTE, Piece(0, letter, 0),
                tuple(reads.split()), results, name,
            )
        )  # fmt: skip
        compute, _, comm = (took[0] if took else "0").partition("+")
        costs[name] = Cost(int(compute), int(comm or 0), (workspace or {}).get(name, 0))
    trace = Trace(tuple(ops), tuple(values.values()), tuple(inputs), tuple(outputs.split()))
    validate_trace(trace)
    return Problem(
        trace,
        Profile(costs, slowdown),
        phases=phases,
        resident_bytes=resident_bytes,
        in_flight=in_flight,
    )


def plan_of(problem: Problem, order: str = "", saved: str = "") -> Plan:
    """A plan that `check` finds legal; without an order the trace's own."""
    issued = tuple(order.split()) or tuple(op.name for op in problem.trace.ops)
    plan = Plan(problem.trace.digest, "by hand", tuple(saved.split()), issued)
    check(problem, plan)
    return plan


def drawn(timeline: Timeline) -> dict[str, str]:
    """Lane -> what it ran, as "gather 0-1, gelu 11-14"; rank 1's compute lane is "compute 1"."""
    lanes: dict[str, list[str]] = {}
    for span in sorted(timeline.spans, key=lambda span: (span.start_ns, span.end_ns)):
        lane = f"{span.lane} {span.rank}" if span.rank else span.lane
        lanes.setdefault(lane, []).append(f"{span.issue} {span.start_ns}-{span.end_ns}")
    return {lane: ", ".join(spans) for lane, spans in lanes.items()}


def recosted(problem: Problem, costs: Iterable[tuple[str, Cost]]) -> Profile:
    """The problem's profile with some costs replaced."""
    return Profile({**problem.profile.costs, **dict(costs)}, problem.profile.slowdown)
