"""`slots_of` cuts a phase at its collectives into slots, and says in which slots each op may run.

The *chain* of a phase is its longest dependent path. Its collectives c1, c2, … happen one after
the other in every plan, so they cut the phase into slots, whatever the order of the rest:

    slot 0      slot 1         slot 2      slot 3         slot 4
    before c1   while c1 runs  in between  while c2 runs  after c2

Odd slots are *windows*: they last at least as long as their collective. An op that a collective's
start depends on runs in an earlier slot; an op that depends on its wait runs in a later one. Lower
bounds and the choice of what to recompute need to know no more of the order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from overlapc.core.ir import Problem, Trace
from overlapc.solvers.choose.choice import Needs


@dataclass(frozen=True)
class Slots:
    """One phase. Ops are numbered as in the trace; ranges are of slots, both ends included."""

    phase: int
    members: tuple[int, ...]  # ops of the phase
    path: tuple[int, ...]  # ops on the chain; every plan issues them in this order
    starts: tuple[int, ...]  # of the chain's collectives; window k is slot 2k + 1
    first: dict[int, int]  # op -> first slot it may run in
    last: dict[int, int]
    again: dict[int, tuple[int, int]]  # forward op -> the slots it may be recomputed in

    @property
    def final(self) -> int:
        return 2 * len(self.starts)


def slots_of(problem: Problem, needs: Needs) -> list[Slots]:
    """The slots of every phase."""
    makers, readers = _edges(problem.trace)
    return [_phase(problem, needs, phase, makers, readers) for phase in range(len(problem.phases))]


def _edges(trace: Trace) -> tuple[list[list[int]], list[list[int]]]:
    """For each op the ops it reads from, and the ops that read from it."""
    index = {op.name: i for i, op in enumerate(trace.ops)}
    makers: list[list[int]] = [[] for _ in trace.ops]
    readers: list[list[int]] = [[] for _ in trace.ops]
    for i, op in enumerate(trace.ops):
        for name in op.inputs:
            producer = trace.value[name].producer
            if producer:
                makers[i].append(index[producer])
                readers[index[producer]].append(i)
    return makers, readers


def _phase(
    problem: Problem,
    needs: Needs,
    phase: int,
    makers: Sequence[Sequence[int]],
    readers: Sequence[Sequence[int]],
) -> Slots:
    ops = problem.trace.ops
    members = [i for i, op in enumerate(ops) if problem.phase_of(op) == phase]
    inside = set(members)
    path = _path(problem, members, makers)
    chain = [(a, b) for a, b in pairwise(path) if ops[a].role == "start" and ops[b].role == "wait"]
    final = 2 * len(chain)
    wait_slot = {wait: 2 * k + 2 for k, (_, wait) in enumerate(chain)}
    start_slot = {start: 2 * k for k, (start, _) in enumerate(chain)}
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for i in members:
        before = [first[m] for m in makers[i] if m in inside]
        first[i] = max([wait_slot.get(i, 0), *before])
    for i in reversed(members):
        after = [last[r] for r in readers[i] if r in inside]
        last[i] = min([start_slot.get(i, final), *after])
    again = _again(problem, needs, phase, inside, first, last, final, readers)
    starts = tuple(start for start, _ in chain)
    return Slots(phase, tuple(members), path, starts, first, last, again)


def _path(
    problem: Problem, members: Sequence[int], makers: Sequence[Sequence[int]]
) -> tuple[int, ...]:
    """The ops of the longest dependent path, in order."""
    ops = problem.trace.ops
    costs = [problem.cost(op.name) for op in ops]
    length: dict[int, int] = {}
    via: dict[int, int] = {}
    for i in members:
        best, come_from = 0, -1
        for m in makers[i]:
            if m in length:
                flight = ops[m].role == "start" and ops[i].role == "wait"
                reach = length[m] + (costs[m].comm_ns if flight else 0)
                if come_from < 0 or reach > best:
                    best, come_from = reach, m
        length[i], via[i] = best + costs[i].compute_ns, come_from
    path: list[int] = []
    here = max(members, key=lambda i: length[i], default=-1)
    while here >= 0:
        path.append(here)
        here = via[here]
    return tuple(path[::-1])


def _again(
    problem: Problem,
    needs: Needs,
    phase: int,
    inside: set[int],
    first: dict[int, int],
    last: dict[int, int],
    final: int,
    readers: Sequence[Sequence[int]],
) -> dict[int, tuple[int, int]]:
    """The slots in which forward ops may be recomputed, if they are recomputed in this phase.

    If a recomputed op has one output, that output is not saved, so every backward op that reads it
    waits for the recompute. If no op reads it, or the op has several outputs, the last possible
    reader decides.
    """
    ops = problem.trace.ops
    found: dict[int, tuple[int, int]] = {}
    for i in range(len(ops) - 1, -1, -1):
        op = ops[i]
        if not op.is_forward or not needs.may_rerun(op) or problem.phase_of(op, True) != phase:
            continue
        sure = [last[r] for r in readers[i] if not ops[r].is_forward and r in inside]
        if sure and len(op.outputs) == 1:
            late = min(sure)
        else:
            maybe = [found[r][1] for r in readers[i] if r in found]
            late = max([*sure, *maybe], default=final)
        found[i] = (first.get(i, 0), late)
    return found
