"""`validated` checks a problem's trace, costs and phases; each pass that makes a problem calls it
once."""

from __future__ import annotations

from overlapc.core.errors import InvalidProblem
from overlapc.core.ir import COMPUTE, KINDS, RECOMPUTE, ROLES, Problem, Trace


def validated(problem: Problem) -> Problem:
    """Return the problem; raise InvalidProblem unless its trace is valid and each op has a cost and
    a phase."""
    validate_trace(problem.trace)
    for op in problem.trace.ops:
        problem.phase_of(op)
        if op.name not in problem.profile.costs:
            raise InvalidProblem(f"{op.name} has no cost; expected one for every op")
    return problem


def validate_trace(trace: Trace) -> None:
    """Raise InvalidProblem unless the trace obeys the grammar."""
    for what, count, names in (
        ("ops", len(trace.ops), trace.op),
        ("values", len(trace.values), trace.value),
    ):
        if len(names) != count:
            raise InvalidProblem(f"{count - len(names)} {what} share a name with another")
    known: set[str] = set()
    for name in trace.inputs:
        if name in known or name not in trace.value or trace.value[name].producer:
            raise InvalidProblem(f"input {name} is listed twice, unknown or made by an op")
        known.add(name)
    for name, kind in trace.kinds.items():
        if name not in known or kind not in KINDS:
            raise InvalidProblem(f"{name} of kind {kind}: expected inputs of {', '.join(KINDS)}")
    for op in trace.ops:
        if op.name.startswith(RECOMPUTE):
            raise InvalidProblem(f"op {op.name}: names cannot start with {RECOMPUTE}")
        for name in op.inputs:
            if name not in known:
                raise InvalidProblem(f"{op.name} reads {name} before anything makes it")
        for name in op.outputs:
            if name not in trace.value:
                raise InvalidProblem(f"{op.name} makes {name}, which is no value")
            if name in known or trace.value[name].producer != op.name:
                raise InvalidProblem(f"{name} has more than one producer")
            known.add(name)
        if op.role not in ROLES:
            raise InvalidProblem(f"{op.name} has unknown role {op.role!r}")
        if (op.role == "start") != (op.lane != COMPUTE):
            raise InvalidProblem(f"{op.name} ({op.role}) cannot be on lane {op.lane}")
    for name in (*trace.value, *trace.outputs):
        if name not in known:
            raise InvalidProblem(f"value {name} is never made")
    for op in trace.ops:
        if op.role == "start" and op.name not in trace.wait_of:
            raise InvalidProblem(f"collective {op.name} is started and never waited for")
    _ = trace.ahead  # raises if microbatches are not whole steps apart
    storage_bytes: dict[str, int] = {}
    for value in trace.values:
        if storage_bytes.setdefault(value.storage, value.bytes) != value.bytes:
            raise InvalidProblem(f"{value.name}: two sizes for storage {value.storage}")
