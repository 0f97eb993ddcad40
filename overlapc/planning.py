"""The road from a captured graph to a plan: profile, formulate, solve, check, simulate.

`plan_captured` is that road on one rank or many. One rank solves; every rank checks that its
trace is the same, receives the plan's text, and judges it for itself.
"""

from __future__ import annotations

import json
import math
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING, Any

from overlapc.check import check
from overlapc.errors import CaptureError, Infeasible, InvalidPlan, OptionError
from overlapc.files import StrPath
from overlapc.flags import log
from overlapc.ir import Cost, Plan, Problem, Profile, Slowdown, Timeline, Trace
from overlapc.merge import accumulate, merge
from overlapc.pipeline import PipelineTimeline, StageCost, simulate_pipeline
from overlapc.progress import doing
from overlapc.schedule import Schedule, Step, check_schedule, is_pair
from overlapc.simulate import saved_bytes, simulate
from overlapc.solvers import FIELD, SOLVERS, best_baseline, bound_ns, solve
from overlapc.solvers.bounds import simple_bound_ns
from overlapc.solvers.choice import Needs, plan_on_demand
from overlapc.solvers.merging import solve_step
from overlapc.solvers.rows import placed
from overlapc.solvers.schedules import make_schedule
from overlapc.text import format_plan, parse_plan

if TYPE_CHECKING:
    from overlapc.passes.capture import Captured
    from overlapc.runtime.exchange import Exchange

_CHOICES = 9  # of plans for all stages that are tried one by one
_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


@dataclass(frozen=True)
class Options:
    """What `optimize` was asked for. See its docstring for the meaning of each."""

    memory_budget: int | float | str | None = None
    solver: str = "overlap"
    backend: str = "eager"
    profile: str = "measure"
    hardware: str = "cpu-gloo"
    plan: Plan | None = None
    timeout_s: float = 7.0
    cache: bool | StrPath | None = None
    # What was measured and planned, so that the same graph met again is not paid for again.
    known: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)


@dataclass(frozen=True)
class Report:
    """What was decided for one graph, and what it is predicted to do."""

    name: str
    problem: Problem
    plan: Plan
    timeline: Timeline
    eager: Timeline  # of the plan that saves all, in the graph's own order
    given: bool = False  # a plan handed in: its bound may be of other costs

    @cached_property
    def bound_ns(self) -> int:
        """What any plan of this problem takes at least: computed when it is first asked for."""
        if self.timeline.step_ns <= (least := simple_bound_ns(self.problem)):
            return least
        proven = 0 if self.given else self.plan.bound_ns
        return max(bound_ns(self.problem), proven)

    def explain(self) -> str:
        from overlapc.report.explain import explain

        return explain(self)


@dataclass(frozen=True)
class StepReport:
    """What was decided for a step of several microbatches: `lone` for the first forward and the
    last backward, `merged` for what comes between, unless merging does not pay."""

    microbatches: int
    lone: Report
    merged: Report | None
    lag: int = 1

    @property
    def step_ns(self) -> int:
        alone = self.lone.timeline.step_ns
        if self.merged is None:
            return self.microbatches * alone
        steady = self.microbatches - self.lag
        return self.lag * alone + steady * self.merged.timeline.step_ns

    @property
    def peak_bytes(self) -> int:
        reports = [self.lone, *([self.merged] if self.merged else [])]
        return max(report.timeline.peak_bytes for report in reports)

    def explain(self) -> str:
        parts = [self.lone.explain()]
        if self.merged is not None:
            parts.append(self.merged.explain())
        head = f"{self.microbatches} microbatches, {self.step_ns / 1e6:.3f} ms predicted: "
        head += "each after the other" if self.merged is None else "merged"
        return "\n\n".join([head, *parts])


@dataclass(frozen=True)
class StageFigures:
    """What ranks tell each other of a planned stage: what a microbatch takes, what a merged step
    does (0: nothing is merged), how much memory all microbatches may hold, and whether its forward
    draws random numbers."""

    cost: StageCost
    merged_ns: int
    limit: int
    random: bool = False

    @staticmethod
    def of(cost: StageCost, report: StepReport, beside_bytes: int) -> StageFigures:
        """The gradients are held beside what counts against the limit."""
        problem = report.lone.problem
        return StageFigures(
            cost,
            0 if report.merged is None else report.merged.timeline.step_ns,
            (problem.budget_bytes or 0) - problem.resident_bytes + beside_bytes,
            any(op.random for op in problem.trace.ops),
        )

    @staticmethod
    def parse(found: Mapping[str, Any]) -> StageFigures:
        working = tuple((kind, size) for kind, size in found["cost"]["working"])
        cost = StageCost(**{**found["cost"], "working": working})
        return StageFigures(**{**found, "cost": cost})


