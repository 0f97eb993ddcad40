"""`write_into_new` lets kernels that are written in Triton write into new memory, as in eager.

Nothing changes in a traced graph, so a kernel that is launched there writes into copies of what it
is given. Eager gives it a new tensor for each result, empty or filled: there is nothing to copy.
`launched` makes these tensors itself. A trace also copies a tensor that is given under two names
twice; `launched` copies it once. Of two tensors that share a part of their memory only eager knows
what a kernel reads there: such a launch is refused.
"""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx
from torch._higher_order_ops.triton_kernel_wrap import (
    triton_kernel_wrapper_functional,
    triton_kernel_wrapper_mutation,
)
from torch._prims_common import clone_preserve_strides

from overlapc.core.errors import CaptureError
from overlapc.passes.nodes import line_of
from overlapc.passes.storages import extent, may_overlap

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
_MANY = 1 << 28  # elements of a storage that are looked at one by one


def write_into_new(joint: fx.GraphModule, by_inductor: bool = False) -> None:
    """Change the graph in place. Inductor, which knows the launch of a kernel, removes needless
    copies itself."""
    graph = joint.graph
    for node in graph.find_nodes(op="call_function", target=triton_kernel_wrapper_functional):
        given = node.kwargs["kwargs"]
        same = _same(node)
        if any(_overlap(given[a], given[b]) for a, b in _written_pairs(node)) or (
            by_inductor and same
        ):
            raise CaptureError(
                "a kernel written in Triton writes into memory that it is given under two names; "
                "expected tensors of their own",
                line_of(node),
            )
        made = {
            name: given[name]
            for name in node.kwargs["tensors_to_clone"]
            if _is_new_for(given[name], node)
        }
        if by_inductor or not (made or same):
            continue
        calls = {name: (str(n.target), n.args, n.kwargs) for name, n in made.items()}
        rest = {name: value for name, value in given.items() if name not in {**made, **same}}
        more = {"kwargs": rest, "order": list(given), "same": same}
        with graph.inserting_before(node):
            launch = graph.call_function(launched, (calls,), {**node.kwargs, **more})
        launch.meta = dict(node.meta)
        node.replace_all_uses_with(launch)
        for old in (node, *dict.fromkeys(made.values())):
            graph.erase_node(old)


def _written_pairs(node: fx.Node) -> list[tuple[str, str]]:
    """Names of arguments, two at a time, at least one of which is written into."""
    written = set(node.kwargs["tensors_to_clone"])
    pairs = combinations(node.kwargs["kwargs"], 2)
    return [pair for pair in pairs if not written.isdisjoint(pair)]


def _same(node: fx.Node) -> dict[str, str]:
    """Names of arguments that an earlier name stands for, too, if either is written into."""
    given = node.kwargs["kwargs"]
    same: dict[str, str] = {}
    for a, b in _written_pairs(node):
        if isinstance(given[a], fx.Node) and given[a] is given[b]:
            same.setdefault(b, same.get(a, a))
    return same


def _overlap(one: Any, other: Any) -> bool:
    """Do two different values share a part of their memory?"""
    if one is other or not all(isinstance(node, fx.Node) for node in (one, other)):
        return False
    a, b = one.meta.get("val"), other.meta.get("val")
    if not isinstance(a, Tensor) or not isinstance(b, Tensor) or not may_overlap(a, b):
        return False
    places = [n for t in (a, b) for n in (t.storage_offset(), *t.shape, *t.stride())]
    end = max(extent(a)[1], extent(b)[1]) // a.element_size()
    if any(type(n) is not int for n in places) or a.dtype != b.dtype or end > _MANY:
        return True  # for all that is known
    seen = np.zeros(end, dtype=bool)
    _part(seen, a)[...] = True
    return bool(_part(seen, b).any())


def _part(whole: Any, tensor: Tensor) -> Any:
    strides = [step * whole.itemsize for step in tensor.stride()]
    begin = whole[tensor.storage_offset() :]
    return np.lib.stride_tricks.as_strided(begin, tuple(tensor.shape), strides)


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
    same: dict[str, str],
    tensors_to_clone: list[str],
    **launch: Any,
) -> dict[str, Tensor]:
    """Launch a kernel: return the new tensors, and copies of others, that it wrote into. `same`
    says which name another one's tensor is given under, too."""
    given = dict(kwargs)
    for name in dict.fromkeys(same.get(name, name) for name in (*same, *tensors_to_clone)):
        given[name] = _made(*made[name]) if name in made else clone_preserve_strides(kwargs[name])
    given |= {name: given[other] for name, other in same.items()}
    triton_kernel_wrapper_mutation(kwargs={name: given[name] for name in order}, **launch)
    return {name: given[name] for name in tensors_to_clone}


def _made(op: str, args: Any, kwargs: Any) -> Tensor:
    found: Tensor = _NEW[op](*args, **kwargs)
    return found
