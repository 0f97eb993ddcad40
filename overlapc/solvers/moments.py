"""Moments that every plan passes through, and what is certainly in memory then.

A moment is one backward op running. Whatever the order: what its ancestors made and its
descendants read is alive, as is what the op itself touches. Of the forward's values those that
descendants read are alive too if they were saved, or recomputed for the op's sake.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from overlapc.ir import Problem


@dataclass(frozen=True)
class Moment:
    """`there` are bytes alive in any plan, beside what lasts through the whole backward.
    `touched` storages are counted in it. `later`: storages of the forward still to be read, and
    `later_values`: the values still to be read, themselves or by way of a view."""

    op: int
    there: int
    touched: frozenset[str]
    later: frozenset[str]
    later_values: frozenset[str]


def moments(problem: Problem, lasting: frozenset[str], at_most: int) -> list[Moment]:
    """The heaviest moment of each of about `at_most` stretches of the backward.

    `lasting` storages are alive throughout and counted elsewhere.
    """
    trace = problem.trace
    ops = trace.ops
    index = {op.name: i for i, op in enumerate(ops)}
    backward = [i for i, op in enumerate(ops) if not op.is_forward]
    place = {i: n for n, i in enumerate(backward)}
    size = {value.storage: value.bytes for value in trace.values}
    forward = {trace.value[name].storage for op in ops if op.is_forward for name in op.outputs}
    outputs = {trace.value[name].storage for name in trace.outputs}

    before = [0] * len(backward)  # ancestors, as bits
    made_at: dict[str, int] = {}  # storage of the backward -> its maker
    read_at: dict[str, list[int]] = {}  # storage -> backward ops that read it
    value_at: dict[str, list[int]] = {}  # value of the forward -> the same
    seen_as: dict[str, str] = {}  # view that the backward makes -> value of the forward
    for n, i in enumerate(backward):
        bits = 0
        for name in ops[i].inputs:
            value = trace.value[name]
            read_at.setdefault(value.storage, []).append(n)
            value_at.setdefault(seen_as.get(name, name), []).append(n)
            maker = place.get(index[value.producer]) if value.producer else None
            if maker is not None:
                bits |= before[maker] | (1 << maker)
        before[n] = bits
        for name in ops[i].outputs:
            for given in ops[i].inputs:
                if trace.value[given].storage == trace.value[name].storage:
                    seen_as.setdefault(name, seen_as.get(given, given))
            if trace.value[name].storage not in forward:
                made_at.setdefault(trace.value[name].storage, n)
    after = [0] * len(backward)  # descendants, as bits
    for n in range(len(backward) - 1, -1, -1):
        own = after[n] | (1 << n)
        for name in ops[backward[n]].inputs:
            producer = trace.value[name].producer
            maker = place.get(index[producer]) if producer else None
            if maker is not None:
                after[maker] |= own
    readers = {storage: _bits(ns) for storage, ns in read_at.items()}
    value_readers = {name: _bits(ns) for name, ns in value_at.items()}

    stretch = max(1, -(-len(backward) // max(1, at_most)))
    found = []
    for begin in range(0, len(backward), stretch):
        best: Moment | None = None
        for n in range(begin, min(begin + stretch, len(backward))):
            op = ops[backward[n]]
            touched = {trace.value[name].storage for name in (*op.inputs, *op.outputs)}
            touched -= trace.resident
            there = sum(size[s] for s in touched - lasting)
            there += problem.cost(op.name).workspace_bytes
            later = {s for s, bits in readers.items() if bits & after[n]} - trace.resident
            for storage, made in made_at.items():
                if storage in touched or storage in lasting or storage in trace.resident:
                    continue
                if before[n] >> made & 1 and (storage in later or storage in outputs):
                    there += size[storage]
            if best is None or there > best.there:
                values = frozenset(v for v, bits in value_readers.items() if bits & after[n])
                touches = frozenset(touched)
                best = Moment(backward[n], there, touches, frozenset(later & forward), values)
        if best is not None:
            found.append(best)
    return found


def _bits(numbers: Sequence[int]) -> int:
    found = 0
    for n in numbers:
        found |= 1 << n
    return found
