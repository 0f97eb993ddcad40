"""`plan_step` plans a training step that was traced as one graph, and puts it into the plan's order
in place."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager

from torch import fx

from overlapc.core.errors import CaptureError, Infeasible, OverlapcError
from overlapc.passes.buckets import fuse
from overlapc.passes.whole import WholeStep, is_flex
from overlapc.planning.options import Options
from overlapc.planning.problem import TrainingStep
from overlapc.planning.report import Report
from overlapc.planning.road import plan
from overlapc.ranks.groups import Attempts

_LITTLE = 0.01  # of a step: collectives that keep it waiting no longer stay as they are


def plan_step(
    graph: fx.GraphModule,
    gradients: Mapping[int, int],
    static: Collection[int],
    options: Options,
    attempts: Attempts,
    path_of: Callable[[fx.Node], str] | None = None,
) -> Report:
    """Plan a graph of forward, loss and backward, and order it so. `gradients` are the places of
    gradients among its results, by the place of the input that they are of; `static` the places of
    inputs that last from step to step. With `path_of`, which says in which module a node is, the
    collectives of each block may become one, where that is faster. A CaptureError leaves the
    graph's ops in their order."""

    def planned(given: fx.GraphModule) -> tuple[WholeStep, Report]:
        return _planned(given, gradients, static, options, attempts)

    fused, groups = None, set[str]()
    if path_of is not None:
        with unforeseen_refuses():
            fused = copy.deepcopy(graph)
            groups = fuse(fused, path_of)
    step, report = planned(graph)
    waits = sum(each.exposed_ns for each in report.timeline.exposures if each.lane in groups)
    if fused is not None and waits > _LITTLE * report.step_ns:
        try:
            other, another = planned(fused)
        except (CaptureError, Infeasible):  # on all ranks: what takes a bucket takes more memory
            another = report
        if another.step_ns < report.step_ns:
            other.reorder(another.plan)
            graph.graph = fused.graph
            return another
    step.reorder(report.plan)
    return report


def _planned(
    graph: fx.GraphModule,
    gradients: Mapping[int, int],
    static: Collection[int],
    options: Options,
    attempts: Attempts,
) -> tuple[WholeStep, Report]:
    """The step as a joint graph, and its plan."""
    step = None
    try:
        with unforeseen_refuses():
            if options.profile == "measure" and any(map(is_flex, graph.graph.nodes)):
                raise CaptureError(
                    "flex attention has no kernel to measure before Inductor compiles it; expected "
                    'profile="estimate" and hardware='
                )
            step = WholeStep(graph, gradients, static)
            groups = step.captured.trace.groups
            with attempts.exchange_for(groups, options.timeout_s) as exchange:
                found = plan(step.captured, options, TrainingStep("whole step"), exchange=exchange)
            return step, found.report
    except BaseException:
        if step is not None:
            step.restore()
        raise


@contextmanager
def unforeseen_refuses() -> Iterator[None]:
    """Turn an error that nobody foresaw into a CaptureError."""
    try:
        yield
    except OverlapcError:
        raise
    except Exception as error:
        raise CaptureError(f"{type(error).__name__}: {error}") from error
