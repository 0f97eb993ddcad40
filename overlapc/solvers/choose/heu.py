"""HEU: plans whose choices come from one integer program for the repeated block (`period`), and
whose orders come from list scheduling of the whole trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import islice

from overlapc.core.ir import Plan, Problem
from overlapc.core.simulate import peak_bytes, step_ns
from overlapc.solvers.choose.blocks import Repetition
from overlapc.solvers.choose.choice import Choice, Needs, choice_of, plan_of
from overlapc.solvers.choose.overlap import steady_plans
from overlapc.solvers.choose.period import Period, Periodic, repeated_blocks
from overlapc.solvers.constants import EXPOSED, FEW, LARGE, OVERSHOOT, ROOM
from overlapc.solvers.order.filling import PASSES, Taste, filled
from overlapc.solvers.order.listing import Style, list_schedule
from overlapc.solvers.order.work import NEVER, backward_work

_STYLES = (Style(OVERSHOOT**2, False), Style(OVERSHOOT, True))
_AGAIN = (EXPOSED, EXPOSED / 5)  # assumed shares of recomputed collectives that stay exposed
_ROOMS = (0.0, 0.015, ROOM**2, ROOM / 2)  # shares of the budget that are left to the schedule
_MUCH_ROOM = (ROOM, 2 * ROOM)  # the same where nothing would be recomputed
_PASSES = (PASSES[0], PASSES[3])
_RECOMPUTE_ONLY = ((Taste(True, True, "R"),), (Taste(True, False, "R"),))


def heu_plans(
    problem: Problem,
    needs: Needs | None = None,
    defer: bool = True,
    thorough: bool = True,
    grouped: bool | None = None,
    quick: bool = False,
    hopeful: bool = True,
    worth: Callable[[Choice], bool] = lambda _: True,
    periodic: Periodic | None = None,
) -> Iterator[Plan]:
    """Plans of the choice that just fits when recomputed on demand.

    `thorough` adds choices that leave the schedule more room and, where even blocks' inputs are
    recomputed, choices of periods of several blocks; `grouped` adds the latter always (True) or
    never (False); `quick`: of several blocks alone, never of the whole trace, and solved less
    closely. Without `defer` weight gradients keep their place. Without `hopeful` no simple
    plan fits: then many periods are tried only if a choice that ignores blocks fits. Choices that
    are not `worth` it are not scheduled.
    """
    if len(problem.phases) != 2:
        return
    periodic = periodic or Periodic(problem, needs)
    needs, repeated = periodic.needs, repeated_blocks(problem)
    budget = problem.budget_bytes
    if budget is None:
        choice = periodic.choice_with(0) or periodic.period.choice(needs, {})
        if worth(choice):
            yield from schedules(problem, choice, None, defer)
        return
    tried: list[Choice] = []
    for choice in _fitting(periodic, budget, thorough, _AGAIN):
        if choice not in tried:
            tried.append(choice)
            if worth(choice):
                yield from schedules(problem, choice, budget, defer)
    scarce = not tried or not _keeps_borders(problem, tried[0], repeated)
    if not (thorough and scarce if grouped is None else grouped):
        return
    others = _steady(problem, needs, budget)
    if not hopeful and not tried and not others:
        return
    whole = not quick and (not tried or len(problem.trace.ops) <= LARGE)
    for several in _groups(problem, needs, repeated, whole):
        of_several = Periodic(problem, needs, several, quick=quick)
        for choice in _fitting(of_several, budget, thorough, _AGAIN[:1]):
            if choice not in tried:
                tried.append(choice)
                others.append(choice)
    yield from _most_promising(problem, others, budget, defer, worth)


def thrifty(periodic: Periodic, leaving: Sequence[float]) -> Iterator[Choice]:
    """The period's choices that leave these shares of the budget to other microbatches or slices
    held at the same time."""
    budget = periodic.problem.budget_bytes
    room = None if budget is None else periodic.least_room(EXPOSED)
    if budget is None or room is None:
        return
    found = list(_leaving(periodic, budget, room, leaving))
    yield from found
    if len(found) > len(leaving) // 2:
        return
    for share in leaving:  # where little fits, what leaves more room may need more for its peak
        choice = periodic.choice_with(room + int(budget * share), f" leaving about {share:g}")
        if choice is not None and periodic.peak(choice) <= budget:
            yield choice


def _leaving(
    periodic: Periodic, budget: int, room: int, leaving: Sequence[float]
) -> Iterator[Choice]:
    """Choices whose peaks leave these shares of the budget, found from one to the next."""
    for share in leaving:
        for _ in range(FEW):
            choice = periodic.choice_with(room, f" leaving {share:g}")
            if choice is None:
                return
            over = periodic.peak(choice) - int(budget * (1 - share))
            if over <= 0:
                yield choice
                break
            room += over


def _groups(
    problem: Problem, needs: Needs, repeated: Repetition | None, whole: bool
) -> Iterator[Period]:
    """Periods of several blocks, and if `whole` the whole trace as one."""
    for blocks in range(2, FEW + 2):
        if repeated is not None and 2 * blocks <= repeated.count:
            yield Period(problem, needs, repeated.grouped(blocks), blocks)
    if repeated is not None and whole:
        yield Period(problem, needs, None)


def _fitting(
    periodic: Periodic, budget: int, thorough: bool, shares: Sequence[float]
) -> Iterator[Choice]:
    """The period's choices that just fit, and if `thorough` choices that leave more room, for each
    assumed share of exposed recomputed collectives."""
    cost, makers = periodic.problem.cost, periodic.period.maker.values()
    exposed = any(cost(op.name).comm_ns for op in makers)
    for again in shares if exposed and (thorough or periodic.scans) else shares[:1]:
        room = periodic.least_room(again)
        if room is None:
            return
        rooms = list(_ROOMS if thorough else _ROOMS[:1])
        for i, more in enumerate(rooms):
            how = f" exposing {again:g} room {more:g}"
            choice = periodic.choice_with(room + int(budget * more), how, again)
            if choice is None:
                continue
            yield choice
            if thorough and i == 0 and not choice.recomputed:
                rooms += _MUCH_ROOM  # recompute then hides what late weight gradients cannot


def _most_promising(
    problem: Problem,
    choices: Sequence[Choice],
    budget: int,
    defer: bool,
    worth: Callable[[Choice], bool],
) -> Iterator[Plan]:
    """All schedules of the few choices whose first schedules are fastest."""
    found: list[tuple[int, int, Iterator[Plan]]] = []
    for choice in choices:
        more = schedules(problem, choice, budget, defer)
        first = list(islice(more, 2))
        yield from first
        found.append((min(step_ns(problem, plan) for plan in first), len(found), more))
    for _, i, more in sorted(found)[: 2 * FEW]:
        if worth(choices[i]):
            yield from more


def _keeps_borders(problem: Problem, choice: Choice, repeated: Repetition | None) -> bool:
    """Does every block's recompute begin with what the block before passes on?"""
    if repeated is None:
        return False
    saved = {problem.trace.value[name].storage for name in choice.saved}
    return saved.issuperset(frozenset().union(*repeated.handed_on))


