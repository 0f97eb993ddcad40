"""`Report` has a plan and its predicted time and memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from overlapc.core.ir import Plan, Problem, Timeline
from overlapc.core.record import Record
from overlapc.planning.problem import eager_timeline
from overlapc.solvers import bound_ns
from overlapc.solvers.bound.bounds import simple_bound_ns

if TYPE_CHECKING:
    from overlapc.passes.trace import Captured


@dataclass(frozen=True, repr=False)
class Report(Record):
    """The plan of one microbatch, and its predicted timeline.

    For several microbatches the plan is that of the first forward and the last backward; `merged`
    has the plan of the merged steps between them, if merging pays. If a step in pairs is faster,
    `pair` has the plan of the first two forwards and of the last two backwards, in the place of
    the plan of one. For a batch in slices the plan is that of all slices.
    """

    name: str
    problem: Problem
    plan: Plan
    timeline: Timeline
    given: bool = False  # the user gave the plan: its bound may be of other costs
    microbatches: int = 1
    lag: int = 0  # distance of the microbatches that are merged
    merged: Report | None = None
    pair: Report | None = None
    slices: int = 1  # slices of each microbatch; the plan is that of all
    rank_peaks: tuple[int, ...] = ()  # of the step, where ranks or what they run differ in sizes

    @property
    def ends_ns(self) -> int:
        """How long the forwards and backwards take that are merged with nothing in the middle."""
        if self.pair is not None:
            return self.pair.timeline.step_ns
        return (self.lag if self.merged else self.microbatches) * self.timeline.step_ns

    @property
    def steady(self) -> int:
        """How often the merged plan runs."""
        return 0 if self.merged is None else self.microbatches - self.lag

    @property
    def step_ns(self) -> int:
        """How long the whole step takes."""
        merged_ns = 0 if self.merged is None else self.merged.timeline.step_ns
        return self.ends_ns + self.steady * merged_ns

    @property
    def step_ms(self) -> float:
        return self.step_ns / 1e6

    @property
    def peak_bytes(self) -> int:
        """How much the whole step holds at most, on the rank that holds most."""
        return max(self.rank_peaks or [part.timeline.peak_bytes for part in self.parts])

    @property
    def parts(self) -> list[Report]:
        """This report, and those of merged microbatches and of the ends in pairs if there are."""
        return [part for part in (self, self.merged, self.pair) if part is not None]

    @cached_property
    def eager(self) -> Timeline:
        """The timeline of the plan that saves all, in the graph's own order."""
        return eager_timeline(self.problem)

    @cached_property
    def bound_ns(self) -> int:
        """The least time of any plan of this problem; computed when it is first asked for."""
        return self.bounded_by(bound_ns)

    def bounded_by(self, bound: Callable[[Problem], int]) -> int:
        """`bound_ns`, where the problem's own bound is asked of this function."""
        if self.timeline.step_ns <= (least := simple_bound_ns(self.problem)):
            return least
        proven = 0 if self.given else self.plan.bound_ns
        return max(bound(self.problem), proven)

    def __repr__(self) -> str:
        return (
            f"<Report on {self.name}: {len(self.problem.trace.ops)} ops, solver "
            f"{self.plan.solver}, predicted {self.step_ms:.3f} ms and {self.peak_bytes:,} bytes; "
            "explain() says more>"
        )

    def explain(self) -> str:
        from overlapc.report.explain import explain

        if self.microbatches == 1:
            return explain(self)
        head = f"{self.microbatches} microbatches, {self.step_ms:.3f} ms predicted: "
        if self.merged is None and self.pair is None:
            return "\n\n".join([head + "each after the other", explain(self)])
        how, first = "merged", self
        if self.pair is not None:
            how = "in pairs: the first two forwards as one graph, and the last two backwards"
            first = replace(self.pair, rank_peaks=self.rank_peaks)
        return "\n\n".join([head + how, *(explain(part) for part in (first, self.merged) if part)])


@dataclass(frozen=True)
class StepPlan:
    """What `planning.road.plan` returns: the graph with measured sizes in its trace, and the
    report.

    `roomier` are reports on plans that leave room for more microbatches in the same budget.
    """

    captured: Captured
    report: Report
    roomier: tuple[Report, ...] = ()
