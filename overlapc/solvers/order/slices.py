"""Slices of one batch: their forwards in one order, and their backwards in another.

    slice_order    an issue order of one phase, slices taking turns
    solve_slices   the best plan for all slices
    across_border  that plan with backwards that begin before the last forward has ended

A slice runs until it waits for a collective; then another has its turn. What is saved is chosen for
one slice and alike in all, because slices differ in nothing but the numbers they work on.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from overlapc.core.check import check
from overlapc.core.errors import InvalidPlan
from overlapc.core.ir import Plan, Problem, issues
from overlapc.core.merge import ADDS, at, one_by_one
from overlapc.core.simulate import memory_curve, peak_bytes, step_ns
from overlapc.solvers.bound.bounds import Least
from overlapc.solvers.choose.choice import Choice, choice_of, plan_of
from overlapc.solvers.choose.heu import thrifty
from overlapc.solvers.choose.keep import keep_sets
from overlapc.solvers.choose.period import Periodic
from overlapc.solvers.constants import AT_BOUND, FEW, GAP, MERGED, OVERSHOOT, RUNGS
from overlapc.solvers.order.filling import Taste, filled
from overlapc.solvers.order.listing import Listing, Style
from overlapc.solvers.order.merging import LEFT
from overlapc.solvers.order.work import NEVER, Work, backward_work, forward_work


@dataclass(frozen=True)
class Turns:
    """Says which slice goes on. `how`: the one at it until it waits (`on`), the one that has done
    least (`behind`), or the `first` that can. `hurry`: when a lane is about to fall idle, the slice
    that comes to a collective first goes on; but for so many last collectives of each slice
    (`calm`), since then one slice would have ended before the other's."""

    how: str = "on"
    hurry: bool = False
    calm: int = 0

    def __str__(self) -> str:
        calm = f", the last {self.calm} calmly" if self.calm else ""
        return f"turns {self.how}{' in a hurry' if self.hurry else ''}{calm}"


_CALM = Turns("on", hurry=True, calm=2)  # a layer has two collectives
TURNS = (
    *(Turns(how, hurry) for hurry, how in product((False, True), ("on", "behind", "first"))),
    _CALM,
)
_FIRST = (Turns("on"), Turns("first"))
_STYLES = (Style(OVERSHOOT**2, False), Style(OVERSHOOT, True), Style(1.0, False))
_SHARES = (1.0, 0.94)  # of the budget, which an order sometimes exceeds
_LONG = 1000  # ops from which on each that is scheduled costs more


def slice_order(work: Work, limit: int, style: Style, turns: Turns) -> tuple[str, ...]:
    """An order of all nodes of a phase of slices. It aims at `limit` bytes; only `simulate` says
    what it really takes."""
    return work.text(_TakingTurns(work, limit, style, turns).run())


class _TakingTurns(Listing):
    """Listing in which what is ready waits in a queue for each slice."""

    def __init__(self, work: Work, limit: int, style: Style, turns: Turns) -> None:
        super().__init__(work, limit, style)
        self.turns = turns
        self.slice = [op.piece.microbatch for op in work.ops]
        self.share, self.distance, self.coming = work.paces
        self.queues: list[list[tuple[int, int]]] = [[] for _ in range(1 + max(self.slice))]
        self.current = 0

    def arrive(self, n: int) -> None:
        if self.work.queues[n] == "ready":
            heapq.heappush(self.queues[self.slice[n]], self.ranked(n))
        else:
            super().arrive(n)

    def advance(self) -> None:
        able = [k for k, queue in enumerate(self.queues) if queue]
        if able:
            self.current = self.next_of(able)
            self.ready.append(heapq.heappop(self.queues[self.current]))
        super().advance()

    def next_of(self, able: list[int]) -> int:
        """Which of the slices that can go on does."""
        if len(able) == 1:
            return able[0]
        head = {k: self.queues[k][0][1] for k in able}
        if self.turns.hurry and max(self.coming[n] for n in head.values()) > self.turns.calm:
            lane_ends = min([lane.free_ns for lane in self.lanes.values()], default=0)
            near = min(able, key=lambda k: self.distance[head[k]])
            if lane_ends - self.clock.free_ns <= self.distance[head[near]]:
                return near
        if self.turns.how == "behind":
            return min(able, key=lambda k: self.share[head[k]])
        first = self.current if self.turns.how == "on" else 0
        return min(able, key=lambda k: (k - first) % len(self.queues))


