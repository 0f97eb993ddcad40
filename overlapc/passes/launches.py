"""`write_into_new` lets kernels that are written in Triton write into new memory, as in eager.

Nothing changes in a traced graph, so a kernel that is launched there writes into copies of what it
is given. Eager gives it a new tensor for each result, empty or filled: there is nothing to copy.
`launched` makes these tensors itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch._higher_order_ops.triton_kernel_wrap import (
    triton_kernel_wrapper_functional,
    triton_kernel_wrapper_mutation,
)
from torch._prims_common import clone_preserve_strides

aten = torch.ops.aten
_NEW = {
    str(op): op
    for op in (
        aten.empty.memory_format,
        aten.empty_like.default,
        aten.empty_strided.default,
        aten.new_empty.default,
        aten.new_empty_strided.default,
        aten.zeros.default,
        aten.zeros_like.default,
        aten.new_zeros.default,
        aten.full.default,
        aten.full_like.default,
        aten.new_full.default,
    )
}


def write_into_new(joint: fx.GraphModule) -> None:
    """Change the graph in place."""
    graph = joint.graph
    for node in graph.find_nodes(op="call_function", target=triton_kernel_wrapper_functional):
        given = node.kwargs["kwargs"]
        made = {
            name: given[name]
            for name in node.kwargs["tensors_to_clone"]
            if _is_new_for(given[name], node)
        }
        if not made:
            continue
        calls = {name: (str(n.target), n.args, n.kwargs) for name, n in made.items()}
        rest = {name: value for name, value in given.items() if name not in made}
        with graph.inserting_before(node):
            launch = graph.call_function(
                launched, (calls,), {**node.kwargs, "kwargs": rest, "order": list(given)}
            )
        launch.meta = dict(node.meta)
        node.replace_all_uses_with(launch)
        for old in (node, *dict.fromkeys(made.values())):
            graph.erase_node(old)


def _is_new_for(value: Any, node: fx.Node) -> bool:
    if not isinstance(value, fx.Node) or str(value.target) not in _NEW:
        return False
    given = [one for one in node.kwargs["kwargs"].values() if one is value]
    return list(value.users) == [node] and len(given) == 1


def launched(
    made: dict[str, Any],
    *,
    kwargs: dict[str, Any],
    order: list[str],
    tensors_to_clone: list[str],
    **launch: Any,
) -> dict[str, Tensor]:
    """Launch a kernel: return the new tensors, and copies of others, that it wrote into."""
    written = {
        name: _made(*made[name]) if name in made else clone_preserve_strides(kwargs[name])
        for name in tensors_to_clone
    }
    given = {**kwargs, **written}
    triton_kernel_wrapper_mutation(kwargs={name: given[name] for name in order}, **launch)
    return written


def _made(op: str, args: Any, kwargs: Any) -> Tensor:
    found: Tensor = _NEW[op](*args, **kwargs)
    return found
