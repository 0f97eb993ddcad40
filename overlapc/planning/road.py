"""`plan` makes a plan for a captured graph, on one rank or many, for one microbatch or many.

One rank solves. Every rank checks that its trace is the same, receives the plan's text, and checks
and simulates the plan itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from overlapc.core.check import check
from overlapc.core.errors import Infeasible, InvalidPlan, OptionError
from overlapc.core.ir import Plan, Problem, Profile
from overlapc.core.merge import in_pairs, merge, of_slice, one_by_one
from overlapc.core.simulate import peak_bytes, simulate, step_ns
from overlapc.core.text import format_plan
from overlapc.planning.agreement import (
    agreed,
    as_kept,
    decided,
    merge_profiles,
    of_all_ranks,
    packed,
    this_rank,
    unlike_ranks,
)
from overlapc.planning.kept import KeptPlans, question_of
from overlapc.planning.options import ALIKE, Options, as_given, parse_budget
from overlapc.planning.own import checkpointed, gathered_again, gathered_bytes
from overlapc.planning.problem import (
    GRAPH,
    TrainingStep,
    eager_timeline,
    formulate,
    lasting_bytes,
)
from overlapc.planning.report import Report, StepPlan
from overlapc.solvers import (
    BASELINES,
    FIELD,
    SEARCHED,
    best_baseline,
    faster,
    menu,
    simple_plans,
    solve,
)
from overlapc.solvers.choose.period import Periodic
from overlapc.solvers.order.slices import across_border, crosses_border, solve_slices
from overlapc.solvers.step import quick_start, solve_step
from overlapc.tools.collecting import of_young_alone
from overlapc.tools.flags import log
from overlapc.tools.progress import doing
from overlapc.tools.told import warn

if TYPE_CHECKING:
    from overlapc.passes.trace import Captured
    from overlapc.ranks.exchange import Exchange

_UNPAIRED = (
    'schedule="pairs": the microbatches of this step cannot be in pairs; expected the solver '
    '"overlap", "heu" or "opt", and a model that draws no random numbers, hands no gradients over '
    'and is in no DDP; or give schedule="auto"'
)
_TIGHTER = 1  # how often a slice is planned for less, before it takes what it can
Choices = Callable[[], Iterable[tuple[str, ...]]]


@of_young_alone()
def plan(
    captured: Captured,
    options: Options,
    step: TrainingStep = GRAPH,
    *,
    primals: Sequence[Any] | None = None,
    others: Sequence[Sequence[Any]] = (),
    exchange: Exchange | None = None,
    torch_choices: Choices = tuple,
    own: Callable[[Problem], Plan] | None = None,
) -> StepPlan:
    """Plan a step of one captured graph: agree, cost, formulate, solve, check, simulate, report.

    `primals` are real inputs, to measure with, and `others` those of a batch's other slices, or of
    a step's other microbatches. `exchange` joins the ranks that must agree; without one this rank
    plans alone. `torch_choices` gives the saved sets that PyTorch's own partitioner would choose.
    `own` gives the plan of the model's own recompute, if it has any: the peak of that plan is the
    default budget, and that plan runs if nothing else fits.
    """
    captured, step, profiles, here = agreed(captured, step, options, primals, exchange, others)
    kept = KeptPlans(options, captured.trace, profiles)
    profiles, step = as_kept(kept, profiles, step, exchange)
    profile = merge_profiles(profiles)
    problem = formulate(captured.trace, profile, options.memory_budget, step)
    lone = problem if step.slices == 1 else step.slice(captured.trace, profile)
    lone = replace(lone, budget_bytes=problem.budget_bytes)
    if own is None and options.solver in SEARCHED:
        own = checkpointed(captured)
    theirs = own and own(lone)
    if theirs is not None and step.slices > 1:
        theirs = one_by_one(problem, theirs)
    budget_bytes, held_bytes = problem.budget_bytes, lasting_bytes(problem, step)
    if options.memory_budget is None:
        budget_bytes = _default_budget(problem, lone, options.solver, theirs)
    elif isinstance(options.memory_budget, float) and (full_bytes := gathered_bytes(captured)):
        again = gathered_again(captured)
        peak = peak_bytes(problem, again(problem)) if again else eager_timeline(lone).peak_bytes
        held_bytes += full_bytes
        budget_bytes = parse_budget(options.memory_budget, max(peak, held_bytes), held_bytes)
    problem, lone = (replace(each, budget_bytes=budget_bytes) for each in (problem, lone))
    log(1, f"{step.name}: {len(captured.trace.ops)} ops, budget {problem.budget_bytes:,} bytes")

    ranks = [step.microbatch(captured.trace, profile).profile for profile in profiles]

    def decide() -> tuple[Plan, ...]:
        if step.slices > 1:
            unlike = [replace(problem, profile=each) for each in unlike_ranks(ranks)]
            # `search`, which estimates, predicts no crossing: an estimated step is what it predicts
            crosses = step.at_once and options.profile != "estimate"
            return _sliced(problem, lone, options, torch_choices, theirs, crosses, unlike)
        return _solved(problem, step, options, torch_choices, theirs)

    def recall() -> tuple[Plan, ...]:
        if kept.path is None or options.plans:
            return decide()
        question = question_of((problem, lone), (options.text(ALIKE), repr(step)))
        if known := kept.plans(question):
            log(1, f"{step.name}: plan of an earlier run")
            return known
        found = decide()
        kept.put([packed(each) for each in profiles], step.add_ns_per_kib, question, found)
        return found

    try:
        plans = decided(recall, exchange)
    except Infeasible as error:
        raise as_given(error, options.memory_budget, held_bytes) from None
    for each in plans:
        found_by = each.found_by and f", found by {each.found_by}"
        log(1, f"{step.name}: plan of {each.solver}{found_by}")
        log(2, format_plan(each))
    if step.at_once and crosses_border(problem, plans[0]):
        problem = replace(problem, phases=("FIW",))
    given = bool(options.plans)
    found = reports(problem, step, plans, ranks, given=given)
    if here:  # whose plans fit, since no value is larger
        found = of_all_ranks(found, here, step.slices, exchange)
    report, *roomier = found
    _warn_of_budget(report, options)
    return StepPlan(captured, report, tuple(roomier))


def _warn_of_budget(report: Report, options: Options) -> None:
    """Warn of a plan that was given and takes more than the budget that was."""
    budget_bytes = report.problem.budget_bytes or 0
    given = options.plans and options.memory_budget is not None
    if given and report.peak_bytes > budget_bytes:
        warn(
            f"overlapc: the plan that was given takes {report.peak_bytes:,} bytes, more than "
            f"memory_budget, {budget_bytes:,}; it is run all the same"
        )


def _default_budget(problem: Problem, lone: Problem, solver: str, theirs: Plan | None) -> int:
    """The peak of the model's own recompute, else eager's peak, or more if a baseline needs more.
    `lone` is the problem of one slice, if the batch is in slices."""
    if theirs is not None:
        return peak_bytes(problem, theirs)
    # One slice is held with the most that the others may hold: a little more than eager's peak.
    eager_bytes = max(problem.budget_bytes or 0, eager_timeline(lone).peak_bytes)
    if solver not in BASELINES:
        return eager_bytes
    plan = BASELINES[solver](lone)
    if lone.trace.digest == problem.trace.digest:
        return max(eager_bytes, peak_bytes(problem, plan))
    return max(eager_bytes, _taken(problem, lone, plan))


def _solved(
    problem: Problem,
    step: TrainingStep,
    options: Options,
    choices: Choices,
    theirs: Plan | None = None,
) -> tuple[Plan, ...]:
    """The plan of one microbatch. If microbatches are merged and merging pays, the plan of two
    merged ones follows it, and that of the ends if the step is in pairs. If none are to be merged,
    plans that leave room for more microbatches follow."""
    if options.plans:
        return options.plans

    def alone() -> Plan:
        try:
            return _alone(problem, options, choices)
        except Infeasible:
            if theirs is None or peak_bytes(problem, theirs) > (problem.budget_bytes or 0):
                raise
            return theirs

    if step.must_pair and not (step.pairs and step.lag == 1 and options.solver not in FIELD):
        raise OptionError(_UNPAIRED)
    if not step.lag:
        plan = alone()
        return plan, *_roomier(plan, problem, step, options.solver)
    if options.solver in FIELD:
        return (alone(),)
    with doing(f"merging microbatches ({len(problem.trace.ops)} ops)", this_rank()):
        count, rival = step.microbatches, partial(faster, problem)
        return solve_step(
            problem, options.solver, alone, count, step.lag, step.pairs, rival, step.must_pair
        )


def _sliced(
    problem: Problem,
    lone: Problem,
    options: Options,
    choices: Choices,
    theirs: Plan | None = None,
    crosses: bool = False,
    ranks: Sequence[Problem] = (),
) -> tuple[Plan, ...]:
    """The plan of all slices of a batch; `lone` is the problem of one slice while all are held,
    `ranks` have the costs of ranks whose loads differ. `crosses`: may backwards begin before the
    last forward has ended?"""
    if options.plans:
        return options.plans
    quick = options.solver == "heu"
    periodic = Periodic(lone, quick=True) if quick else None
    try:
        alone = _fitting(problem, lone, options, choices, periodic)
    except Infeasible:
        if theirs is None or peak_bytes(problem, theirs) > (problem.budget_bytes or 0):
            raise
        return (theirs,)
    if options.solver in FIELD:
        return (one_by_one(problem, alone),)
    with doing(f"ordering slices ({len(problem.trace.ops)} ops)", this_rank()):
        plan = solve_slices(problem, lone, alone, quick, periodic=periodic, ranks=ranks)
        return (across_border(problem, plan, ranks)[1] if crosses else plan,)


def _fitting(
    problem: Problem,
    lone: Problem,
    options: Options,
    choices: Choices,
    periodic: Periodic | None,
) -> Plan:
    """A plan of one slice with which all fit in turn. What slices draw together is as large as the
    batch, and slices that wait for a total are held beside each other: one slice knows of neither,
    so its budget may have to be smaller."""
    budget_bytes = problem.budget_bytes or 0
    for _ in range(1 + _TIGHTER):
        try:
            alone = _slice_alone(lone, options, choices, periodic)
        except Infeasible:
            break
        over_bytes = peak_bytes(problem, one_by_one(problem, alone)) - budget_bytes
        if over_bytes <= 0:
            return alone
        lone = replace(lone, budget_bytes=max(1, (lone.budget_bytes or 0) - over_bytes))
        periodic = None
    # The budget that this names works whatever op times the next run measures.
    found = list(_small(replace(lone, budget_bytes=1), options.solver, choices))
    took = [_taken(problem, lone, plan) for plan in found]
    fitting = [plan for plan, bytes_ in zip(found, took, strict=True) if bytes_ <= budget_bytes]
    if not fitting:
        raise Infeasible(budget_bytes, min(took))
    return min(fitting, key=lambda plan: step_ns(problem, one_by_one(problem, plan)))


def _slice_alone(
    lone: Problem, options: Options, choices: Choices, periodic: Periodic | None
) -> Plan:
    """A plan of one slice. What HEU finds with little effort is as good a start: `solve_slices`
    tries other choices, and orders all slices anew."""
    quick = None
    if options.solver == "heu":
        quick = quick_start(lone, (make(lone) for make in BASELINES.values()), periodic)
    return quick or _alone(lone, options, choices)


def _taken(problem: Problem, lone: Problem, plan: Plan) -> int:
    """What slices in turn take by the plan of one, and no less than one takes alone."""
    return max(peak_bytes(lone, plan), peak_bytes(problem, one_by_one(problem, plan)))


def _small(problem: Problem, solver: str, choices: Choices) -> Iterable[Plan]:
    """Plans for the least memory. But for those of the field they depend on sizes alone, so they
    are the same in every run."""
    if solver in FIELD or solver == "torch":
        return menu(problem, solver, choices())
    return simple_plans(problem)


def _alone(problem: Problem, options: Options, choices: Choices) -> Plan:
    """The plan of one microbatch, remembered or solved now."""

    def asked() -> Iterator[tuple[str, ...]]:  # asked only if all other plans are above the bound
        yield from choices()

    key = "plan", problem.trace.digest, options.solver
    before, known = options.known.get(key, (None, None))
    if before != problem:
        known = _solve(problem, options.solver, asked())
        options.known[key] = problem, known
    plan: Plan = known
    return plan


def _roomier(plan: Plan, problem: Problem, step: TrainingStep, solver: str) -> Iterator[Plan]:
    """Plans for more and more microbatches in flight: a new one whenever the last no longer
    fits."""
    for more in range(1, step.further + 1):
        fuller = replace(problem, in_flight=step.in_flight + more)
        if simulate(fuller, plan).peak_bytes > (problem.budget_bytes or 0):
            try:
                plan = _solve(fuller, solver, ())
            except Infeasible:
                return
            yield plan


def _solve(problem: Problem, solver: str, choices: Iterable[tuple[str, ...]]) -> Plan:
    """Solve; if the solver crashes, warn and use the best baseline."""
    try:
        with doing(f"solving ({solver}, {len(problem.trace.ops)} ops)", this_rank()):
            return solve(problem, solver, torch_choices=choices)
    except (Infeasible, OptionError):
        raise
    except Exception as error:
        warn(f"overlapc: solver {solver!r} failed ({error!r}); its baselines are used instead")
        return best_baseline(problem)


def reports(
    problem: Problem,
    step: TrainingStep,
    plans: Sequence[Plan],
    ranks: Sequence[Profile] | None = None,
    *,
    given: bool = False,
) -> list[Report]:
    """Report on plans of one microbatch each, or on a plan of one followed by a plan of two
    merged, by that of the ends of a step in pairs, or by both."""

    def alone(plan: Plan) -> Report:
        report = judged(step.name, problem, plan, ranks, given=given)
        return replace(report, microbatches=step.microbatches, slices=step.slices)

    if not step.lag or len(plans) == 1:
        if given and len(plans) > 1:
            raise OptionError("plan: found one of merged microbatches, but none are merged here")
        return [alone(plan) for plan in plans]
    lone, *others = plans
    lag, both = step.lag, merge(problem, step.lag)
    pair: Report | None = None
    if step.pairs and step.microbatches > 1:
        ends, middle = in_pairs(problem)
        if others[-1].digest == ends.trace.digest:
            lag, both = 2, middle
            twice = [in_pairs(replace(problem, profile=each))[0].profile for each in ranks or ()]
            pair = judged("in pairs", ends, others.pop(), twice or None, given=given)
    if len(others) > 1:
        raise OptionError(f"plan: found {len(plans)}, the last not of this step's pairs")
    for each in others:
        _check_alike(lone, each)
    if pair is not None:
        for k in range(2):
            _check_alike(lone, of_slice(pair.plan, k, lone.digest))
    merged = judged("merged", both, others[0], ranks, given=given) if others else None
    return [replace(alone(lone), lag=lag, merged=merged, pair=pair)]


def _check_alike(lone: Plan, other: Plan) -> None:
    """Raise unless the plan of several microbatches saves and recomputes what that of one does."""
    for what in ("saved", "recomputed"):
        if set(getattr(lone, what)) != set(getattr(other, what)):
            raise InvalidPlan(
                f"the plan of merged microbatches has other values {what} than the plan of one "
                "microbatch: expected the plans of one report"
            )


def judged(
    name: str,
    problem: Problem,
    plan: Plan,
    profiles: Sequence[Profile] | None = None,
    *,
    given: bool = False,
) -> Report:
    """Report on a plan, which must be legal and, unless the user gave it, fit the budget."""
    check(problem, plan)
    timeline = simulate(problem, plan, profiles)
    if problem.budget_bytes is None:
        problem = replace(problem, budget_bytes=timeline.peak_bytes)
    if not given and timeline.peak_bytes > (problem.budget_bytes or 0):
        raise InvalidPlan(
            f"the plan of solver {plan.solver!r} peaks at {timeline.peak_bytes} bytes, "
            f"the budget is {problem.budget_bytes}"
        )
    return Report(name, problem, plan, timeline, given)