def solve_slices(
    problem: Problem,
    lone: Problem,
    alone: Plan,
    quick: bool = False,
    choices: Sequence[Choice] | None = None,
    periodic: Periodic | None = None,
    ranks: Sequence[Problem] = (),
) -> Plan:
    """The fastest plan found that fits the budget, of slices beside each other. `lone` is the
    problem of a slice that all others are held with, and `alone` a plan of that. `quick`: with
    fewer choices of what to keep, and fewer orders. `choices`: with these alone. `periodic`: what
    the search for `alone` knows of the slice's period. `ranks`: the problem with the costs of
    ranks whose loads differ, by which plans are then judged."""
    plain = one_by_one(problem, alone)
    if not problem.trace.lanes:
        return plain  # there is nothing to hide
    search = _SliceSearch(problem, plain, ranks)
    turns, few, patience = (_FIRST, 1, FEW) if quick else (TURNS, FEW, 2 * RUNGS)
    first = _FIRST[:1] if quick else _FIRST
    search.order_forwards(dict.fromkeys((*turns, _CALM)), patience // 2)
    found = list(_choices(lone, alone, quick, periodic)) if choices is None else choices
    search.order_each(found, first, turns, few)
    search.polish(patience)
    effort = f"; of {search.offered} plans"
    check(problem, search.best)
    return replace(search.best, found_by=search.best.found_by + effort)


def across_border(
    problem: Problem, plan: Plan, ranks: Sequence[Problem] = ()
) -> tuple[Problem, Plan]:
    """The fastest of the plan and of those in which the first backwards, up to one of their
    collectives, come before the end of the last slice's forward, from one of its waits on: so the
    lane does not idle where forward and backward meet. Gradients are added up behind all forwards,
    so that one that raises leaves them alone. They are plans of a problem of one phase, which is
    returned with them; if none is faster, the plan with its own problem."""
    trace, order = problem.trace, plan.order
    border = sum(op.is_forward for op in trace.ops)
    role = {text: trace.ops[place].role for text, (place, *_) in trace.numbered.op.items()}
    piece = {text: trace.ops[place].piece for text, (place, *_) in trace.numbered.op.items()}
    last = piece[order[border - 1]].microbatch
    adds = {op.name for op in trace.ops if op.signature == ADDS}
    others = [t for t in order[border:] if piece[t].microbatch != last and t not in adds]
    mine = [text for text in order[:border] if piece[text].microbatch == last]
    ends = [1 + i for i, text in enumerate(others) if role[text] == "start"][: 2 * FEW]
    begins = [i for i, text in enumerate(mine) if role[text] == "wait"][-FEW:]
    one, *each = (replace(p, phases=("FIW",)) for p in (problem, *ranks))
    best, best_ns = (problem, plan), step_ns(problem, plan, ranks)
    for begin, end in product(begins, ends):
        tail, head = dict.fromkeys(mine[begin:]), dict.fromkeys(others[:end])
        first = [text for text in order[:border] if text not in tail]
        then = [text for text in order[border:] if text not in head]
        found = replace(plan, order=(*first, *head, *tail, *then))
        try:
            took_ns = step_ns(one, found, each)
            if took_ns >= best_ns or peak_bytes(one, found) > (problem.budget_bytes or NEVER):
                continue
            check(one, found)
        except InvalidPlan:  # what the tail makes is read before, a total say
            continue
        best, best_ns = (one, found), took_ns
    return best


def crosses_border(problem: Problem, plan: Plan) -> bool:
    """Does a backward of this plan begin before the last forward has ended?"""
    forwards = {op.name for op in problem.trace.ops if op.is_forward}
    made = [name in forwards and not again for name, again in issues(plan.order)]
    return made != sorted(made, reverse=True)


def _choices(
    lone: Problem, alone: Plan, quick: bool, periodic: Periodic | None
) -> Iterator[Choice]:
    """What could be kept and made again of a slice: each choice once."""
    periodic = periodic or Periodic(lone, quick=quick)
    needs = periodic.needs

    def found() -> Iterator[Choice]:
        yield choice_of(lone, alone)
        yield needs.complete(frozenset(needs.storages), "all saved")
        yield from thrifty(periodic, LEFT)
        if not quick:
            kept = keep_sets(lone, needs, RUNGS)
            yield from (needs.complete(storages, "hull") for storages in kept)

    seen: set[Choice] = set()
    for choice in found():
        if choice not in seen:
            seen.add(choice)
            yield choice


class _SliceSearch:
    """The best plan so far, and what it took to find it."""

    def __init__(self, problem: Problem, plain: Plan, ranks: Sequence[Problem]) -> None:
        self.problem, self.ranks = problem, ranks
        self.slices = 1 + max(op.piece.microbatch for op in problem.trace.ops)
        self.budget = NEVER if problem.budget_bytes is None else problem.budget_bytes
        count = max(1, len(problem.trace.ops))
        self.effort = MERGED * min(count, _LONG) // count**2
        self.reserve = self.effort // FEW  # for filling windows
        self.least = Least(problem)
        self.goal_ns = int(self.least.simple_ns * AT_BOUND)
        self.border = sum(op.is_forward for op in problem.trace.ops)
        self.plain = plain.order[: self.border]
        self.forwards = [self.plain]
        self.best, self.best_ns, self.offered = plain, step_ns(problem, plain, ranks), 1
        self.forward = forward_work(problem)
        self.backward: dict[Choice, Work] = {}
        self.tried: dict[tuple[Choice, Style, Turns, float], int] = {}

    def judged(self, plan: Plan, below_ns: int) -> tuple[int, bool, bool]:
        """What the plan takes, whether it is faster than that and fits, and if not, whether other
        forwards might."""
        self.effort -= 1
        self.offered += 1
        found_ns = step_ns(self.problem, plan, self.ranks)
        if found_ns >= below_ns:
            return found_ns, False, False
        curve = memory_curve(self.problem, plan)
        if max(curve) > self.budget:
            return found_ns, False, max(curve[self.border :], default=0) <= self.budget
        if found_ns < self.best_ns:
            self.best, self.best_ns = plan, found_ns
        return found_ns, True, True

    def order_forwards(self, turns: Iterable[Turns], fillings: int) -> None:
        """The fastest orders of the forwards first; windows of the fastest filled."""
        styles = (Style(1.0, False), Style(1.0, True))
        orders = [slice_order(self.forward, NEVER, s, t) for t, s in product(turns, styles)]

        def took_ns(order: tuple[str, ...]) -> int:
            self.effort -= 1
            plan = replace(self.best, order=order)  # of this phase alone
            return step_ns(self.problem, plan, self.ranks)

        took = {order: took_ns(order) for order in [*orders, self.plain]}
        best, *_ = self.forwards = sorted(took, key=took.__getitem__)
        for seed in range(1, 1 + fillings):
            taste = Taste(False, seed % 2 == 0, "F", seed)
            order = filled(replace(self.best, order=best), self.forward, NEVER, (taste,)).order
            if (found_ns := took_ns(order)) < took[best]:
                best, took[order] = order, found_ns
                self.forwards.insert(0, order)

    def is_done(self, reserve: int = 0) -> bool:
        return self.effort <= reserve or self.best_ns <= self.goal_ns

    def order_each(
        self, choices: Sequence[Choice], first: Sequence[Turns], turns: Sequence[Turns], few: int
    ) -> None:
        """The orders that the `first` turns give of each choice; of the `few` that are best by
        these all that turns give."""
        every = [_in_all(choice, self.slices) for choice in choices]
        found = [
            (self.order_backwards(choice, _STYLES[:1], first), i) for i, choice in enumerate(every)
        ]
        best = [every[i] for took_ns, i in sorted(found) if took_ns < NEVER]
        for choice in best[:few] or every[:few]:
            self.order_backwards(choice, _STYLES, turns)

    def order_backwards(
        self, choice: Choice, styles: Sequence[Style], turns: Sequence[Turns]
    ) -> int:
        """What the best of these orders of the backwards of a choice takes, behind the fastest
        forwards that leave room for it; NEVER if none fits, or none can be the best."""
        best_ns = NEVER
        if self.least.bytes(choice) > self.budget:
            return best_ns
        shares = (1.0,) if self.budget == NEVER else _SHARES
        least_ns = self.least.ns(choice) * (1 + GAP)
        for style, turn in product(styles, turns):
            for share in shares:
                if self.is_done(self.reserve) or least_ns >= min(best_ns, self.best_ns):
                    return best_ns
                limit = NEVER if self.budget == NEVER else int(self.budget * share)
                key = choice, style, turn, share
                if key not in self.tried:
                    order = slice_order(self.backward_of(choice), limit, style, turn)
                    self.tried[key] = self.behind_forwards(choice, order, str(turn), best_ns)
                found_ns = self.tried[key]
                best_ns = min(best_ns, found_ns)
                if found_ns < NEVER:
                    break
        return best_ns

    def backward_of(self, choice: Choice) -> Work:
        if choice not in self.backward:
            self.backward[choice] = backward_work(self.problem, choice)
        return self.backward[choice]

    def behind_forwards(
        self, choice: Choice, backward: tuple[str, ...], how: str, below_ns: int
    ) -> int:
        """What backwards in this order take behind the fastest forwards that leave room for them;
        NEVER if none does, or if it is no less than `below_ns`."""
        for forward in [*self.forwards[:FEW], self.plain]:
            plan = plan_of(self.problem, choice, "slices", forward + backward, how)
            found_ns, fits, others_may = self.judged(plan, below_ns)
            if fits or not others_may:
                return found_ns if fits else NEVER
        return NEVER

    def polish(self, patience: int) -> None:
        """Windows of the best filled again and again, a little differently each time; until so
        many in a row are no better."""
        choice = choice_of(self.problem, self.best)
        backward = self.backward_of(choice)
        seed = left = patience
        while left and not self.is_done():
            seed, left = seed + 1, left - 1
            taste = Taste(seed % 2 != 0, seed % 4 > 1, "F" if seed % FEW == 0 else "RW", seed)
            if seed % FEW:
                plan = filled(self.best, backward, self.budget, (taste,))
            else:
                first, then = self.best.order[: self.border], self.best.order[self.border :]
                plan = filled(replace(self.best, order=first), self.forward, NEVER, (taste,))
                plan = replace(plan, order=plan.order + then)
            if self.judged(plan, self.best_ns)[1]:
                left = patience


def _in_all(choice: Choice, count: int) -> Choice:
    """The choice of a slice in all of them."""

    def every(names: Iterable[str]) -> tuple[str, ...]:
        return tuple(at(name, k) for k in range(count) for name in names)

    return Choice(every(choice.saved), every(choice.recomputed), choice.found_by)
