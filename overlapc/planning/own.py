"""`checkpointed` makes the plan of a model's own recompute: by `torch.utils.checkpoint`, and of
FSDP2's groups that are gathered again for the backward.

A graph has all ops of a checkpoint once, as if nothing were run again; PyTorch notes on each to
which checkpoint it belongs, and what its policy is. What such a model takes by itself is the
default budget.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from overlapc.core.ir import Plan, Problem
from overlapc.solvers.choose.choice import Needs, plan_on_demand

if TYPE_CHECKING:
    from overlapc.passes.trace import Captured


_KEPT = -1  # full parameters that eager keeps for the backward


class RecomputedRegion(NamedTuple):
    """Ops that a model runs again in its backward."""

    number: Any
    keeps_outputs: bool = True


def checkpointed(captured: Captured) -> Callable[[Problem], Plan] | None:
    """Return a function that makes the plan of the model's own recompute, or None without any."""
    regions = _gathers(captured)
    saved: set[str] = set()
    for node in captured.joint.graph.nodes:
        policy = node.meta.get("recompute")
        if policy is not None and node.name in captured.trace.op:
            regions[node.name] = RecomputedRegion(node.meta.get("ac_graph_id", 0))
            if policy.name in ("MUST_SAVE", "PREFER_SAVE"):
                saved.add(node.name)
    return partial(plan_of_regions, regions, saved=saved) if regions else None


def gathered_again(captured: Captured) -> Callable[[Problem], Plan] | None:
    """Return a function that makes the plan that keeps all but the full parameters that FSDP2
    gathers again, or None without any."""
    regions = _gathers(captured)
    return partial(plan_of_regions, regions) if regions else None


def gathered_bytes(captured: Captured) -> int:
    """The bytes of full parameters that FSDP2 holds at a time: of the groups that it keeps, and of
    the two largest others, of which one runs while the next is gathered. 0 without any. A fraction
    of activations does not count them."""
    trace, each = captured.trace, dict[int, dict[str, int]]()
    for name, number in _group_of(captured).items():
        held = each.setdefault(number, {})
        for output in trace.op[name].outputs:
            value = trace.value[output]
            held[value.storage] = max(held.get(value.storage, 0), value.bytes)
    sums = {number: sum(held.values()) for number, held in each.items()}
    return sums.pop(_KEPT, 0) + sum(sorted(sums.values())[-2:])


def _gathers(captured: Captured) -> dict[str, RecomputedRegion]:
    return {
        name: RecomputedRegion(("gather", number), keeps_outputs=False)
        for name, number in _group_of(captured).items()
        if number != _KEPT
    }


def _group_of(captured: Captured) -> dict[str, int]:
    """Ops that gather parameters, with the number of their group."""
    from overlapc.passes.capture.marks import group_gathered

    numbers = {node.name: group_gathered(node) for node in captured.joint.graph.nodes}
    return {
        op.name: number
        for op in captured.trace.ops
        if op.is_forward and (number := numbers.get(op.name)) is not None
    }


def plan_of_regions(
    regions: Mapping[str, RecomputedRegion], problem: Problem, saved: Collection[str] = ()
) -> Plan:
    """The plan that keeps the values that the backward reads, except those made inside regions, and
    the inputs of regions. What the ops of `saved` make is kept inside regions, too."""
    trace = problem.trace
    # storage -> the region that makes it
    made_in: dict[str, RecomputedRegion | None] = dict.fromkeys(trace.resident)
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