def plan_rows(
    schedule: Schedule, figures: Sequence[Sequence[StageFigures]], place: bool = True
) -> tuple[tuple[int, ...], Schedule, PipelineTimeline]:
    """Of each stage's plans, of which each leaves more room than the one before, those with which
    the step is fastest: which they are, their rows, and what all ranks are predicted to do."""
    best: tuple[tuple[int, ...], Schedule, PipelineTimeline] | None = None
    for chosen in _choices([len(plans) for plans in figures]):
        each = [plans[which] for plans, which in zip(figures, chosen, strict=True)]
        rows, timeline = _placed(schedule, each, place)
        if best is None or timeline.step_ns < best[2].step_ns:
            best = chosen, rows, timeline
    assert best is not None
    return best


def _choices(counts: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """All of them where these are few, else all stages alike."""
    if math.prod(counts) <= _CHOICES:
        yield from product(*map(range, counts))
        return
    for which in range(max(counts)):
        yield tuple(min(which, count - 1) for count in counts)


def _placed(
    schedule: Schedule, figures: Sequence[StageFigures], place: bool
) -> tuple[Schedule, PipelineTimeline]:
    """The rows with recompute and weight gradients in their places, and what all ranks are
    predicted to do. A rank may hold what its stages' budgets allow, or what it holds anyway.
    Where several stages share a rank's random numbers they keep the order in which they draw."""
    costs = [stage.cost for stage in figures]
    remade = {(a.stage, a.microbatch) for a in schedule.actions if a.kind == "R"}

    def merged_ns(step: Step) -> int:
        figure = figures[step[0].stage]
        if is_pair(step) and figure.merged_ns:
            return figure.merged_ns
        return sum(costs[a.stage].takes(a.kind, (a.stage, a.microbatch) in remade) for a in step)

    if place:
        limits = list(simulate_pipeline(schedule, costs).peak_bytes)
        for rank in range(len(limits)):
            mine = [f.limit for s, f in enumerate(figures) if schedule.rank_of[s] == rank]
            limits[rank] = max(limits[rank], sum(mine))
        shared = schedule.stages > len(schedule.rows) and any(f.random for f in figures)
        schedule = placed(schedule, costs, limits, keep_order=shared)
    return schedule, simulate_pipeline(schedule, costs, merged_ns)


def schedule_of(schedule: Schedule | str, ranks: int, microbatches: int) -> Schedule:
    """A schedule, or the one of that name."""
    if isinstance(schedule, str):
        schedule = make_schedule(schedule, ranks, microbatches)
    check_schedule(schedule)
    return schedule


def check_solver(name: str) -> None:
    if name not in SOLVERS:
        raise OptionError(f"solver={name!r}: expected one of {', '.join(SOLVERS)}")


def parse_budget(budget: int | float | str | None, eager_bytes: int, lasting_bytes: int) -> int:
    """A budget in bytes for one step's peak.

    None keeps eager's peak. A float is a fraction of eager's activation memory: of what its peak
    holds beyond `lasting_bytes`, the gradients and results that no plan can avoid. Text has a
    unit.
    """
    if budget is None:
        return eager_bytes
    if isinstance(budget, bool) or not isinstance(budget, (int, float, str)):
        raise OptionError(
            f"memory_budget={budget!r}: expected bytes (an int), a fraction of eager's "
            'activation memory (a float), text like "8GB", or None'
        )
    if isinstance(budget, str):
        number = budget.strip().upper()
        unit = number.lstrip("0123456789._ ").strip()
        try:
            amount = float(number[: len(number) - len(unit)].strip() or "x")
            parsed = int(amount * _UNITS[unit])
        except (ValueError, KeyError, OverflowError):
            raise OptionError(
                f'memory_budget={budget!r}: expected a number and a unit, as "8GB" or "512MiB"'
            ) from None
    elif isinstance(budget, float):
        if not 0 < budget <= 1e6:
            raise OptionError(
                f"memory_budget={budget!r}: a float is a fraction of eager's activation memory "
                "and must be positive; bytes are given as an int"
            )
        parsed = lasting_bytes + int(budget * (eager_bytes - lasting_bytes))
    else:
        parsed = budget
    if parsed <= 0:
        raise OptionError(f"memory_budget={budget!r}: expected more than 0 bytes")
    return parsed


def formulate(trace: Trace, profile: Profile, budget: int | float | str | None = None) -> Problem:
    """The problem of one graph under autograd: all of the forward, then all of the backward."""
    problem = Problem(trace, profile, resident_bytes=tangent_bytes(trace))
    eager_bytes = eager_timeline(problem).peak_bytes
    lasting_bytes = saved_bytes(problem, trace.outputs)
    return replace(problem, budget_bytes=parse_budget(budget, eager_bytes, lasting_bytes))


def tangent_bytes(trace: Trace) -> int:
    """Incoming gradients are there, too, made by whoever calls backward."""
    tangents = [trace.value[name] for name in trace.inputs if name.startswith("tangents")]
    return sum(value.bytes for value in tangents)


def eager_timeline(problem: Problem) -> Timeline:
    needs = Needs(problem.trace)
    return simulate(problem, plan_on_demand(problem, needs.storages, "none", needs))


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
    if exchange is not None:
        told = exchange.gather("adding", repr(add_ns_per_kib).encode())
        add_ns_per_kib = sum(map(float, told)) / len(told)
    plain = Problem(captured.trace, profile, resident_bytes=tangent_bytes(captured.trace))
    problem = replace(accumulate(plain, gradients, add_ns_per_kib), in_flight=in_flight)
    problem = replace(problem, resident_bytes=problem.resident_bytes + beside_bytes)
    eager = eager_timeline(problem)
    budget = parse_budget(options.memory_budget, eager.peak_bytes, problem.resident_bytes)
    problem = replace(problem, budget_bytes=budget)

    roomier = [replace(problem, in_flight=in_flight + more) for more in range(1, further + 1)]

    def decide() -> tuple[Plan, ...]:
        alone = _solve(problem, options.solver, ())
        if not lag:
            return (alone, *_others(alone, roomier, options.solver))
        if options.solver in FIELD:
            return (alone,)
        with doing(f"merging microbatches ({len(problem.trace.ops)} ops)", _rank()):
            lone, merged = solve_step(problem, alone, microbatches, lag)
        return (lone,) if merged is None else (lone, merged)

    plans = decided(decide, exchange)
    costs = [accumulate(replace(plain, profile=p), gradients, add_ns_per_kib) for p in profiles]
    ranks = [found.profile for found in costs]
    lone = judged("one microbatch", problem, plans[0], ranks)
    if not lag:
        others = [judged("one microbatch", problem, plan, ranks) for plan in plans[1:]]
        return captured, [StepReport(microbatches, each, None, lag) for each in (lone, *others)]
    merged = None
    if plans[1:]:
        merged = judged("merged", merge(problem, lag), plans[1], ranks)
    return captured, [StepReport(microbatches, lone, merged, lag)]


def _others(plan: Plan, problems: Sequence[Problem], solver: str) -> Iterator[Plan]:
    """Plans for problems that each leave less room than the one before, where that of the one
    before does not fit."""
    for problem in problems:
        if simulate(problem, plan).peak_bytes > (problem.budget_bytes or 0):
            try:
                plan = _solve(problem, solver, ())
            except Infeasible:
                return
            yield plan


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


def agreed(
    captured: Captured,
    options: Options,
    primals: Sequence[Any] | None,
    exchange: Exchange | None,
    more: str = "",
) -> tuple[Captured, list[Profile], Profile]:
    """The graph with measured sizes in its trace, each rank's profile and one of all, once the
    ranks have found that they plan the same."""
    from overlapc.passes.capture import trace_joint

    if exchange is not None:
        exchange.agree(
            "trace",
            captured.trace.digest,
            "every rank must run the same model on inputs of the same shapes",
        )
        exchange.agree(
            "options",
            f"{options.memory_budget!r} {options.solver} {options.backend} {options.profile} {more}"
            + (format_plan(options.plan) if options.plan else ""),
            "pass the same options to optimize on every rank",
        )
    profiles, all_sizes = _profiles(captured, options, primals, exchange)
    profile = merge_profiles(profiles)
    sizes = {name: max(s.get(name, 0) for s in all_sizes) for name in all_sizes[0]}
    if sizes:
        captured = trace_joint(
            captured.joint, captured.num_fwd_outputs, captured.static_inputs, sizes=sizes
        )
    return captured, profiles, profile


def _rank() -> int | None:
    """This process's rank, which the environment does not always tell."""
    dist = sys.modules.get("torch.distributed")
    ready = dist is not None and dist.is_available() and dist.is_initialized()
    return dist.get_rank() if ready and dist is not None else None


_NOTHING_FITS = "infeasible "


def _decide(
    problem: Problem,
    options: Options,
    choices: Iterable[tuple[str, ...]],
    exchange: Exchange | None,
) -> Plan:
    """The plan, or Infeasible, the same on every rank."""

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


def decided(decide: Callable[[], tuple[Plan, ...]], exchange: Exchange | None) -> tuple[Plan, ...]:
    """What the leader decides, or Infeasible, the same on every rank."""

    def tell() -> str:
        try:
            return json.dumps([format_plan(plan) for plan in decide()])
        except Infeasible as error:
            return f"{_NOTHING_FITS}{error.budget_bytes} {error.smallest_bytes}"

    text = tell() if exchange is None else exchange.broadcast("plan", tell)
    if text.startswith(_NOTHING_FITS):
        budget, smallest = text.removeprefix(_NOTHING_FITS).split()
        raise Infeasible(int(budget), int(smallest))
    return tuple(map(parse_plan, json.loads(text)))


def _solve(problem: Problem, solver: str, choices: Iterable[tuple[str, ...]]) -> Plan:
    """A solver that crashes does not cost the user the run: the plain plan is used instead."""
    try:
        with doing(f"solving ({solver}, {len(problem.trace.ops)} ops)", _rank()):
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


def _profiles(
    captured: Captured,
    options: Options,
    primals: Sequence[Any] | None,
    exchange: Exchange | None,
) -> tuple[list[Profile], list[Mapping[str, int]]]:
    """The profiles and measured sizes of all ranks; if one cannot capture, none does."""
    key = _work(captured, options, primals)
    known = options.known.get(key)
    if exchange is None:
        known = options.known[key] = known or profile_captured(captured, options, primals)
        return [known[0]], [known[1]]
    everywhere = b"0" not in exchange.gather("known costs", b"1" if known else b"0")
    try:
        if known is None or not everywhere:  # all measure together, or nobody does
            known = exchange.during(
                "measuring", lambda: profile_captured(captured, options, primals)
            )
            options.known[key] = known
        mine = _pack(*known)
    except CaptureError as error:
        mine = json.dumps({"failed": [error.reason, error.place]}).encode()
    told = [json.loads(data) for data in exchange.gather("profile", mine)]
    for rank, data in zip(exchange.ranks, told, strict=True):
        if "failed" in data:
            reason, place = data["failed"]
            raise CaptureError(f"{reason} (on rank {rank})", place)
    return [_unpack(data) for data in told], [data["sizes"] for data in told]


def _work(captured: Captured, options: Options, primals: Sequence[Any] | None) -> tuple[Any, ...]:
    """What costs depend on: the graph by its names, and sizes that it leaves open."""
    trace = captured.trace
    sizes = str([tuple(getattr(value, "shape", (value,))) for value in primals or ()])
    names = tuple(op.name for op in trace.ops)
    return trace.digest, names, trace.lanes, options.profile, options.hardware, sizes


def profile_captured(
    captured: Captured, options: Options, primals: Sequence[Any] | None
) -> tuple[Profile, Mapping[str, int]]:
    if options.profile == "measure":
        from overlapc.profiler.cache import Cache
        from overlapc.profiler.measure import measure

        path = None if isinstance(options.cache, bool) else options.cache
        with doing(f"measuring {len(captured.trace.ops)} ops", _rank()):
            return measure(captured, primals, cache=Cache(path) if options.cache else None)
    if options.profile == "estimate":
        from overlapc.profiler.estimate import estimate
        from overlapc.profiler.hardware import load_hardware

        return estimate(captured, load_hardware(options.hardware)), {}
    raise OptionError(f'profile={options.profile!r}: expected "measure" or "estimate"')


def merge_profiles(profiles: Sequence[Profile]) -> Profile:
    """One profile of all ranks': mean compute, the slowest rank's communication and memory."""
    first = profiles[0]
    count = len(profiles)
    costs = {}
    for name, cost in first.costs.items():
        all_costs = [p.costs[name] for p in profiles]
        costs[name] = Cost(
            compute_ns=sum(c.compute_ns for c in all_costs) // count,
            comm_ns=max(c.comm_ns for c in all_costs),
            workspace_bytes=max(c.workspace_bytes for c in all_costs),
            source=cost.source,
        )
    slowdown = Slowdown(
        max(p.slowdown.compute_permille for p in profiles),
        max(p.slowdown.comm_permille for p in profiles),
    )
    return Profile(costs, slowdown, first.conditions)


def _pack(profile: Profile, sizes: Mapping[str, int]) -> bytes:
    slowdown = profile.slowdown
    return json.dumps(
        {
            "costs": {
                n: [c.compute_ns, c.comm_ns, c.workspace_bytes, c.source]
                for n, c in profile.costs.items()
            },
            "slowdown": [slowdown.compute_permille, slowdown.comm_permille],
            "conditions": dict(profile.conditions),
            "sizes": dict(sizes),
        }
    ).encode()


def _unpack(found: Mapping[str, Any]) -> Profile:
    costs = {name: Cost(*cost) for name, cost in found["costs"].items()}
    return Profile(costs, Slowdown(*found["slowdown"]), found["conditions"])
