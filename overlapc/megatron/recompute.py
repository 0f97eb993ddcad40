"""Megatron's recompute arguments set the default budget: the memory that they would keep.

A script asks for recompute with recompute_granularity, _method, _num_layers and _modules. In every
version these lead to a few functions: `checkpoint`, which keeps a function's inputs and outputs,
and `CheckpointWithoutOutput`, which keeps its inputs alone. While a chunk is traced, `stand_ins`
replace them: they run the function without recompute, and note on the graph's nodes to which
*region* of recompute an op belongs. `own_plan` is then the plan of the script's arguments on the
captured graph.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from itertools import count
from typing import Any

from torch import Tensor, nn
from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput
from torch.fx.traceback import annotate, current_meta
from torch.utils._pytree import tree_map_only

from overlapc.core.errors import CaptureError
from overlapc.core.ir import Plan, Problem
from overlapc.passes.nodes import primal_nodes
from overlapc.passes.trace import Captured
from overlapc.planning.own import RecomputedRegion, plan_of_regions

_KEY = "megatron recompute"


def stand_ins() -> Iterator[tuple[Any, str, Any]]:
    """Return each of Megatron's recompute functions, by module and name, with its replacement."""
    numbers = count()

    def run(keeps_outputs: bool, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not any(isinstance(given, Tensor) and given.requires_grad for given in args):
            # Recompute is an autograd Function: what it returns requires no gradient then.
            return tree_map_only(Tensor, Tensor.detach, function(*args, **kwargs))
        # Recompute sums the gradients of an input's uses inside before it adds those outside.
        args, kwargs = tree_map_only(Tensor, lambda given: given.view_as(given), (args, kwargs))
        # a nested region: the outer one decides what is kept
        if _KEY in current_meta.get("custom", {}):
            return function(*args, **kwargs)
        with annotate({_KEY: RecomputedRegion(next(numbers), keeps_outputs)}):
            return function(*args, **kwargs)

    def checkpoint(function: Callable[..., Any], distribute: Any, *args: Any) -> Any:
        return run(True, function, *args)

    def te_checkpoint(
        function: Callable[..., Any],
        distribute: Any,
        tracker: Any,
        group: Any,
        *args: Any,
        **kw: Any,
    ) -> Any:
        return run(True, function, *args, **kw)

    class CheckpointWithoutOutput:
        def __init__(self, *_: Any, **__: Any) -> None: ...

        def checkpoint(self, function: Callable[..., Any], *args: Any) -> Any:
            return run(False, function, *args)

        def discard_output_and_register_recompute(self, hook_tensor: Any) -> None: ...

    random = import_module("megatron.core.tensor_parallel.random")
    yield random, "checkpoint", checkpoint
    yield random, "CheckpointWithoutOutput", CheckpointWithoutOutput
    engine = sys.modules.get("megatron.core.extensions.transformer_engine")
    if engine is not None:
        yield engine, "te_checkpoint", te_checkpoint


def own_plan(captured: Captured) -> Callable[[Problem], Plan] | None:
    """Return a function that makes the plan of the script's own recompute, or None without
    recompute."""
    noted_at = {
        node.name: region
        for node in captured.joint.graph.nodes
        if (region := node.meta.get("custom", {}).get(_KEY)) is not None
    }
    regions = {op.name: noted_at[op.name] for op in captured.trace.ops if op.name in noted_at}
    return partial(plan_of_regions, regions) if regions else None


def refuse_changes(captured: Captured, model: nn.Module) -> None:
    """Raise a CaptureError if a region changes a buffer: Megatron runs regions twice, a graph once.
    (Megatron's own modules change theirs in one of the two runs.)"""
    names = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
    inputs = [node.meta.get("desc") for node in primal_nodes(captured.joint)]
    output = captured.joint.graph.find_nodes(op="output")[0]
    for node, desc in zip(output.args[0], output.meta["desc"], strict=True):
        is_change = isinstance(desc, InputMutationAOTOutput)
        if not is_change or _KEY not in node.meta.get("custom", {}):
            continue
        place = inputs.index(desc.mutated_input)
        name = names[place] if place < len(names) else "of an argument"
        owner = model.get_submodule(name.rpartition(".")[0]) if place < len(names) else None
        if not type(owner).__module__.startswith("megatron."):
            raise CaptureError(
                f"forward changes the buffer {name} where Megatron recomputes: that is two changes "
                "there, and a graph would make one"
            )
