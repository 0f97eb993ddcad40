"""`plan_step` plans a training step that was traced as one graph, and puts it into the plan's order
in place."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

from torch import fx

from overlapc.core.errors import CaptureError, OverlapcError
from overlapc.passes.whole import WholeStep, is_flex
from overlapc.planning.options import Options
from overlapc.planning.problem import TrainingStep
from overlapc.planning.report import Report
from overlapc.planning.road import plan
from overlapc.ranks.groups import Attempts


def plan_step(
    graph: fx.GraphModule,
    gradients: Mapping[int, int],
    static: Collection[int],
    options: Options,
    attempts: Attempts,
) -> Report:
    """Plan a graph of forward, loss and backward, and order it so. `gradients` are the places of
    gradients among its results, by the place of the input that they are of; `static` the places of
    inputs that last from step to step. A CaptureError leaves the graph's ops in their
    order."""
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
                report = plan(
                    step.captured, options, TrainingStep("whole step"), exchange=exchange
                ).report
    except BaseException:
        if step is not None:
            step.restore()
        raise
    step.reorder(report.plan)
    return report


@contextmanager
def unforeseen_refuses() -> Iterator[None]:
    """Turn an error that nobody foresaw into a CaptureError."""
    try:
        yield
    except OverlapcError:
        raise
    except Exception as error:
        raise CaptureError(f"{type(error).__name__}: {error}") from error
