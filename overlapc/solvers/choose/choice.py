"""`Needs.complete` turns storages to keep into a `Choice`: saved values and recomputed ops;
`on_demand` is its plain order.

Solvers decide on storages (views of a kept storage cost nothing); a plan names values and ops.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

from overlapc.core.ir import Op, Plan, Problem, Trace, issue


@dataclass(frozen=True)
class Choice:
    """Saved values, the forward ops that must run again, in trace order, and the name of the
    generator."""

    saved: tuple[str, ...]
    recomputed: tuple[str, ...]
    found_by: str = field(default="", compare=False)


def choice_of(problem: Problem, plan: Plan) -> Choice:
    """The choice of a plan: its saved values and recomputed ops, without its order."""
    again = set(plan.recomputed)
    recomputed = tuple(op.name for op in problem.trace.ops if op.name in again)
    return Choice(plan.saved, recomputed, plan.found_by.partition(",")[0] or plan.solver)


@dataclass(frozen=True)
class Needs:
    """What the backward of a trace reads of its forward; computed once for a trace."""

    trace: Trace

    @cached_property
    def read_by_backward(self) -> tuple[str, ...]:
        """Values made by forward ops that backward ops read."""
        found: dict[str, None] = {}
        for op in self.trace.ops:
            if not op.is_forward:
                for name in op.inputs:
                    if self.forward_made(name):
                        found[name] = None
        return tuple(found)

    @cached_property
    def position(self) -> dict[str, int]:
        return {op.name: i for i, op in enumerate(self.trace.ops)}

    def forward_made(self, name: str) -> bool:
        producer = self.trace.value[name].producer
        return bool(producer) and self.trace.op[producer].is_forward

    def may_rerun(self, op: Op) -> bool:
        """A wait runs again only with its start: a started collective cannot be kept."""
        if op.role == "wait":
            return op.recomputable and self.trace.op[self.trace.start_of[op.name]].recomputable
        return op.recomputable

    @cached_property
    def storages(self) -> tuple[str, ...]:
        """The storages that saving everything the backward reads would hold."""
        found = {
            self.trace.value[name].storage: None
            for name in self.read_by_backward
            if self.trace.value[name].storage not in self.trace.resident
        }
        return tuple(found)

    @cached_property
    def gathered(self) -> frozenset[str]:
        """Storages of sharded weights that collectives gather, and of what follows from these
        alone, by ops that may run again. Collectives of inputs alone gather weights if they are
        several: of one it may be the model's input."""
        trace = self.trace
        known, found, starts = set(trace.resident), set[str](), 0
        for op in trace.ops:
            if not op.is_forward or not op.inputs or not self.may_rerun(op):
                continue
            given = {trace.value[name].storage for name in op.inputs}
            made = {trace.value[name].storage for name in op.outputs}
            if op.role == "start" and given <= known:
                starts += 1
                found |= made
            elif given <= found:
                found |= made
            elif given <= known:
                known |= made
        return frozenset(found - trace.resident if starts > 1 else ())

    def complete(self, keep: frozenset[str], found_by: str = "") -> Choice:
        """The saved values and recomputed ops that follow from keeping these storages.

        Views of inputs, and results of ops that may not run twice, are kept besides.
        """
        trace = self.trace
        saved: dict[str, None] = {}
        recomputed: set[str] = set()
        front = list(self.read_by_backward)
        seen = set(front)
        while front:
            name = front.pop()
            value = trace.value[name]
            producer = trace.op[value.producer]
            held = value.storage in keep or value.storage in trace.resident
            if (held and producer.role != "start") or not self.may_rerun(producer):
                saved[name] = None
                continue
            if producer.name in recomputed:
                continue
            recomputed.add(producer.name)
            for given in producer.inputs:
                if given not in seen and self.forward_made(given):
                    seen.add(given)
                    front.append(given)
        position = self.position
        return Choice(
            tuple(sorted(saved, key=lambda n: (position[trace.value[n].producer], n))),
            tuple(sorted(recomputed, key=position.__getitem__)),
            found_by,
        )


def on_demand(problem: Problem, choice: Choice) -> tuple[str, ...]:
    """The trace's own order within each phase, each recomputed op right before the first that
    needs it."""
    trace = problem.trace
    waiting = set(choice.recomputed)
    saved = set(choice.saved)
    order: list[str] = []

    def recompute(op: Op) -> None:
        stack = [(op, iter(op.inputs))]
        while stack:
            top, inputs = stack[-1]
            for name in inputs:
                producer = trace.value[name].producer
                if name not in saved and producer in waiting:
                    waiting.discard(producer)
                    needed = trace.op[producer]
                    stack.append((needed, iter(needed.inputs)))
                    break
            else:
                stack.pop()
                if stack:
                    order.append(issue(top.name, True))

    for op in sorted(trace.ops, key=problem.phase_of):
        if not op.is_forward:
            recompute(op)
        order.append(op.name)
    return tuple(order)


def plan_of(
    problem: Problem, choice: Choice, solver: str, order: tuple[str, ...] = (), how: str = ""
) -> Plan:
    """The plan of a choice in an order, by default on demand; `how` names the way the order was
    found."""
    return Plan(
        problem.trace.digest,
        solver,
        choice.saved,
        order or on_demand(problem, choice),
        found_by=f"{choice.found_by}, {how or 'on demand'}",
    )


def plan_on_demand(
    problem: Problem,
    keep: Iterable[str],
    solver: str,
    needs: Needs | None = None,
    found_by: str = "",
) -> Plan:
    """Keep these storages, recompute the rest where it is needed: what eager frameworks do."""
    needs = needs or Needs(problem.trace)
    choice = needs.complete(frozenset(keep), found_by)
    return Plan(
        digest=problem.trace.digest,
        solver=solver,
        saved=choice.saved,
        order=on_demand(problem, choice),
        status="baseline",
        found_by=found_by and f"{found_by}, on demand",
    )
