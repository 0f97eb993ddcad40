"""overlapc runs recompute and weight gradients while communication is on its way; gradients stay
exact.

    model = overlapc.optimize(model, memory_budget="8GB")

    step = overlapc.TrainStep(model)      # several microbatches: step([batch, ...])

See `optimize` and `TrainStep`. `import overlapc` does not import torch; names that need it do, when
first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

# Two functions have their module's name, so they must be bound before anything imports the module.
from overlapc.core.check import check
from overlapc.core.errors import Infeasible, OverlapcError
from overlapc.core.files import load_plan, save_plan
from overlapc.core.ir import Plan, Problem, Timeline, Trace
from overlapc.core.simulate import simulate

if TYPE_CHECKING:
    from overlapc.api import capture, optimize, plan, rewrite
    from overlapc.planning.options import Options
    from overlapc.planning.report import Report
    from overlapc.runtime.hosted import PipelineSchedule
    from overlapc.runtime.pipeline import Pipeline
    from overlapc.runtime.train_step import TrainStep
    from overlapc.search.chosen import load_search
    from overlapc.search.models.own import Repeats
    from overlapc.solvers import solve

__version__ = "0.1.0"

_LATER = {
    "Options": "overlapc.planning.options",
    "Pipeline": "overlapc.runtime.pipeline",
    "PipelineSchedule": "overlapc.runtime.hosted",
    "Repeats": "overlapc.search.models.own",
    "Report": "overlapc.planning.report",
    "TrainStep": "overlapc.runtime.train_step",
    "capture": "overlapc.api",
    "load_search": "overlapc.search.chosen",
    "optimize": "overlapc.api",
    "plan": "overlapc.api",
    "rewrite": "overlapc.api",
    "solve": "overlapc.solvers",
}
__all__ = [
    "Infeasible",
    "Options",
    "OverlapcError",
    "Pipeline",
    "PipelineSchedule",
    "Plan",
    "Problem",
    "Repeats",
    "Report",
    "Timeline",
    "Trace",
    "TrainStep",
    "capture",
    "check",
    "load_plan",
    "load_search",
    "optimize",
    "plan",
    "rewrite",
    "save_plan",
    "simulate",
    "solve",
]


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(import_module(_LATER[name]), name)
    raise AttributeError(f"module 'overlapc' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
