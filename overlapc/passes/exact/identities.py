"""`without_identities` removes ops from a joint graph that return their input unchanged.

`detach` and views of the same shape matter only to autograd and to callers, which a graph does not
have; a collective in a group of one returns its input. So do copies that nothing changes
(`overlapc.passes.exact.copies`). Fewer ops make planning faster.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx
from torch.distributed.distributed_c10d import _resolve_process_group

from overlapc.passes.exact.copies import alike, without_copies
from overlapc.passes.nodes import group_of, is_start, is_wait

aten = torch.ops.aten
_VIEWS = (
    aten.view.default,
    aten._unsafe_view.default,
    aten.detach.default,
    aten.alias.default,
    aten.expand.default,
)
_SHAPES = (aten.view.default, aten._unsafe_view.default)
_OF_ONE = ("all_reduce.", "all_gather_into_tensor.", "reduce_scatter_tensor.", "all_to_all_single.")


def without_identities(joint: fx.GraphModule) -> None:
    """Change the graph in place. Its results stay separate values."""
    results = set(joint.graph.find_nodes(op="output")[0].all_input_nodes)
    _drop(joint.graph, results)
    without_copies(joint.graph, results)
    _drop(joint.graph, results)  # views of views that copies stood between
    joint.recompile()


def _drop(graph: fx.Graph, results: set[fx.Node]) -> None:
    for node in list(graph.nodes):
        if node.op != "call_function" or node in results:
            continue
        _seen_through(node)
        if node.target in _VIEWS and alike(node, node.args[0]):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        elif is_wait(node) and _of_one(node.args[0]) and alike(node, node.args[0].args[0]):
            start = node.args[0]
            node.replace_all_uses_with(start.args[0])
            graph.erase_node(node)
            graph.erase_node(start)
    for node in reversed(graph.nodes):
        if node.target in _VIEWS and not node.users:
            graph.erase_node(node)


def _seen_through(node: fx.Node) -> None:
    """Replace a view of a view of a contiguous tensor by a view of that tensor."""
    while node.target in _SHAPES and node.args[0].target in _SHAPES:
        whole = node.args[0].args[0].meta.get("val")
        if not isinstance(whole, Tensor) or not whole.is_contiguous():
            return
        node.args = (node.args[0].args[0], *node.args[1:])


def _of_one(start: fx.Node) -> bool:
    if not is_start(start) or len(start.users) > 1:
        return False
    kind = str(start.target).partition(".")[2]
    return kind.startswith(_OF_ONE) and _resolve_process_group(group_of(start)).size() == 1
