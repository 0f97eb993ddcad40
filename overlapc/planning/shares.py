"""`divide` shares one memory budget among the graphs of a step.

Where capture breaks, a model's forward is a row of graphs, G1 to Gn. Their backwards run in
reverse. So while Gk runs, memory also holds what G1 to Gk-1 keep for their backwards, and during
Gk's backward the gradients that Gk+1 to Gn have made. Each graph has a *menu* of plans that does
not depend on the budget. `divide` takes one plan of every menu, so that the peak of the whole step
fits.

The combinations that it tries do not depend on the budget either, and it takes the fastest that
fits: so a smaller budget never gives a larger peak.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from overlapc.core.errors import Infeasible
from overlapc.core.ir import Plan, Problem
from overlapc.core.ledger import Ledger
from overlapc.core.simulate import RNG_STATE_BYTES, saved_bytes, simulate
from overlapc.planning.agreement import agreed, decided, merge_profiles
from overlapc.planning.options import Budget, Options, as_given, parse_budget
from overlapc.planning.problem import TrainingStep
from overlapc.planning.report import Report
from overlapc.planning.road import Choices, judged
from overlapc.solvers import FIELD, menu, simple_plans
from overlapc.solvers.choose.choice import Needs, plan_on_demand

if TYPE_CHECKING:
    from overlapc.passes.trace import Captured
    from overlapc.ranks.exchange import Exchange

_LEVELS = 48  # steps between the least memory and all, each with its combination
_PLANS = 240  # about how many plans the menus of all graphs hold together


@dataclass(frozen=True, slots=True)
class Takes:
    """Time and memory of one plan of a graph."""

    plan: Plan
    step_ns: int
    forward_bytes: int  # at most, while the forward runs
    backward_bytes: int
    held_bytes: int  # from the end of the forward to the backward: saved values and results

    @staticmethod
    def of(problem: Problem, plan: Plan) -> Takes:
        trace = problem.trace
        timeline = simulate(problem, plan)
        border = sum(op.is_forward for op in trace.ops)
        makers = {name: trace.value[name].producer for name in trace.outputs}
        results = [name for name, op in makers.items() if op and trace.op[op].is_forward]
        drawn = sum(trace.op[name].has_state for name in plan.recomputed)
        held = saved_bytes(problem, [*plan.saved, *results]) + RNG_STATE_BYTES * drawn
        memory = timeline.memory
        return Takes(
            plan,
            timeline.step_ns,
            max(memory[:border], default=0),
            max(memory[border:], default=0),
            held,
        )

    @property
    def least(self) -> tuple[int, int]:
        """The key that orders plans of a graph while the other graphs are unknown."""
        return max(self.forward_bytes, self.backward_bytes) + self.held_bytes, self.held_bytes


@dataclass(frozen=True)
class Share:
    """A graph that shares the budget: its problem, and the solver of its plans."""

    problem: Problem
    solver: str
    torch_choices: tuple[tuple[str, ...], ...] = ()

    @cached_property
    def eager(self) -> Takes:
        needs = Needs(self.problem.trace)
        return Takes.of(self.problem, plan_on_demand(self.problem, needs.storages, "none", needs))

    @cached_property
    def frugal(self) -> Takes:
        """The plan for a graph while the other graphs are unknown: it holds little, and its peak is
        low. It depends on sizes alone."""
        if self.solver in FIELD or self.solver == "torch":
            plans = menu(self.problem, self.solver, self.torch_choices)
        else:
            plans = iter(simple_plans(self.problem))
        return min((Takes.of(self.problem, plan) for plan in plans), key=lambda t: t.least)

    @cached_property
    def menu(self) -> list[Takes]:
        """The plans that no other plan beats in both time and memory; the frugal one first."""
        plans = menu(self.problem, self.solver, self.torch_choices)
        found = sorted({Takes.of(self.problem, plan) for plan in plans}, key=lambda t: t.step_ns)
        best = [self.frugal]
        for takes in found:
            if not any(_beats(other, takes) for other in best):
                best.append(takes)
        return best

    @cached_property
    def gradient_bytes(self) -> int:
        trace = self.problem.trace
        makers = {name: trace.value[name].producer for name in trace.outputs}
        made = [name for name, op in makers.items() if op and not trace.op[op].is_forward]
        return saved_bytes(self.problem, made)

    @cached_property
    def lasting_bytes(self) -> int:
        return saved_bytes(self.problem, self.problem.trace.outputs)


def _beats(one: Takes, other: Takes) -> bool:
    return (
        one.step_ns <= other.step_ns
        and one.forward_bytes <= other.forward_bytes
        and one.backward_bytes <= other.backward_bytes
        and one.held_bytes <= other.held_bytes
    )


@dataclass(frozen=True)
class GraphsOfStep:
    """The graphs of a step in the order of their forwards; one may come several times.

    `flows` are (place, place, bytes): a tensor that the graph at the first place makes and the
    graph at the second reads. Its gradient is freed once the first graph's backward has used it.
    """

    graphs: tuple[int, ...]
    flows: tuple[tuple[int, int, int], ...] = ()

    def beside(self, shares: Sequence[Share], chosen: Sequence[Takes]) -> list[tuple[int, int]]:
        """How many bytes the other graphs hold during each graph's forward, and during its
        backward."""
        passed = [0] * len(self.graphs)
        for _, reader, size in self.flows:
            passed[reader] += size
        kept = [
            max(0, shares[g].gradient_bytes - p) for g, p in zip(self.graphs, passed, strict=True)
        ]
        last = 2 * len(self.graphs) - 1  # moments: all forwards, then all backwards
        ledger = Ledger([0] * (last + 1))
        for place, graph in enumerate(self.graphs):
            ledger.add(chosen[graph].held_bytes, place + 1, last - place - 1)
            ledger.add(kept[place], last - place + 1, last + 1)
        for made, read, size in self.flows:
            ledger.add(size, last - read + 1, last - made - 1)
        alive = ledger.alive()
        return [(alive[place], alive[last - place]) for place in range(len(self.graphs))]

    def peak_bytes(self, shares: Sequence[Share], chosen: Sequence[Takes]) -> int:
        return max(
            max(first + chosen[g].forward_bytes, second + chosen[g].backward_bytes)
            for g, (first, second) in zip(self.graphs, self.beside(shares, chosen), strict=True)
        )

    def lasting_bytes(self, shares: Sequence[Share]) -> int:
        """The most bytes that results and gradients take, under any plans."""
        results = [shares[g].lasting_bytes - shares[g].gradient_bytes for g in self.graphs]
        nothing = [replace(share.eager, held_bytes=0) for share in shares]
        beside = [second for _, second in self.beside(shares, nothing)]
        return max(
            sum(results[:place]) + beside[place] + shares[g].lasting_bytes
            for place, g in enumerate(self.graphs)
        )


def divide(
    shares: Sequence[Share], runs: Sequence[GraphsOfStep], budgets: Sequence[int]
) -> list[Takes]:
    """Return a plan for every graph so that each run fits its budget: the fastest combination
    found.

    Infeasible names the smallest budget of the run that does not fit.
    """
    eager = [share.eager for share in shares]
    frugal = [share.frugal for share in shares]
    for run, budget in zip(runs, budgets, strict=True):
        smallest = run.peak_bytes(shares, frugal)
        if smallest > budget:
            raise Infeasible(budget, smallest, f"a step of {len(run.graphs)} graphs")
    least = [run.peak_bytes(shares, frugal) for run in runs]
    most = [max(run.peak_bytes(shares, eager), low) for run, low in zip(runs, least, strict=True)]
    best = frugal
    for level in range(1, _LEVELS + 1):
        limits = [a + (b - a) * level // _LEVELS for a, b in zip(least, most, strict=True)]
        found = _fill(shares, runs, limits)
        if fits(shares, runs, found, budgets) and _time(runs, found) < _time(runs, best):
            best = found
    return best


def _fill(
    shares: Sequence[Share], runs: Sequence[GraphsOfStep], limits: Sequence[int]
) -> list[Takes]:
    """Start from the frugal plans and give one graph after the other a faster plan, always the one
    that saves most time for its memory, as long as all fits."""
    each = max(6, _PLANS // len(shares))
    menus = [_thinned(share.menu, each) for share in shares]
    chosen = [share.frugal for share in shares]
    count = [sum(run.graphs.count(graph) for run in runs) for graph in range(len(shares))]
    while True:
        steps = []
        for graph, plans in enumerate(menus):
            now = chosen[graph]
            for takes in plans:
                gain = (now.step_ns - takes.step_ns) * count[graph]
                if gain > 0:
                    price = max(1, (takes.held_bytes - now.held_bytes) * count[graph])
                    steps.append((gain / price, gain, graph, takes))
        for _, _, graph, takes in sorted(steps, key=lambda step: step[:3], reverse=True):
            tried = [*chosen[:graph], takes, *chosen[graph + 1 :]]
            if fits(shares, runs, tried, limits):
                chosen = tried
                break
        else:
            return chosen


def _thinned(plans: list[Takes], count: int) -> list[Takes]:
    """About `count` of the plans, at even distances, with the first and the last."""
    step = max(1, -(-len(plans) // count))
    return plans[::step]


def fits(
    shares: Sequence[Share],
    runs: Sequence[GraphsOfStep],
    chosen: Sequence[Takes],
    limits: Sequence[int],
) -> bool:
    """Does every run fit its limit with these plans?"""
    return all(
        run.peak_bytes(shares, chosen) <= limit for run, limit in zip(runs, limits, strict=True)
    )


def _time(runs: Sequence[GraphsOfStep], chosen: Sequence[Takes]) -> int:
    return sum(chosen[graph].step_ns for run in runs for graph in run.graphs)


def plan_frugally(
    captured: Captured,
    options: Options,
    step: TrainingStep,
    *,
    primals: Sequence[Any] | None = None,
    exchange: Exchange | None = None,
    torch_choices: Choices = tuple,
) -> tuple[Share, Report]:
    """Plan a graph that shares the budget with graphs that are not known yet."""
    captured, step, profiles, _ = agreed(captured, step, options, primals, exchange)
    problem = step.microbatch(captured.trace, merge_profiles(profiles))
    choices = tuple(torch_choices()) if options.solver == "torch" else ()
    share = Share(problem, options.solver, choices)
    (plan,) = decided(lambda: (share.frugal.plan,), exchange)
    return share, judged(step.name, problem, plan, profiles)


def plan_shares(
    found: Sequence[Report],
    shares: Sequence[Share],
    runs: Sequence[GraphsOfStep],
    options: Options,
    exchange: Exchange | None,
) -> list[Report]:
    """Plan all graphs of a model so that each of its steps, `runs`, fits the budget; `found` are
    the graphs' reports so far. In each new report the bytes that other graphs hold count as
    resident."""
    if exchange is not None:
        exchange.agree(
            "graphs of a step",
            repr([share.problem.trace.digest for share in shares]) + repr([r.graphs for r in runs]),
            "every rank must run the same model on inputs of the same shapes",
        )
    budgets = [budget_of(run, shares, options.memory_budget) for run in runs]

    def decide() -> tuple[Plan, ...]:
        if options.memory_budget is None:  # each graph may take its own eager peak
            alone = [Takes.of(s.problem, r.plan) for s, r in zip(shares, found, strict=True)]
            if fits(shares, runs, alone, budgets):
                return tuple(takes.plan for takes in alone)
        return tuple(takes.plan for takes in divide(shares, runs, budgets))

    try:
        plans = decided(decide, exchange)
    except Infeasible as error:
        run = runs[budgets.index(error.budget_bytes)]
        lasting = run.lasting_bytes(shares)
        raise as_given(error, options.memory_budget, lasting) from None
    chosen = [Takes.of(s.problem, plan) for s, plan in zip(shares, plans, strict=True)]
    beside = [(0, 0)] * len(shares)  # the most that others hold, and the budget of that moment
    for run, budget in zip(runs, budgets, strict=True):
        for graph, others in zip(run.graphs, run.beside(shares, chosen), strict=True):
            beside[graph] = max(beside[graph], (max(others), budget))
    reports = []
    for report, share, plan, (more, budget) in zip(found, shares, plans, beside, strict=True):
        held = share.problem.resident_bytes + more
        problem = replace(share.problem, budget_bytes=budget, resident_bytes=held)
        reports.append(judged(report.name, problem, plan, [problem.profile], given=True))
    return reports


def budget_of(run: GraphsOfStep, shares: Sequence[Share], budget: Budget) -> int:
    """The budget in bytes for the peak of a step of several graphs, by the rules of
    `parse_budget`."""
    eager = run.peak_bytes(shares, [share.eager for share in shares])
    eager = max(eager, run.peak_bytes(shares, [share.frugal for share in shares]))
    return parse_budget(budget, eager, min(eager, run.lasting_bytes(shares)))
