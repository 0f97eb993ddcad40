"""What was decided: `Report` for one graph, `StepReport` for a step of several microbatches."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from overlapc.ir import Plan, Problem, Timeline
from overlapc.solvers import bound_ns
from overlapc.solvers.bounds import simple_bound_ns


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
