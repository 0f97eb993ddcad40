"""`checkpointed` makes the plan of a model's own recompute, by `torch.utils.checkpoint`.

A graph has all ops of a checkpoint once, as if nothing were run again; PyTorch notes on each to
which checkpoint it belongs, and what its policy is. What such a model takes by itself is the
default budget.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from overlapc.ir import Plan, Problem
from overlapc.solvers.choice import Needs, plan_on_demand

if TYPE_CHECKING:
    from overlapc.passes.trace import Captured


class Region(NamedTuple):
    """Ops that a model runs again in its backward."""

    number: int
    keeps_outputs: bool = True


def checkpointed(captured: Captured) -> Callable[[Problem], Plan] | None:
    """Return a function that makes the plan of the model's checkpoints, or None without any."""
    regions: dict[str, Region] = {}
    saved: set[str] = set()
    for node in captured.joint.graph.nodes:
        policy = node.meta.get("recompute")
        if policy is not None and node.name in captured.trace.op:
            regions[node.name] = Region(node.meta.get("ac_graph_id", 0))
            if policy.name in ("MUST_SAVE", "PREFER_SAVE"):
                saved.add(node.name)
    return partial(plan_of_regions, regions, saved=saved) if regions else None


def plan_of_regions(
    regions: Mapping[str, Region], problem: Problem, saved: Collection[str] = ()
) -> Plan:
    """The plan that keeps the values that the backward reads, except those made inside regions, and
    the inputs of regions. What the ops of `saved` make is kept inside regions, too."""
    trace = problem.trace
    # storage -> the region that makes it
    made_in: dict[str, Region | None] = dict.fromkeys(trace.resident)
    taken_in: set[str] = set()
    seen_outside: set[str] = set()
    for op in trace.ops:
        if not op.is_forward:
            continue
        region = regions.get(op.name)
        for name in op.inputs:
            storage = trace.value[name].storage
            if made_in.get(storage) != region:
                seen_outside.add(storage)
                if region is not None:
                    taken_in.add(storage)
        again = op.recomputable and op.name not in saved
        for name in op.outputs:
            made_in.setdefault(trace.value[name].storage, region if again else None)
    seen_outside |= {trace.value[name].storage for name in trace.outputs}
    dropped = {
        storage
        for storage, region in made_in.items()
        if region is not None and not (region.keeps_outputs and storage in seen_outside)
    }
    needs = Needs(trace)
    kept = set(needs.storages) - dropped | taken_in
    return plan_on_demand(problem, kept, "own", needs)
