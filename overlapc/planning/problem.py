"""`formulate` makes a `Problem` from a trace, a profile and a budget."""

from __future__ import annotations

from dataclasses import dataclass, replace

from overlapc.core.ir import Problem, Profile, Timeline, Trace
from overlapc.core.merge import accumulate, in_slices
from overlapc.core.simulate import saved_bytes, simulate
from overlapc.core.valid import validated
from overlapc.planning.options import Budget, parse_budget
from overlapc.solvers.choose.choice import Needs, plan_on_demand


@dataclass(frozen=True)
class TrainingStep:
    """How many microbatches of a captured graph make a step, and what else the step's budget
    covers.

    The default is a graph under autograd: one microbatch, which returns its gradients.
    """

    name: str = "graph"
    microbatches: int = 1
    lag: int = 0  # a forward merges with the backward so many microbatches before; 0: none
    pairs: bool = False  # the first two forwards may be joined, and the last two backwards
    must_pair: bool = False  # and they must be
    in_flight: int = 1  # microbatches held at a time, in one budget
    further: int = 0  # plan also for up to so many more in flight
    beside_bytes: int = 0  # other memory that the budget covers
    gradients: tuple[str, ...] | None = None  # added up over microbatches
    add_ns_per_kib: float = 0.0  # time of adding them
    sums: bool = True  # the budget covers their sums
    slices: int = 1  # slices of a microbatch; the graph is of one
    draws: tuple[str, ...] = ()  # ops whose random numbers slices draw together
    loss: bool = True  # the graph ends in it; the slices of a stage get gradients of their own
    at_once: bool = False  # slices may begin backwards before the last forward has ended

    def microbatch(self, trace: Trace, profile: Profile) -> Problem:
        """The problem of one microbatch, without a budget."""
        tangents = 1 if self.loss else self.slices
        given_bytes = tangents * tangent_bytes(trace)
        if self.draws:  # together, and once
            ops = [
                replace(op, recomputable=op.recomputable and op.name not in self.draws)
                for op in trace.ops
            ]
            trace = replace(trace, ops=tuple(ops))
        problem = validated(Problem(trace, profile, resident_bytes=given_bytes))
        if self.gradients is not None:
            problem = accumulate(problem, self.gradients, self.add_ns_per_kib, self.sums)
        if self.slices == 1:
            return problem
        return in_slices(problem, self.slices, self.loss, self.draws)

    def slice(self, trace: Trace, profile: Profile) -> Problem:
        """The problem of one slice, with the memory of all slices held, without a budget."""
        lone = replace(self, slices=1).microbatch(trace, profile)
        of_each = saved_bytes(lone, lone.trace.outputs)
        of_each += 0 if self.loss else tangent_bytes(trace)
        others_bytes = self.beside_bytes + (self.slices - 1) * of_each
        in_flight, resident_bytes = self.in_flight * self.slices, lone.resident_bytes + others_bytes
        return replace(lone, in_flight=in_flight, resident_bytes=resident_bytes)


GRAPH = TrainingStep()


def formulate(
    trace: Trace, profile: Profile, budget: Budget = None, step: TrainingStep = GRAPH
) -> Problem:
    """Make the problem of a microbatch (forward, then backward) with the budget of the whole
    step."""
    problem = step.microbatch(trace, profile)
    resident_bytes = problem.resident_bytes + step.beside_bytes
    problem = replace(problem, in_flight=step.in_flight, resident_bytes=resident_bytes)
    eager_bytes = eager_timeline(problem).peak_bytes
    if step.slices > 1 and all(op.is_forward for op in trace.ops):
        # Nothing lasts until a backward: the whole batch takes what slices take at the same time.
        lone = replace(step, slices=1).microbatch(trace, profile)
        eager_bytes = max(eager_bytes, step.slices * eager_timeline(lone).peak_bytes)
    lasting = lasting_bytes(problem, step)
    return replace(problem, budget_bytes=parse_budget(budget, eager_bytes, lasting))


def lasting_bytes(problem: Problem, step: TrainingStep) -> int:
    """Count the bytes of the gradients and results that no plan can avoid."""
    if step.gradients is None:
        return saved_bytes(problem, problem.trace.outputs)
    return problem.resident_bytes


def tangent_bytes(trace: Trace) -> int:
    """Count the bytes of incoming gradients, which the caller of backward makes and holds."""
    return sum(trace.value[name].bytes for name in trace.of_kind("gradient"))


def eager_timeline(problem: Problem) -> Timeline:
    """Simulate the plan that saves everything, in the trace's own order."""
    needs = Needs(problem.trace)
    return simulate(problem, plan_on_demand(problem, needs.storages, "none", needs))
