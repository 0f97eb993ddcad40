"""`Solved` says what the step of a recording's ranges would take: one by one, in the recording's
order, and merged as well as the solver can."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from overlapc.core.merge import merge
from overlapc.planning.report import Report
from overlapc.planning.road import judged
from overlapc.report.explain import Reasons
from overlapc.report.recordings.recorded import RecordedStep
from overlapc.report.table import table
from overlapc.solvers import solve
from overlapc.solvers.choose.choice import choice_of, plan_of


@dataclass(frozen=True)
class Solved:
    """A recorded step, and what plans of it are predicted to take."""

    step: RecordedStep
    alone: Report  # forward and then backward of one microbatch
    as_ran: Report  # merged, ops in the order of the recording
    merged: Report  # merged, the best plan found

    @staticmethod
    def of(step: RecordedStep) -> Solved:
        problem = merge(step.problem)
        alone = solve(step.problem, "heu")
        ran = plan_of(problem, choice_of(problem, alone), "recorded", step.order)
        ordered = [judged("merged", problem, plan) for plan in (solve(problem, "heu"), ran)]
        return Solved(
            step,
            judged("one by one", step.problem, alone),
            replace(ordered[1], name="in this order"),
            min(ordered, key=lambda report: report.step_ns),
        )

    def as_json(self) -> dict[str, Any]:
        plans = {
            report.name: {
                "step_ns": report.timeline.step_ns,
                "exposed_ns": report.timeline.exposed_ns,
                "bound_ns": report.bound_ns,
                "order": report.plan.order,
            }
            for report in (self.alone, self.as_ran, self.merged)
        }
        recorded = {"ran_ns": self.step.ran_ns, "idle_ns": self.step.idle_ns}
        left_out = {"ranges": self.step.ranges, "left_out_ns": self.step.left_out_ns}
        return {**recorded, **left_out, "plans": plans}

    def text(self, top: int) -> str:
        """What the step would take, each collective of the merged plan, and its order."""
        step, merged = self.step, self.merged
        lines = [
            f"ranges: {step.ranges['F']} of forward, {step.ranges['I']} of backward, "
            f"{step.ranges['W']} of weight gradients; {len(step.problem.trace.ops)} ops, each as "
            "long as its kernels took",
            f"  {_ms(step.left_out_ns)} ms of kernels are in no such range and are left out",
        ]
        rows: list[tuple[str, ...]] = [("one step", "ms", "exposed", "bound", "")]
        rows.append(
            ("recorded", _ms(step.ran_ns), "", "", f"{_ms(step.idle_ns)} ms without kernels")
        )
        told = (
            "a forward, then its backward",
            "a forward and an earlier backward, in the recording's order",
            "the same in the best order found",
        )
        for report, what in zip((self.alone, self.as_ran, merged), told, strict=True):
            ran = report.timeline
            figures = map(_ms, (ran.step_ns, ran.exposed_ns, report.bound_ns))
            rows.append((f"{report.name}, predicted", *figures, what))
        lines += table(rows, indent="  ")
        lines += ["", "merged, in order of issue (> start, < wait)"]
        lines += textwrap.wrap(
            " ".join(self._issues()), 100, initial_indent="  ", subsequent_indent="  "
        )
        worst = sorted(merged.timeline.exposures, key=lambda one: -one.exposed_ns)[:top]
        if worst:
            why = Reasons(merged.problem, merged.plan.order).why
            shown = [("collective", "ms", "exposed", "of", "why not less")]
            for one in worst:
                name = merged.problem.trace.modules[one.issue]
                shown.append((one.issue, _ms(one.comm_ns), _ms(one.exposed_ns), name, why(one)))
            lines += ["", *table(shown, indent="  ")]
        return "\n".join(lines)

    def _issues(self) -> Iterator[str]:
        """The merged plan's issues, by the names of their ranges; several kernels in a row once."""
        trace = self.merged.problem.trace
        signs = {"start": ">", "wait": "<"}
        named = (
            signs.get(trace.op[name].role, "") + trace.modules[name].replace(" ", "_")
            for name in self.merged.plan.order
        )
        yield from (name for name, _ in groupby(named))


def _ms(ns: int) -> str:
    return f"{ns / 1e6:.3f}"
