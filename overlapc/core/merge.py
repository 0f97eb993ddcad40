"""These passes turn the problem of one microbatch into that of several: `accumulate` adds gradients
up, `merge` puts the forward of one beside the backward of another, `in_slices` puts the slices of
one batch beside each other. Their results are valid."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from overlapc.core.ir import COMPUTE, Cost, Op, Plan, Problem, Trace, Value
from overlapc.core.valid import validated

BEFORE = "overlapc.before."  # begins the signature of an op that asks what earlier slices counted
TOTAL = "overlapc.total."  # begins that of an op that asks for the sum over all slices
DRAWN = "_drawn"  # the op `bernoulli` draws `bernoulli_drawn` for all slices
ADD = "_add"  # the op `mm_3_add` adds the gradient `mm_3` to the parameter's
ADDS = "add"  # the signature of such an op


def accumulate(
    problem: Problem, gradients: Collection[str], ns_per_kib: float = 0.0, sums: bool = True
) -> Problem:
    """Return the problem in which an op behind each of these gradients adds it to the sum of the
    microbatches before and frees it, instead of keeping it as a result. `sums`: the budget includes
    those sums."""
    trace = problem.trace
    ops: list[Op] = []
    costs = dict(problem.profile.costs)

    def add(name: str, maker: Op) -> None:
        piece = replace(maker.piece, letter="W")
        ops.append(Op(name + ADD, "weight_grad", COMPUTE, piece, (name,), (), ADDS))
        took = int(trace.value[name].bytes / 1024 * ns_per_kib)
        costs[name + ADD] = Cost(took, source=problem.cost(maker.name).source)

    for op in trace.ops:
        ops.append(op)
        for name in op.outputs:
            if name in gradients:
                add(name, op)
    for name in gradients:
        if not trace.value[name].producer:  # the gradient is an incoming one, unchanged
            add(name, trace.ops[-1])
    outputs = tuple(name for name in trace.outputs if name not in set(gradients))
    summed = replace(trace, ops=tuple(ops), outputs=outputs)
    held = {trace.value[n].storage: trace.value[n].bytes for n in gradients if sums}
    return validated(
        replace(
            problem,
            trace=summed,
            profile=replace(problem.profile, costs=costs),
            resident_bytes=problem.resident_bytes + sum(held.values()),
        )
    )


def merge(problem: Problem, lag: int = 1) -> Problem:
    """Put F of one microbatch beside R, I and W of the microbatch that came `lag` before it. The
    microbatches between the two count as in flight."""
    trace, in_flight = ahead(problem.trace, lag), max(1, problem.in_flight - lag + 1)
    return validated(replace(problem, trace=trace, phases=("FIW",), in_flight=in_flight))


def ahead(trace: Trace, steps: int) -> Trace:
    """Return the trace with its forward ops moved to the microbatch that comes so many steps
    later."""
    count = steps * len({op.piece.microbatch for op in trace.ops if op.is_forward})

    def later(op: Op) -> Op:
        return replace(op, piece=replace(op.piece, microbatch=op.piece.microbatch + count))

    return replace(trace, ops=tuple(later(op) if op.is_forward else op for op in trace.ops))


def added_by(op: Op) -> str:
    """The gradient that this op adds to the parameter's; "" of other ops."""
    return op.name.removesuffix(ADD) if op.signature == ADDS else ""


def at(name: str, k: int) -> str:
    """Name an op or a value of slice k: `mm@1`; `R:mm@1` is its recompute."""
    return f"{name}@{k}"


def with_bytes(trace: Trace, each: Sequence[Mapping[str, int]]) -> Trace:
    """Return the trace with the bytes of storages as they are in the one graph, or in each slice;
    the last is as all that follow. What is not in `each` stays."""

    def of(value: Value) -> Value:
        name, _, k = value.storage.partition("@")
        return replace(value, bytes=each[min(int(k or 0), len(each) - 1)].get(name, value.bytes))

    return replace(trace, values=tuple(map(of, trace.values)))


