"""What is to be solved: a `Problem` from a trace, a profile and a budget."""

from __future__ import annotations

from dataclasses import replace

from overlapc.ir import Problem, Profile, Timeline, Trace
from overlapc.planning.options import parse_budget
from overlapc.simulate import saved_bytes, simulate
from overlapc.solvers.choice import Needs, plan_on_demand
from overlapc.valid import validated


def formulate(trace: Trace, profile: Profile, budget: int | float | str | None = None) -> Problem:
    """The problem of one graph under autograd: all of the forward, then all of the backward."""
    problem = validated(Problem(trace, profile, resident_bytes=tangent_bytes(trace)))
    eager_bytes = eager_timeline(problem).peak_bytes
    lasting_bytes = saved_bytes(problem, trace.outputs)
    return replace(problem, budget_bytes=parse_budget(budget, eager_bytes, lasting_bytes))


def formulate_step(
    problem: Problem, budget: int | float | str | None, in_flight: int, beside_bytes: int
) -> Problem:
    """The problem of a step, from that of a microbatch whose gradients are added up: one budget for
    `in_flight` microbatches at a time, with `beside_bytes` of other things in it."""
    resident_bytes = problem.resident_bytes + beside_bytes
    problem = replace(problem, in_flight=in_flight, resident_bytes=resident_bytes)
    eager = eager_timeline(problem)
    return replace(problem, budget_bytes=parse_budget(budget, eager.peak_bytes, resident_bytes))


def tangent_bytes(trace: Trace) -> int:
    """Incoming gradients are there, too, made by whoever calls backward."""
    return sum(trace.value[name].bytes for name in trace.of_kind("gradient"))


def eager_timeline(problem: Problem) -> Timeline:
    needs = Needs(problem.trace)
    return simulate(problem, plan_on_demand(problem, needs.storages, "none", needs))
