"""The road from a captured graph to a plan: agree on costs, formulate, solve, check, simulate.

`plan_captured` is that road on one rank or many, `plan_step` the same for a step of several
microbatches. One rank solves; every rank checks that its trace is the same, receives the plan's
text, and judges it for itself.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from overlapc.check import check
from overlapc.errors import Infeasible, InvalidPlan, OptionError
from overlapc.flags import log
from overlapc.ir import Plan, Problem, Profile
from overlapc.merge import accumulate, merge
from overlapc.planning.agreement import agreed, decided, mean_of_ranks, this_rank
from overlapc.planning.options import Options
from overlapc.planning.problem import eager_timeline, formulate, formulate_step, tangent_bytes
from overlapc.planning.report import Report, StepReport
from overlapc.progress import doing
from overlapc.simulate import simulate
from overlapc.solvers import FIELD, best_baseline, solve
from overlapc.solvers.merging import solve_step
from overlapc.text import format_plan

if TYPE_CHECKING:
    from overlapc.passes.trace import Captured
    from overlapc.runtime.exchange import Exchange


def plan_captured(
    captured: Captured,
    options: Options,
    *,
    name: str = "graph",
    primals: Sequence[Any] | None = None,
    exchange: Exchange | None = None,
    torch_choices: Callable[[], Sequence[tuple[str, ...]]] | None = None,
) -> tuple[Captured, Report]:
    """Plan one captured graph; returns it with measured sizes in its trace, and the report.

    `exchange` joins the ranks that must agree; without one this rank plans alone.
    `torch_choices` gives the saved sets PyTorch's own partitioner would choose.
    """
    captured, profiles, profile = agreed(captured, options, primals, exchange)
    problem = formulate(captured.trace, profile, options.memory_budget)
    log(1, f"{name}: {len(captured.trace.ops)} ops, budget {problem.budget_bytes:,} bytes")

    leads = exchange is None or exchange.rank == exchange.leader
    wanted = leads and torch_choices is not None and options.solver in ("overlap", "opt", "torch")

    def choices() -> Iterator[tuple[str, ...]]:  # asked for when all else is above the bound
        if wanted and torch_choices is not None:
            yield from torch_choices()

    plan = _decide(problem, options, choices(), exchange)
    log(1, f"{name}: plan of {plan.solver}{plan.found_by and f', found by {plan.found_by}'}")
    log(2, format_plan(plan))
    return captured, judged(name, problem, plan, profiles, given=options.plan is not None)


def plan_step(
    captured: Captured,
    options: Options,
    microbatches: int,
    *,
    lag: int = 1,
    in_flight: int = 1,
    further: int = 0,
    beside_bytes: int = 0,
    gradients: Sequence[str],
    add_ns_per_kib: float = 0.0,
    primals: Sequence[Any] | None = None,
    exchange: Exchange | None = None,
) -> tuple[Captured, list[StepReport]]:
    """Plan a step that adds up the `gradients` of several microbatches of one captured graph.

    `add_ns_per_kib` is what adding takes. The budget is one for the whole step, in which
    `in_flight` microbatches are held at a time, and `beside_bytes` of other things. A forward is
    merged with the backward `lag` microbatches before it; 0: with none. Behind the report come
    those of up to `further` more microbatches held in the same budget, where that asks for another
    plan and has one.
    """
    captured, profiles, profile = agreed(
        captured, options, primals, exchange, f"{microbatches} microbatches {lag} {in_flight} "
    )
    add_ns_per_kib = mean_of_ranks("adding", add_ns_per_kib, exchange)
    plain = Problem(captured.trace, profile, resident_bytes=tangent_bytes(captured.trace))
    added = accumulate(plain, gradients, add_ns_per_kib)
    problem = formulate_step(added, options.memory_budget, in_flight, beside_bytes)
    roomier = [replace(problem, in_flight=in_flight + more) for more in range(1, further + 1)]

    def decide() -> tuple[Plan, ...]:
        alone = _solve(problem, options.solver, ())
        if not lag:
            return (alone, *_others(alone, roomier, options.solver))
        if options.solver in FIELD:
            return (alone,)
        with doing(f"merging microbatches ({len(problem.trace.ops)} ops)", this_rank()):
            lone, merged = solve_step(problem, alone, microbatches, lag)
        return (lone,) if merged is None else (lone, merged)

    plans = decided(decide, exchange)
    costs = [accumulate(replace(plain, profile=p), gradients, add_ns_per_kib) for p in profiles]
    ranks = [found.profile for found in costs]
    if not lag:
        alone = [judged("one microbatch", problem, plan, ranks) for plan in plans]
        return captured, [StepReport(microbatches, each, None, lag) for each in alone]
    lone = judged("one microbatch", problem, plans[0], ranks)
    merged = judged("merged", merge(problem, lag), plans[1], ranks) if plans[1:] else None
    return captured, [StepReport(microbatches, lone, merged, lag)]


def judged(
    name: str, problem: Problem, plan: Plan, profiles: Sequence[Profile], given: bool = False
) -> Report:
    """The report on a plan, which must be legal and, unless it was `given`, keep to the budget."""
    check(problem, plan)
    timeline = simulate(problem, plan, profiles)
    if not given and timeline.peak_bytes > (problem.budget_bytes or 0):
        raise InvalidPlan(
            f"the plan of solver {plan.solver!r} peaks at {timeline.peak_bytes} bytes, "
            f"the budget is {problem.budget_bytes}"
        )
    return Report(name, problem, plan, timeline, eager_timeline(problem), given)


def _decide(
    problem: Problem,
    options: Options,
    choices: Iterable[tuple[str, ...]],
    exchange: Exchange | None,
) -> Plan:
    """The plan that was given, is known, or is solved for now; the same on every rank."""

    def decide() -> tuple[Plan]:
        if options.plan is not None:
            return (options.plan,)
        key = "plan", problem.trace.digest, options.solver
        before, plan = options.known.get(key, (None, None))
        if before != problem:
            plan = _solve(problem, options.solver, choices)
            options.known[key] = problem, plan
        return (plan,)

    (plan,) = decided(decide, exchange)
    return plan


def _solve(problem: Problem, solver: str, choices: Iterable[tuple[str, ...]]) -> Plan:
    """A solver that crashes does not cost the user the run: the plain plan is used instead."""
    try:
        with doing(f"solving ({solver}, {len(problem.trace.ops)} ops)", this_rank()):
            return solve(problem, solver, torch_choices=choices)
    except (Infeasible, OptionError):
        raise
    except Exception as error:
        warnings.warn(
            f"overlapc: solver {solver!r} failed ({error!r}); its baselines are used instead",
            RuntimeWarning,
            stacklevel=2,
        )
        return best_baseline(problem)


def _others(plan: Plan, problems: Sequence[Problem], solver: str) -> Iterator[Plan]:
    """Plans for problems of less and less room: a new one wherever the last does not fit."""
    for problem in problems:
        if simulate(problem, plan).peak_bytes > (problem.budget_bytes or 0):
            try:
                plan = _solve(problem, solver, ())
            except Infeasible:
                return
            yield plan
