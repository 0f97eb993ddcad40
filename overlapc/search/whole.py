"""`as_it_runs` plans all blocks and ends of a layout, by the calls that `Pipeline` makes.

`evaluate` plans a few blocks that stand for all, so that many layouts can be tried. If the user's
function also gives what is before and behind the blocks, `as_it_runs` then plans the winner whole.
Given the same costs, `Pipeline` and `TrainStep` predict the same step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from overlapc.core.merge import at
from overlapc.core.pipeline import PipelineTimeline, StageCost, reduced, simulate_pipeline
from overlapc.core.schedule import Schedule, format_schedule
from overlapc.planning.options import Options
from overlapc.planning.report import Report
from overlapc.planning.rows import StageFigures, plan_rows
from overlapc.planning.stage import beside_bytes, plan_stage, stage_figures
from overlapc.profiler.hardware import load_hardware
from overlapc.search.chosen import memory_budgets
from overlapc.search.evaluate import Found, Outcome, RanPipeline, figures_of, gap_of
from overlapc.search.layouts import Cluster, Layout, expert_ranks
from overlapc.search.place import PlacedStage
from overlapc.search.replicas import Update
from overlapc.search.rows import Rows
from overlapc.search.weights import held_bytes
from overlapc.solvers import bound_ns
from overlapc.solvers.pipeline.schedules import in_pairs

if TYPE_CHECKING:
    from overlapc.passes.trace import Captured
    from overlapc.search.models.own import OwnModel


@dataclass(frozen=True)
class _Whole:
    """A captured stage, its transfers from and to other stages, and its parameters' bytes."""

    captured: Captured  # of one slice, if microbatches are cut
    draws: tuple[str, ...]  # what slices draw together
    may_pair: bool
    gradients: tuple[str, ...]
    received: tuple[str, ...]  # inputs that other stages send
    coming: int  # bytes of the activations among them
    going: int
    parameters: tuple[int, ...]


def as_it_runs(model: OwnModel, cluster: Cluster, found: Found, slices: int = 1) -> Outcome:
    """Plan what `Pipeline(slices=slices)` will plan for this layout and its split of the layers;
    raises Infeasible if that does not fit, and OptionError for random numbers that slices cannot
    draw together. The process must have no process groups, and has none afterwards."""
    from overlapc.search.groups import fake_groups

    layout = found.layout
    experts = expert_ranks(model, layout)
    joined = layout.tp > 1 or experts > 1
    merged = joined and layout.pp == 1 and found.microbatches > 1 and slices == 1
    found = replace(found, whole=True, rows="", merged=merged, slices=slices)
    schedule = found.asked
    budgets = memory_budgets(model, cluster, found)
    reports: list[list[Report]] = []
    figures: list[list[StageFigures]] = []
    with fake_groups(cluster.gpus, layout.tp, experts) as (*groups, _):
        for stage, budget in enumerate(budgets):
            captured = _captured(model, layout, stage, found.layers[stage], groups, slices)
            planned = _planned(cluster, found, schedule, stage, captured, budget)
            reports.append(planned[0])
            figures.append(planned[1])
    which, rows, _ = plan_rows(schedule, figures)
    return _outcome(
        model,
        cluster,
        found,
        rows,
        [of[i] for of, i in zip(reports, which, strict=True)],
        [of[i] for of, i in zip(figures, which, strict=True)],
    )