def _steady(problem: Problem, needs: Needs, budget: int) -> list[Choice]:
    """The fastest that fit among choices that ignore blocks and times."""
    fitting: list[tuple[int, int, Choice]] = []
    for plan in steady_plans(problem):
        if peak_bytes(problem, plan) <= budget:
            fitting.append((step_ns(problem, plan), len(fitting), choice_of(problem, plan)))
    return [choice for *_, choice in sorted(fitting)[:FEW]]


def ordered(problem: Problem, plan: Plan) -> Iterator[Plan]:
    """Plans that keep what this one keeps, in several orders."""
    if problem.trace.lanes and len(problem.phases) == 2:
        yield from schedules(problem, choice_of(problem, plan), problem.budget_bytes)


def schedules(
    problem: Problem, choice: Choice, budget: int | None, defer: bool = True
) -> Iterator[Plan]:
    """Plans of one choice in several orders; some may exceed the budget."""
    plain = tuple(op.name for op in problem.trace.ops if op.is_forward)
    plan = plan_of(problem, choice, "heu")
    yield plan
    large = len(problem.trace.ops) > LARGE
    limit = NEVER if budget is None else budget
    works = cache(partial(backward_work, problem, choice))
    if peak_bytes(problem, plan) <= limit:
        for passes in _PASSES if defer else _RECOMPUTE_ONLY:
            yield filled(plan, works(True), limit, passes)
    for late in (True, False) if defer else ():
        work = works(late)
        for permille in (1000,) if large else (1000, 930):
            for style in _STYLES[:1] if large else _STYLES:
                backward = list_schedule(work, limit * permille // 1000, style)
                how = str(style) if late else f"{style}, in place"
                yield plan_of(problem, choice, "heu", plain + backward, how)
