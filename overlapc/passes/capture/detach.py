"""What a forward keeps: tensors with a gradient that it sets attributes to, beside what it returns
(a layer's auxiliary loss, the weight that `weight_norm` makes).

Eager's have their history, which the backward of the loss frees. A graph's have none: `detach_kept`
cuts it off, so that the loss alone begins the backward. `with_history` gives them one whose
backward is an error, so that nothing that reads them later takes them for constants.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, fx


def detach_kept(module: fx.GraphModule, marks: Sequence[int | None]) -> tuple[int, ...]:
    """Detach the results of Dynamo's graph that require a gradient and have no mark; return their
    places. What the function returns is marked, or nothing is."""
    if all(mark is None for mark in marks):
        return ()
    output = module.graph.find_nodes(op="output")[0]
    results = list(output.args[0])
    kept = tuple(
        place
        for place, node in enumerate(results)
        if marks[place] is None and node.op != "placeholder" and _requires_gradient(node)
    )
    for place in kept:
        node = results[place]
        with module.graph.inserting_before(output):
            results[place] = module.graph.call_method("detach", (node,))
        results[place].meta = node.meta | {"example_value": node.meta["example_value"].detach()}
    if kept:
        output.args = (type(output.args[0])(results), *output.args[1:])
        module.recompile()
    return kept


def _requires_gradient(node: fx.Node) -> bool:
    value = node.meta.get("example_value")
    return isinstance(value, Tensor) and value.requires_grad


class _Kept(torch.autograd.Function):
    """A history that leads nowhere."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, _anchor: Tensor) -> Tensor:
        if value._is_view():
            return value.view_as(value)
        ctx.mark_dirty(value)  # else it would become a view, which may not be changed in place
        return value

    @staticmethod
    def backward(_ctx: Any, *_gradients: Tensor) -> Any:
        raise RuntimeError(
            "a backward reached a tensor that a module kept of an earlier forward, whose own "
            "backward overlapc has run; expected what is kept to be read in the same forward, or "
            "detached: x.detach()"
        )


def with_history(results: Sequence[Any], kept: Collection[int]) -> Sequence[Any]:
    """The results of a call, of which those kept require a gradient, as eager's do."""
    if not kept:
        return results
    anchor = torch.zeros((), requires_grad=True)
    with torch.enable_grad():
        return [
            _Kept.apply(result, anchor) if place in kept else result
            for place, result in enumerate(results)
        ]
