"""`without_identities` removes ops from a joint graph that return their input unchanged.

`detach` and views of the same shape matter only to autograd and to callers, which a graph does not
have; a collective in a group of one returns its input. A copy is needed where something is changed
in place later, which no op of the graph does: autograd's gradient of an op in place on a view has
three copies, each with a kernel or two. Fewer ops make planning faster, too.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.fx.experimental.symbolic_shapes import statically_known_true

from overlapc.passes.nodes import group_of, is_start, is_wait
from overlapc.passes.trace import may_alias

aten = torch.ops.aten
_VIEWS = (
    aten.view.default,
    aten._unsafe_view.default,
    aten.detach.default,
    aten.alias.default,
    aten.expand.default,
)
_EMPTY = (
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
)
_SHAPES = (aten.view.default, aten._unsafe_view.default)
_NAMESPACES = ("aten", "prims", "_c10d_functional", "_c10d_functional_autograd")
_OF_ONE = ("all_reduce.", "all_gather_into_tensor.", "reduce_scatter_tensor.", "all_to_all_single.")


def without_identities(joint: fx.GraphModule) -> None:
    """Change the graph in place. Its results stay separate values."""
    results = set(joint.graph.find_nodes(op="output")[0].all_input_nodes)
    outside = _outside(joint.graph, results)
    for node in list(joint.graph.nodes):
        if node.op != "call_function" or node in results:
            continue
        _seen_through(node)
        if node.target in _VIEWS and _alike(node, node.args[0]):
            node.replace_all_uses_with(node.args[0])
            joint.graph.erase_node(node)
        elif (copied := _copied(node)) is not None and not outside & {node, _root(copied)}:
            node.replace_all_uses_with(copied)
            joint.graph.erase_node(node)
        elif is_wait(node) and _of_one(node.args[0]) and _alike(node, node.args[0].args[0]):
            start = node.args[0]
            node.replace_all_uses_with(start.args[0])
            joint.graph.erase_node(node)
            joint.graph.erase_node(start)
    for node in reversed(joint.graph.nodes):
        if node.target in (*_VIEWS, *_EMPTY) and not node.users:
            joint.graph.erase_node(node)
    joint.recompile()


def _seen_through(node: fx.Node) -> None:
    """Replace a view of a view of a contiguous tensor by a view of that tensor."""
    while node.target in _SHAPES and node.args[0].target in _SHAPES:
        whole = node.args[0].args[0].meta.get("val")
        if not isinstance(whole, Tensor) or not whole.is_contiguous():
            return
        node.args = (node.args[0].args[0], *node.args[1:])


def _outside(graph: fx.Graph, results: set[fx.Node]) -> set[fx.Node]:
    """The roots of what others may change: inputs, constants, results, and what is given to ops
    that are not PyTorch's, which may run whole modules."""
    given = {node for node in graph.nodes if node.op in ("placeholder", "get_attr")}
    shown = set(results)
    for node in graph.nodes:
        if node.op == "call_function" and not _is_torchs(node.target):
            shown.update(node.all_input_nodes)
    return given | {_root(node) for node in shown}


def _is_torchs(target: Any) -> bool:
    return target is operator.getitem or getattr(target, "namespace", "") in _NAMESPACES


def _root(node: fx.Node) -> fx.Node:
    """The node whose storage a value may share."""
    while node.op == "call_function" and (node.target is operator.getitem or may_alias(node)):
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
    if not isinstance(given, fx.Node) or not _alike(node, given):
        return None
    one, other = node.meta["val"], given.meta["val"]
    whole = statically_known_true(other.storage_offset() == 0) and statically_known_true(
        other.untyped_storage().nbytes() == other.numel() * other.itemsize
    )
    return given if whole and one.device == other.device else None


def _of_one(start: fx.Node) -> bool:
    if not is_start(start) or len(start.users) > 1:
        return False
    kind = str(start.target).partition(".")[2]
    return kind.startswith(_OF_ONE) and _resolve_process_group(group_of(start)).size() == 1


def _alike(one: fx.Node, other: fx.Node) -> bool:
    """Do both have one shape, in one layout?"""
    values = one.meta.get("val"), other.meta.get("val")
    if not all(isinstance(value, Tensor) for value in values):
        return False
    first, second = values
    if first.dtype != second.dtype or first.dim() != second.dim():
        return False
    pairs = [*zip(first.shape, second.shape, strict=True)]
    pairs += zip(first.stride(), second.stride(), strict=True)
    return all(statically_known_true(a == b) for a, b in pairs)
