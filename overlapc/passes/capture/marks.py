"""What Dynamo's graph says of its nodes: which of them are results, and in which calls they are."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from torch import Tensor, fx
from torch.fx.traceback import annotate

_MARK = "overlapc_result"
_CALL = "overlapc_call"
_GATHER = "overlapc_gather"


def mark(tensor: Tensor, number: int, make: Callable[[Tensor], Tensor]) -> Tensor:
    """Return `make(tensor)`. If it becomes a result, the joint graph's `marks` give its number."""
    with annotate({_MARK: number}):
        return make(tensor)


def marks_of(graph: fx.GraphModule) -> tuple[int | None, ...]:
    """By result: the number from `mark`."""
    return tuple(_said(node).get(_MARK) for node in graph.graph.find_nodes(op="output")[0].args[0])


def called(number: int) -> AbstractContextManager[None]:
    """The joint graph's `calls` have this number if the block makes a node."""
    return annotate({_CALL: number})


def calls_of(graph: fx.GraphModule) -> frozenset[int]:
    found = {_said(node).get(_CALL) for node in graph.graph.nodes}
    return frozenset(number for number in found if number is not None)


def gathering(number: int) -> AbstractContextManager[None]:
    """Nodes of the block gather the parameters of this group of FSDP2's; -1: eager keeps them."""
    return annotate({_GATHER: number})


def group_gathered(node: object) -> int | None:
    """The number from `gathering`."""
    return _said(node).get(_GATHER)


def _said(node: object) -> dict[str, int]:
    return getattr(node, "meta", {}).get("custom") or {}
