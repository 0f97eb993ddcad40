"""overlapc makes a PyTorch training step faster by doing useful work while the GPU would wait for
communication.

    model = overlapc.optimize(model, memory_budget="8GB")

    step = overlapc.TrainStep(model)      # several microbatches: step([batch, ...])

See `optimize` and `TrainStep`. `import overlapc` does not import torch; names that need it do, when
first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from overlapc import core
from overlapc.core.errors import Infeasible, OverlapcError
from overlapc.core.files import load_plan, save_plan
from overlapc.core.ir import Plan

if TYPE_CHECKING:
    from overlapc.api import optimize, predict
    from overlapc.planning.options import Options
    from overlapc.planning.report import Report
    from overlapc.runtime.hosted import PipelineSchedule
    from overlapc.runtime.pipeline import Pipeline
    from overlapc.runtime.train_step import TrainStep

__version__ = core.__version__

_LATER = {
    "Options": "overlapc.planning.options",
    "Pipeline": "overlapc.runtime.pipeline",
    "PipelineSchedule": "overlapc.runtime.hosted",
    "Report": "overlapc.planning.report",
    "TrainStep": "overlapc.runtime.train_step",
    "optimize": "overlapc.api",
    "predict": "overlapc.api",
}
__all__ = [
    "Infeasible",
    "Options",
    "OverlapcError",
    "Pipeline",
    "PipelineSchedule",
    "Plan",
    "Report",
    "TrainStep",
    "load_plan",
    "optimize",
    "predict",
    "save_plan",
]


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(import_module(_LATER[name]), name)
    raise AttributeError(f"module 'overlapc' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
