"""`fuse` joins collectives of a block's parameters: one gather and one reduction for each block, as
FSDP2 has them, in its flat layout. A step was traced with one of each for every parameter.

    gather      cat of shards        -> all_gather_into_tensor -> split_with_sizes_copy
    reduction   _chunk_cat           -> reduce_scatter_tensor  -> split

Fewer collectives have less latency; but they hold more memory, end later, and what they bring is
copied. So `plan_step` plans both and takes the faster.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from typing import Any

import torch
from torch import fx

from overlapc.passes.nodes import group_of, is_wait
from overlapc.tools.reach import made_of, reached

_C10D, _ATEN = torch.ops._c10d_functional, torch.ops.aten
_GATHER = _C10D.all_gather_into_tensor.default
_SCATTER = _C10D.reduce_scatter_tensor.default
_BLOCK = re.compile(r"(?:^|.*?\.)\d+(?=\.|$)")  # a module's path up to the first number in it
_FEW = 8  # ops, of which a wait and the results are two
_KEPT = ("custom", "autograd_backward", "stack_trace", "nn_module_stack")  # marks of a node


def fuse(graph: fx.GraphModule, path_of: Callable[[fx.Node], str]) -> set[str]:
    """Join what can be joined, in place; return the process groups of it. `path_of` says in which
    module a node is, "" if in none."""
    found: set[str] = set()
    for target, joins, fused in (
        (_GATHER, _reads_an_input, _fuse_gathers),
        (_SCATTER, _makes_a_result, _fuse_reductions),
    ):
        for starts in _buckets(graph.graph, target, joins, path_of):
            found.add(group_of(starts[0]))
            fused(starts)
    if found:
        graph.graph.lint()
        graph.recompile()
    return found


def _buckets(
    graph: fx.Graph,
    target: Any,
    joins: Callable[[fx.Node], bool],
    path_of: Callable[[fx.Node], str],
) -> Iterator[list[fx.Node]]:
    """Starts of one block, kind, group and type, where there are several."""
    found: dict[Any, list[fx.Node]] = {}
    for start in graph.find_nodes(op="call_function", target=target):
        block = _BLOCK.match(path_of(start))
        alone = [is_wait(user) for user in start.users] == [True]
        if block and alone and joins(start):
            key = block.group(), start.args[1:], start.meta["val"].dtype
            found.setdefault(key, []).append(start)
    yield from [starts for starts in found.values() if len(starts) > 1]


def _reads_an_input(start: fx.Node) -> bool:
    """Does it bring what is made of one input alone, and lies in one piece?"""
    whole = start.all_input_nodes[0].meta["val"].is_contiguous()
    return whole and all(len(node.all_input_nodes) <= 1 for node in made_of([start]))


def _makes_a_result(start: fx.Node) -> bool:
    """Do few ops lead from it to results of the step?"""
    behind = reached([*start.users], lambda node: node.users)
    return len(list(islice(behind, _FEW + 1))) <= _FEW


def _fuse_gathers(starts: Sequence[fx.Node]) -> None:
    """Join gathers at the place of the first one."""
    first = starts[0]
    for node in sorted(made_of(starts)):
        if node.op != "placeholder" and node not in starts and first < node:
            first.prepend(node)
    ranks = int(first.args[1])  # type: ignore[call-overload]
    shards = [start.args[0] for start in starts]
    sizes = [shard.meta["val"].numel() for shard in shards]  # type: ignore[union-attr]
    make = _Maker(first)
    flat = make(_ATEN.cat.default, [make(_ATEN.view.default, each, [-1]) for each in shards])
    wait = make(_C10D.wait_tensor.default, make(_GATHER, flat, *first.args[1:]))
    rows = make(_ATEN.view.default, wait, [ranks, sum(sizes)])
    parts = make(_ATEN.split_with_sizes_copy.default, rows, sizes, 1)
    _hand_out(make, parts, starts)


def _fuse_reductions(starts: Sequence[fx.Node]) -> None:
    """Join reductions at the place of the last one, and what reads them behind it."""
    last = place = starts[-1]
    behind = reached(chain.from_iterable(start.users for start in starts), lambda node: node.users)
    for node in sorted(behind):
        if node.op != "output":
            place.append(node)
            place = node
    given = [start.args[0] for start in starts]
    ranks = int(last.args[2])  # type: ignore[call-overload]
    make = _Maker(last)
    flat = make(_ATEN.view.default, make(_ATEN._chunk_cat.default, given, 0, ranks), [-1])
    wait = make(_C10D.wait_tensor.default, make(_SCATTER, flat, *last.args[1:]))
    parts = make(
        _ATEN.split_with_sizes.default, wait, [start.meta["val"].numel() for start in starts]
    )
    _hand_out(make, parts, starts)


class _Maker:
    """Makes nodes before another, with its marks."""

    def __init__(self, before: fx.Node) -> None:
        self._before = before
        self._marks = {key: before.meta[key] for key in _KEPT if key in before.meta}

    def __call__(self, target: Any, *args: Any) -> fx.Node:
        with self._before.graph.inserting_before(self._before):
            node = self._before.graph.call_function(target, args)
        given: Any = fx.map_arg(args, lambda each: each.meta["val"])
        node.meta = dict(self._marks, val=target(*given))
        return node


def _hand_out(make: _Maker, parts: fx.Node, starts: Sequence[fx.Node]) -> None:
    """Have the parts in the places of what each collective brought."""
    waits = [next(iter(start.users)) for start in starts]
    for i, wait in enumerate(waits):
        part = make(operator.getitem, parts, i)
        wait.replace_all_uses_with(make(_ATEN.view.default, part, list(wait.meta["val"].shape)))
    for gone in (*waits, *starts):
        gone.graph.erase_node(gone)