def in_slices(
    problem: Problem,
    count: int,
    loss: bool = True,
    draws: Collection[str] = (),
    apart: bool = False,
) -> Problem:
    """Put `count` slices of one batch beside each other, each a copy of `problem`, the problem of
    one slice. Slices share parameters and buffers and, if the trace ends in the `loss`, the
    incoming gradient; otherwise each slice has its own. Each slice adds its gradients up after the
    slices before it, and asks those what they counted; a total reads all slices. The first slice
    draws the random numbers of `draws` for all; no other op may draw any, so that random ones need
    no order. Their states are kept all the same. Copies that are `apart` are microbatches: they
    add gradients up in the same way, but ask nothing of each other."""
    trace = problem.trace
    shared = {*trace.of_kind("parameter", "buffer"), *(trace.of_kind("gradient") if loss else ())}
    values = [value for value in trace.values if value.name in shared]
    halves: tuple[list[Op], list[Op]] = [], []
    costs: dict[str, Cost] = {}

    def name_of(name: str, k: int) -> str:
        return name if name in shared else at(name, k)

    def names_of(names: Iterable[str]) -> dict[str, None]:
        return dict.fromkeys(name_of(name, k) for k in range(count) for name in names)

    for k in range(count):
        values += _own_values(trace, k, shared)
        for op in trace.ops:
            name = at(op.name, k)
            given = tuple(name_of(value, k) for value in op.inputs)
            made = tuple(at(value, k) for value in op.outputs)
            if op.signature.startswith(BEFORE) and k and not apart:
                given = at(op.inputs[0], k - 1), at(op.outputs[0], k - 1)
            if op.signature.startswith(TOTAL) and not apart:
                given = tuple(names_of(op.inputs[:1]))
            if added_by(op) and not made:
                made = (name,)  # a value without bytes, which says that the gradient has been added
                values.append(Value(name, 0, name, name))
                given += (at(op.name, k - 1),) if k else ()
            cost = problem.cost(op.name)
            drawn = at(op.name + DRAWN, 0)
            if op.name in draws and k:
                given += (drawn,)
            elif op.name in draws:
                made += (drawn,)
                whole_bytes = count * trace.value[op.outputs[-1]].bytes
                values.append(Value(drawn, whole_bytes, drawn, name))
                cost = replace(cost, compute_ns=(1 + count) * cost.compute_ns)
            first, seeded = op.name in draws and not k, op.has_state and op.name not in draws
            copy = replace(op, name=name, inputs=given, outputs=made, random=first, seeded=seeded)
            halves[not op.is_forward].append(replace(copy, piece=replace(op.piece, microbatch=k)))
            costs[name] = cost
    if any(op.signature.startswith(TOTAL) for op in trace.ops) and not apart:
        _interleave(halves, trace)
    kinds = {name_of(n, k): kind for k in range(count) for n, kind in trace.kinds.items()}
    modules = {at(name, k): path for k in range(count) for name, path in trace.modules.items()}
    inputs, outputs = tuple(names_of(trace.inputs)), tuple(names_of(trace.outputs))
    beside = Trace((*halves[0], *halves[1]), tuple(values), inputs, outputs, kinds, modules)
    return validated(replace(problem, trace=beside, profile=replace(problem.profile, costs=costs)))


def in_pairs(problem: Problem) -> tuple[Problem, Problem]:
    """Return the problems of a step in pairs: its ends, two forwards at the start and two backwards
    at the end, which have no other microbatch to merge with; and its middle, where each forward is
    merged with the backward of the microbatch two before. `problem` is that of one microbatch; it
    draws no random numbers that matter."""
    return in_slices(problem, 2, apart=True), merge(held_in_pairs(problem), lag=2)


def held_in_pairs(problem: Problem) -> Problem:
    """The problem of one microbatch while another is held."""
    return replace(problem, in_flight=2 * problem.in_flight)


def _own_values(trace: Trace, k: int, shared: Collection[str]) -> Iterator[Value]:
    """The values of a slice but for those that slices share. A view of these shares their bytes."""
    roots = {trace.value[name].storage for name in shared}
    for value in trace.values:
        if value.name not in shared:
            storage = value.storage if value.storage in roots else at(value.storage, k)
            producer = value.producer and at(value.producer, k)
            yield Value(at(value.name, k), value.bytes, storage, producer)


def _interleave(halves: Iterable[list[Op]], trace: Trace) -> None:
    """Put each op of all slices beside each other: a total reads all."""
    place = {op.name: i for i, op in enumerate(trace.ops)}
    for half in halves:
        half.sort(key=lambda op: (place[op.name.rpartition("@")[0]], op.piece.microbatch))


def of_slice(plan: Plan, k: int, digest: str) -> Plan:
    """Return the part of a plan of slices that runs slice k, as a plan of one slice's trace."""
    end = at("", k)

    def mine(names: Iterable[str]) -> tuple[str, ...]:
        return tuple(name.removesuffix(end) for name in names if name.endswith(end))

    return Plan(digest, plan.solver, mine(plan.saved), mine(plan.order))


def one_by_one(problem: Problem, plan: Plan) -> Plan:
    """Plan slices one after the other, each by the `plan` of one slice: all forwards, then all
    backwards, the first slice first, each as far as it comes until it reads a total. `problem` is
    the problem of all slices."""
    count = 1 + max(op.piece.microbatch for op in problem.trace.ops)
    border = sum(op.is_forward for op in problem.trace.ops) // count
    halves = plan.order[:border], plan.order[border:]
    ops = problem.trace.ops
    totals = {op.name for op in ops if op.signature.startswith(TOTAL) and len(op.inputs) > 1}
    parts: list[list[str]] = []
    for half in halves:
        parts.append([])
        for text in half:
            if at(text, 0) in totals:
                parts.append([])
            parts[-1].append(text)
    order = tuple(at(text, k) for part in parts for k in range(count) for text in part)
    saved = tuple(at(name, k) for k in range(count) for name in plan.saved)
    return replace(plan, digest=problem.trace.digest, saved=saved, order=order, bound_ns=0)
