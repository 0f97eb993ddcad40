"""What a framework runs by itself, without overlapc: `alone` names the solvers that plan as it
does, `unplanned` says why overlapc plans no run of it."""

from __future__ import annotations

from overlapc.search.frameworks.framework import Framework
from overlapc.search.frameworks.known import MEGATRONS, OURS
from overlapc.search.models.transformer import Model, Transformer
from overlapc.solvers import PREFIX

# What Megatron runs of any model in the place of a plan of overlapc
BY_MEGATRON = ("megatron-none", "megatron-selective", "megatron-full")


def alone(framework: Framework, model: Model, solver: str = "") -> tuple[str, ...]:
    """The solvers whose plans the framework runs by itself: the asked one alone, if it is one of
    them. None of overlapc, which runs the plan of any solver."""
    if _first(framework) == OURS.name:
        return ()
    kinds = ("none", "full") if framework.pytorch else ("none", "selective", "full")
    found = [framework.plan(kind) for kind in kinds]
    by_module = not framework.pytorch and framework.hides_sums
    if solver in found or (by_module and solver.startswith(PREFIX)):
        return (solver,)
    if _first(framework) in MEGATRONS and isinstance(model, Transformer) and model.moe_layers:
        modules = ["mla_up_proj"] * bool(model.kv_rank) + ["moe_act"]
        found.insert(-1, PREFIX + "+".join(modules))
    return tuple(found)


def unplanned(framework: Framework, fp8: bool = False) -> str:
    """Why overlapc plans no run of this framework; nothing if it does."""
    first, *options = framework.name.split("+")
    if first == OURS.name:
        return ""
    if framework.gathers and framework.pytorch:
        return "PyTorch's FSDP gathers and sums around layers, which no plan of overlapc sees"
    if first not in MEGATRONS:
        return f"overlapc does not run in {first}"
    kinds = {
        "fsdp": "Megatron-FSDP",
        "cuda-graphs": "CUDA graphs",
        "tp-overlap": "--tp-comm-overlap",
        "deepep": "DeepEP",
        "hybridep": "HybridEP",
    }
    found = [kinds[option] for option in options if option in kinds] + ["FP8"] * fp8
    return f"overlapc.megatron plans no run with {' and '.join(found)}" if found else ""


def _first(framework: Framework) -> str:
    return framework.name.split("+")[0]
