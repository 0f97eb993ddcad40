"""overlapc: hide recomputation and weight gradients under communication, with exact gradients.

    model = overlapc.optimize(model, memory_budget="8GB")

See `optimize`. Names are imported when first used: `import overlapc` does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from overlapc.api import capture, optimize, plan, rewrite
    from overlapc.check import check
    from overlapc.errors import OverlapcError
    from overlapc.files import load_plan, save_plan
    from overlapc.ir import Plan, Problem, Timeline, Trace
    from overlapc.planning import Report
    from overlapc.simulate import simulate
    from overlapc.solvers import solve

__version__ = "0.1.0"

_HOME = {
    "OverlapcError": "overlapc.errors",
    "Plan": "overlapc.ir",
    "Problem": "overlapc.ir",
    "Report": "overlapc.planning",
    "Timeline": "overlapc.ir",
    "Trace": "overlapc.ir",
    "capture": "overlapc.api",
    "check": "overlapc.check",
    "load_plan": "overlapc.files",
    "optimize": "overlapc.api",
    "plan": "overlapc.api",
    "rewrite": "overlapc.api",
    "save_plan": "overlapc.files",
    "simulate": "overlapc.simulate",
    "solve": "overlapc.solvers",
}
__all__ = [
    "OverlapcError",
    "Plan",
    "Problem",
    "Report",
    "Timeline",
    "Trace",
    "capture",
    "check",
    "load_plan",
    "optimize",
    "plan",
    "rewrite",
    "save_plan",
    "simulate",
    "solve",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'overlapc' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
