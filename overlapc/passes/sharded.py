"""Gathers and reductions of FSDP2's groups in a joint graph, as FSDP2 itself has them.

- Each group's gather begins when the one before has ended, as FSDP2 prefetches one ahead.
- A parameter that the loss does not read keeps its `.grad` None. (Dynamo gives zeros to the op of
  the whole group.)
"""

from __future__ import annotations

import operator
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from overlapc.passes.capture.marks import group_gathered
from overlapc.tools.reach import made_of

_C10D = torch.ops._c10d_functional
_GATHER = _C10D.all_gather_into_tensor.default
_ATEN = torch.ops.aten
_CHUNK_CAT = _ATEN._chunk_cat.default
_SPLITS = {_ATEN.split_with_sizes.default, _ATEN.split.Tensor}
_MADE = {
    *(_ATEN.zeros.default, _ATEN.zeros_like.default, _ATEN.new_zeros.default),
    *(_ATEN.full.default, _ATEN.full_like.default),
}
_PASSES_ON = {
    *(_ATEN._to_copy.default, _ATEN.expand.default, _ATEN.view.default, _ATEN.clone.default),
    *(torch.ops.prims.convert_element_type.default, _ATEN.alias.default),
}


def as_fsdp2(joint: fx.GraphModule, results: int) -> None:
    """Change a joint graph of a sharded model in place; others stay as they are."""
    gather_ahead(joint.graph)
    drop_unread(joint, results)


def gather_ahead(graph: fx.Graph) -> None:
    """Begin each gather where the one before it has ended: it reads parameters alone."""
    starts = [
        node for node in graph.nodes if node.target is _GATHER and group_gathered(node) is not None
    ]
    for before, start in pairwise(starts):
        place = next(iter(before.users))  # its wait
        for node in (*_made_from_leaves(start), start):
            if place < node:
                place.append(node)
                place = node


def _made_from_leaves(start: fx.Node) -> list[fx.Node]:
    """What a gather needs, in order."""
    needed = made_of(start.all_input_nodes)
    return sorted(node for node in needed if node.op != "placeholder")


def drop_unread(joint: fx.GraphModule, results: int) -> None:
    """Have a joint graph neither reduce nor return the zeros that were made for a parameter without
    a gradient."""
    output = joint.graph.find_nodes(op="output")[0]
    returned = list(output.args[0])
    unread: dict[fx.Node, set[int]] = {}  # of the parts of a group's gradients
    for i, gradient in enumerate(returned[results:], results):
        if isinstance(gradient, fx.Node) and _is_of_zeros(gradient):
            returned[i] = None
            if _zeros(gradient) is None:
                parts, index = gradient.args
                unread.setdefault(parts, set()).add(index)  # type: ignore[arg-type]
    if returned != list(output.args[0]):
        kind = type(output.args[0])
        output.args = (kind(returned),)
        for parts, indices in unread.items():
            leave_out(parts, indices)
        joint.graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output"))
        joint.recompile()


def leave_out(parts: fx.Node, unread: set[int]) -> None:
    """Reduce a group's gradients without the zeros of parameters that are unread, as FSDP2 does:
    more than two ranks add in an order that depends on how many elements there are."""
    sizes: Any = parts.args[1]
    kept = [i for i in range(len(sizes)) if i not in unread]
    if not kept:
        return  # nothing reads the reduction
    *way, cat = _way_to(parts)
    cat.args = ([cat.args[0][i] for i in kept], *cat.args[1:])
    parts.args = (parts.args[0], [sizes[i] for i in kept], *parts.args[2:])
    for node in reversed(way):
        if node.target is _ATEN.view.default:
            node.args = (node.args[0], [-1])
    for node in (cat, *reversed(way)):
        given = fx.map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
        node.meta["val"] = node.target(*given[0], **given[1])
    for part in list(parts.users):
        index = part.args[1]
        if index in unread:
            parts.graph.erase_node(part)
        else:
            part.args = (parts, kept.index(index))


def _is_of_zeros(gradient: fx.Node) -> bool:
    if (made := _zeros(gradient)) is not None:
        return group_gathered(made) is not None  # handed on without a reduction
    if gradient.target is not operator.getitem:
        return False
    way = _way_to(gradient.args[0])
    return bool(way) and _zeros(way[-1].args[0][gradient.args[1]]) is not None


def _way_to(parts: Any) -> list[Any]:
    """The nodes from the parts of a group's reduced gradients back to the `_chunk_cat` of its
    gradients, or none."""
    if not isinstance(parts, fx.Node) or parts.target is not _ATEN.split_with_sizes.default:
        return []
    found, node = [], parts
    while isinstance(node, fx.Node) and node.op == "call_function":
        found.append(node)
        if node.target == _CHUNK_CAT:
            return found
        node = node.args[0]
    return []


def _zeros(node: Any) -> fx.Node | None:
    """The op that makes nothing but zeros, if that is what a node is."""
    while isinstance(node, fx.Node) and node.target in _PASSES_ON:
        node = node.args[0]
    if not isinstance(node, fx.Node):
        return None
    if node.target is _ATEN.cat.default:  # of the pieces of one tensor
        made = [_zeros(piece) for piece in node.args[0]]  # type: ignore[union-attr]
        return made[0] if all(each is not None for each in made) else None
    if node.target is operator.getitem and getattr(node.args[0], "target", None) in _SPLITS:
        return _zeros(node.args[0].args[0])  # type: ignore[union-attr]
    if node.target not in _MADE:
        return None
    filled = "full" in str(node.target)
    return node if not filled or node.args[1] == 0 else None