def _captured(
    model: OwnModel, layout: Layout, stage: int, layers: int, groups: Any, slices: int
) -> _Whole:
    """Capture a stage on fake tensors, traced as on its rank."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from overlapc.nn.layers import sliced
    from overlapc.passes.capture.front import capture
    from overlapc.passes.draws import drawing, draws_of, may_pair
    from overlapc.passes.emit.parts import parameter_gradients
    from overlapc.passes.exact.as_eager import as_eager

    is_first, is_last = stage == 0, stage == layout.stages - 1

    with FakeTensorMode(), as_eager():
        tokens = torch.zeros(layout.microbatch, model.seq, dtype=torch.long)
        part, x = model.stage(layers, is_first, is_last, tokens, *groups)

        def captured_of(count: int) -> Captured:
            rows = tokens[: layout.microbatch // count].contiguous()
            inputs = torch.zeros_like(x[: len(rows)], requires_grad=True)
            with sliced(count):
                return capture(part, rows if is_first else inputs, *([rows] if is_last else []))

        captured = captured_of(slices)
        draws: tuple[str, ...] = ()
        if slices > 1 and drawing(captured):
            draws = tuple(draws_of(captured, captured_of(1), slices))
    received = (
        *captured.trace.of_kind("batch")[: not is_first],
        *(() if is_last else captured.trace.of_kind("gradient")),
    )
    if slices > 1:
        received = tuple(at(name, k) for k in range(slices) for name in received)
    return _Whole(
        captured,
        draws,
        may_pair(captured),
        tuple(parameter_gradients(captured)),
        received,
        0 if is_first else x.nbytes,
        0 if is_last else x.nbytes,
        tuple(p.nbytes for p in part.parameters() if p.requires_grad),
    )


def _planned(
    cluster: Cluster,
    found: Found,
    schedule: Schedule,
    stage: int,
    whole: _Whole,
    budget: int,
) -> tuple[list[Report], list[StageFigures]]:
    machine, layout, slices = load_hardware(cluster.hardware), found.layout, found.slices
    beside = beside_bytes(schedule, stage, whole.coming, whole.going, slices > 1)
    options = Options(
        memory_budget=budget,
        solver=found.solver,
        profile="estimate",
        hardware=cluster.hardware,
        cache=cluster.costs or None,
    )
    reports = plan_stage(
        whole.captured,
        options,
        schedule,
        stage,
        beside_bytes=beside,
        gradients=whole.gradients,
        add_ns_per_kib=machine.add_ns_per_kib,
        slices=slices,
        draws=whole.draws,
        pairs=found.merged and whole.may_pair and layout.dp == 1,  # else `Pipeline` runs it
    )
    rank = schedule.rank_of[stage]
    near = 1 if layout.tp * layout.dp >= cluster.gpus_per_node else 2
    sent_ns = max(
        0 if schedule.rank_of.get(other, rank) == rank
        else machine.collective_ns("p2p", size, 2, near)
        for other, size in ((stage - 1, whole.coming), (stage + 1, whole.going))
    )  # fmt: skip
    here = layout.replicas_near(machine.gpus_per_node)
    average_ns = machine.average_ns(whole.parameters, layout.dp, here)
    return reports, stage_figures(reports, whole.received, sent_ns, beside, average_ns)


def _outcome(
    model: OwnModel,
    cluster: Cluster,
    found: Found,
    rows: Schedule,
    reports: Sequence[Report],
    figures: Sequence[StageFigures],
) -> Outcome:
    """Make the figures of the planned stages in their rows."""
    layout = found.layout
    costs = tuple(figure.cost for figure in figures)
    stages = [_stage(report, figure) for report, figure in zip(reports, figures, strict=True)]
    if reports[0].pair is not None:
        rows = in_pairs(found.microbatches)
    ranks = [[stages[stage] for stage in layout.stages_of(rank)] for rank in range(layout.pp)]
    static = held_bytes(model, cluster, layout, found.layers)

    def simulated(costs: Sequence[StageCost]) -> PipelineTimeline:
        """Simulate without the replicas' sums. Steps are merged if there is one rank with one
        stage."""
        return simulate_pipeline(rows, costs, stages[0].takes_ns, static)

    timeline = simulated(costs)
    silent_ns = simulated([replace(cost, sent_ns=0) for cost in costs]).step_ns
    peaks = [
        max(peak, *(beside + stage.peak_bytes for stage in mine))
        for peak, beside, mine in zip(timeline.peak_bytes, static, ranks, strict=True)
    ]
    ran = RanPipeline(
        costs,
        Rows(rows),
        timeline,
        tuple(peaks),
        timeline.step_ns,
        max(map(timeline.busy_ns, range(layout.pp))),
        timeline.step_ns - silent_ns,
    )
    update = replace(
        Update.of(model, cluster, layout, found.layers),
        reduce_ns=tuple(figure.reduce_ns for figure in figures),
    )
    count = found.microbatches
    told = figures_of(model, cluster, layout, found.solver, ranks, count, ran, update)
    told = replace(
        told,
        whole=True,
        slices=found.slices,
        gap=gap_of(stages, [bound_ns] * len(stages)),
        layers=found.layers,
        bound_ns=min(found.bound_ns, told.step_ns),
        rows=format_schedule(rows) if layout.pp > 1 else "",
        merged=any(stage.report.merged or stage.report.pair for stage in stages),
    )
    return Outcome(told, reduced(timeline, update.reduce_ns), tuple(stages), costs)


def _stage(report: Report, figure: StageFigures) -> PlacedStage:
    """Convert a planned stage to the search's `Stage`. Its peak is that of its merged graphs and
    pairs, without what its rank holds throughout."""
    peak_bytes = 0
    if report.merged or report.pair:
        peak_bytes = report.peak_bytes - report.problem.resident_bytes
    return PlacedStage(report, report.timeline, (figure.cost,), 1, peak_bytes)
