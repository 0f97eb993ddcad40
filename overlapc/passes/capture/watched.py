"""How autograd keeps the gradient of a leaf: who waits for it, and in which type.

`watched` finds the leaves whose gradients others wait for at autograd's own nodes.

Autograd makes the node that adds a gradient to a leaf's `.grad` (`AccumulateGrad`) when a graph
needs it, and drops it with the last graph. Whoever hooks into that node keeps it, as data
parallelism often does. PyTorch does not tell whether a node has hooks. But a mark on it outlives
the graph that asked only if somebody else keeps it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_MARK = "overlapc"


class _Reads(torch.autograd.Function):
    """One graph of all tensors: to ask each by itself takes several times as long."""

    @staticmethod
    def forward(_ctx: Any, *_tensors: Tensor) -> Tensor:
        return torch.empty(0)

    @staticmethod
    def backward(_ctx: Any, *_gradients: Tensor) -> None:
        raise AssertionError("nobody asks for this gradient")


def watched(values: Sequence[Any]) -> set[int]:
    """The ids of leaves among the values whose nodes somebody keeps: hooks, or another graph."""
    leaves = [t for t in values if isinstance(t, Tensor) and t.requires_grad and t.is_leaf]
    if not leaves:
        return set()
    with torch.enable_grad():
        for metadata in _metadata(leaves):
            metadata[_MARK] = True
        marked = [_MARK in metadata for metadata in _metadata(leaves)]
    return {id(leaf) for leaf, kept in zip(leaves, marked, strict=True) if kept}


def other_dtype(tensor: Tensor) -> torch.dtype | None:
    """The type in which a leaf's gradient is kept, and added up, if it is not the leaf's own. No
    trace shows it."""
    kept: torch.dtype | None = getattr(tensor, "grad_dtype", None)  # since torch 2.10
    return None if kept == tensor.dtype else kept


def graph_of(tensors: Sequence[Tensor]) -> Tensor | None:
    """A tensor whose graph reads these; no backward may run through it."""
    read: Tensor | None = _Reads.apply(*tensors) if tensors else None
    return read


def _metadata(leaves: Sequence[Tensor]) -> list[dict[str, Any]]:
    """The metadata of each node, which does not keep the node."""
    read: Any = graph_of(leaves)  # before torch 2.13 its node lives no longer than it
    return [node.metadata for node, _ in read.grad_fn.next_functions]
