"""`Rows` predicts the time of a layout's rows: either from a few microbatches, which the others
repeat, or from all of them, with recompute and weight gradients placed as in `Pipeline`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

from overlapc.core.pipeline import StageCost, simulate_pipeline
from overlapc.core.schedule import Schedule
from overlapc.planning.rows import StageFigures, plan_rows
from overlapc.search.layouts import Layout
from overlapc.solvers.pipeline.rows import PATIENCE, through_time


@dataclass(frozen=True)
class Rows:
    """Rows of a few microbatches and, if the step has more, of one round fewer: their difference is
    the time of a round in the steady state."""

    few: Schedule
    fewer: Schedule | None = None

    @staticmethod
    def of(layout: Layout, count: int) -> Rows:
        """Make the rows for so many microbatches by the layout's schedule."""
        few = min(count, 4 * layout.pp)
        return Rows(layout.rows(few), layout.rows(few - layout.pp) if count > few else None)

    def last(self, costs: Sequence[StageCost], count: int, slowest_ns: int) -> int:
        """The time of so many microbatches, where each takes the slowest rank `slowest_ns`."""
        step_ns = simulate_pipeline(self.few, costs, trusted=True).step_ns
        if self.fewer is None:
            return step_ns
        round_ns = step_ns - simulate_pipeline(self.fewer, costs, trusted=True).step_ns
        each = max(round_ns / len(self.few.rows), slowest_ns)
        return step_ns + round(each * (count - self.few.microbatches))

    def through_time(
        self,
        costs: Sequence[StageCost],
        limits: Sequence[Sequence[int]],
        count: int,
        slowest_ns: int,
    ) -> Rows:
        """The fastest of these rows and, if weight gradients are separate, of a few rows made by
        going through time with the stages' costs, within each limit on memory."""
        ways = [self]
        if not any(action.kind == "W" for action in self.few.actions):
            return self
        for within, patience in product(limits, PATIENCE):
            few, fewer = (
                None if rows is None else through_time(rows, costs, within, patience)
                for rows in (self.few, self.fewer)
            )
            if few is not None and (fewer is None) == (self.fewer is None):
                ways.append(Rows(few, fewer))
        return min(ways, key=lambda way: way.last(costs, count, slowest_ns))


def waited(costs: Sequence[StageCost], between: Sequence[int]) -> tuple[StageCost, ...]:
    """The costs of stages whose ranks wait for so many nanoseconds with the next stage when a
    forward ends, and with the one before when a backward does. What is sent is there then."""
    before, behind = (0, *between), (*between, 0)
    return tuple(
        replace(
            cost,
            forward_ns=cost.forward_ns + behind[stage],
            input_ns=cost.input_ns + before[stage],
            whole_ns=cost.takes("B") + before[stage],
            sent_ns=0,
        )
        for stage, cost in enumerate(costs)
    )


def placed(
    schedule: Schedule, costs: Sequence[StageCost], limits: Sequence[int], random: bool
) -> Schedule:
    """Place the rows as `Pipeline` does for stages with one plan each. `limits` is the memory of
    each rank; `random`: stages draw random numbers."""
    _, rows, _ = plan_rows(schedule, figures(schedule, costs, limits, random))
    return rows


def figures(
    schedule: Schedule, costs: Sequence[StageCost], limits: Sequence[int], random: bool
) -> list[list[StageFigures]]:
    """Return the figures that the ranks of a `Pipeline` would exchange. A rank's whole memory is
    given to its first stage, since only the sum over its stages counts."""
    first = {rank: stage for stage, rank in sorted(schedule.rank_of.items(), reverse=True)}
    shares = {stage: limits[rank] for rank, stage in first.items()}
    return [
        [StageFigures(cost, 0, shares.get(stage, 0), random)] for stage, cost in enumerate(costs)
    ]


def least_ns(layout: Layout, costs: Sequence[StageCost], count: int) -> int:
    """Bound rows of these stages from below. A rank begins after the forwards of the stages before
    its first. It then runs all its work, or all but weight gradients, before the gradients go back
    through the earlier stages."""
    back = [c.recompute_ns + c.input_ns + c.weight_ns for c in costs]
    back = [min(c.whole_ns or full, full) for c, full in zip(costs, back, strict=True)]
    inputs = [min(full, c.recompute_ns + c.input_ns) for c, full in zip(costs, back, strict=True)]
    least = 0
    for rank in range(layout.pp):
        mine = layout.stages_of(rank)
        before = range(min(mine))
        fill = sum(costs[s].forward_ns + costs[s].sent_ns for s in before)
        forwards = sum(costs[s].forward_ns for s in mine)
        drain = sum(inputs[s] for s in before)
        least = max(
            least,
            fill + count * (forwards + sum(back[s] for s in mine)),
            fill + count * (forwards + sum(inputs[s] for s in mine)) + drain,
        )
    return least


__all__ = ["Rows", "figures", "least_ns", "placed"]
