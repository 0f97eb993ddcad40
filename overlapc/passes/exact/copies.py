"""`without_copies` removes copies from a joint graph that nothing changes.

A copy is needed where something is changed in place later, which no op of the graph does.
Autograd's gradient of an op in place on a view has three copies, each with a kernel or two. A copy
stays

- if it lies in memory otherwise than its original, or may: tangents come as the caller has them;
- if its original is kept alive by less than all of its storage;
- if the original, or the copy, is what others have, too, and may change: inputs, constants,
  results, and what is given to ops that are not PyTorch's, which may run whole modules.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from overlapc.passes.nodes import is_tangent
from overlapc.passes.trace import may_alias

aten = torch.ops.aten
_NAMESPACES = ("aten", "prims", "_c10d_functional", "_c10d_functional_autograd")
_EMPTY = (
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
)
# Their results lie as their shapes say, however their inputs lie.
_SETTLING = (
    *_EMPTY,
    aten.mm.default,
    aten.bmm.default,
    aten.addmm.default,
    aten.baddbmm.default,
    aten._softmax_backward_data.default,
    aten.native_layer_norm_backward.default,
)
# Views, though their schemas do not say so.
_UNSAFE = ("aten.unsafe_split.", "aten.unsafe_split_with_sizes.", "aten.unsafe_chunk.")


def without_copies(graph: fx.Graph, results: set[fx.Node]) -> None:
    """Change the graph in place."""
    outside, unsettled = _outside(graph, results), _unsettled(graph)
    for node in list(graph.nodes):
        copied = _copied(node)
        if copied is None or copied in unsettled or node in results:
            continue
        if not outside & {node, _root(copied)}:
            node.replace_all_uses_with(copied)
            graph.erase_node(node)
    for node in reversed(graph.nodes):
        if node.target in _EMPTY and not node.users:
            graph.erase_node(node)


def alike(one: fx.Node, other: fx.Node) -> bool:
    """Do both have one shape, in one layout?"""
    values = one.meta.get("val"), other.meta.get("val")
    if not all(isinstance(value, Tensor) for value in values):
        return False
    first, second = values
    if first.dtype != second.dtype or first.dim() != second.dim():
        return False
    if not first.layout == second.layout == torch.strided:
        return False
    pairs = [*zip(first.shape, second.shape, strict=True)]
    pairs += zip(first.stride(), second.stride(), strict=True)
    return all(statically_known_true(a == b) for a, b in pairs)


def _outside(graph: fx.Graph, results: Iterable[fx.Node]) -> set[fx.Node]:
    """The roots of what others have, too."""
    given = {node for node in graph.nodes if node.op in ("placeholder", "get_attr")}
    shown = set(results)
    for node in graph.nodes:
        if node.op == "call_function" and not _is_torchs(node.target):
            shown.update(node.all_input_nodes)
    return given | {_root(node) for node in shown}


def _is_torchs(target: Any) -> bool:
    return target is operator.getitem or getattr(target, "namespace", "") in _NAMESPACES


def _unsettled(graph: fx.Graph) -> set[fx.Node]:
    """What may lie otherwise than it was traced, as the tangents may."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if is_tangent(node):
            found.add(node)
        elif node.target is aten.copy.default:
            found.update({node} if node.args[0] in found else ())
        elif node.target not in _SETTLING and not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def _root(node: fx.Node) -> fx.Node:
    """The node whose storage a value may share; of ops of several inputs, their first."""
    while node.op == "call_function" and (
        node.target is operator.getitem or may_alias(node) or str(node.target).startswith(_UNSAFE)
    ):
        node = node.all_input_nodes[0]
    return node


def _copied(node: fx.Node) -> fx.Node | None:
    """What an op copies, if that is a whole storage and the copy lies in memory alike."""
    if node.target is aten.clone.default:
        given = node.args[0]
    elif node.target is aten.copy.default:
        given = node.args[1]
    else:
        return None
    if not isinstance(given, fx.Node) or not alike(node, given):
        return None
    one, other = node.meta["val"], given.meta["val"]
    if one.device != other.device or other.is_conj() or other.is_neg():
        return None
    begins = statically_known_true(other.storage_offset() == 0)
    size = other.numel() * other.itemsize
    return given if begins and statically_known_true(_storage_bytes(other) == size) else None


def _storage_bytes(value: Tensor) -> Any:
    return value.untyped_storage().nbytes()
