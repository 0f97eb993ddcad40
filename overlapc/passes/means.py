"""In slices a mean over counted targets is the batch's: `F.cross_entropy` and `F.nll_loss` leave
out the targets with their `ignore_index`, of which one slice may have more than another.

A slice's mean is weighed with the slice's share of the batch's targets, times the number of slices,
because their losses are averaged. Where each slice has as many, that is 1 and changes no bit.

`weigh_means` does so in a graph of Dynamo's, `Weighing` where eager runs a slice, or is traced.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode

from overlapc.layers import total

__all__ = ["Weighing", "weigh_means"]

_MEANS = {function: inspect.signature(function) for function in (F.cross_entropy, F.nll_loss)}


class _Mean(NamedTuple):
    """What decides which targets of a mean count: tensors, or nodes of them."""

    target: Any
    weight: Any  # of each class, or None
    ignore_index: int


def _mean_of(function: Any, args: Any, kwargs: Any) -> _Mean | None:
    """Of a call of one of these functions; None if it takes no mean."""
    if function not in _MEANS:
        return None
    bound = _MEANS[function].bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    plain = given["size_average"] is None and given["reduce"] is None
    if not plain or given["reduction"] != "mean":
        return None
    return _Mean(given["target"], given["weight"], given["ignore_index"])


def _counts(target: Tensor) -> bool:
    """Are these classes? Probabilities of classes all count."""
    return not target.is_floating_point()


def counted(target: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor:
    """The number of targets that count, or the sum of their weights."""
    counts = target != ignore_index
    if weight is None:
        return counts.sum()
    return (weight[torch.where(counts, target, 0)] * counts).sum()


def weigh(loss: Tensor, mine: Tensor, whole: Tensor, count: int) -> Tensor:
    """The mean over `mine` targets as one of `count` parts of the mean over the `whole`."""
    share = (mine * count / whole).to(loss.dtype)
    return torch.where(mine > 0, loss, torch.zeros_like(loss)) * share  # of no target it is NaN


class Weighing(TorchFunctionMode):
    """Where it is on, the means of one of `count` slices are weighed when they are taken."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        made = function(*args, **kwargs)
        mean = _mean_of(function, args, kwargs)
        if mean is None or not _counts(mean.target):
            return made
        mine = counted(*mean)
        return weigh(made, mine, total(mine), self.count)


def weigh_means(module: fx.GraphModule, count: int) -> bool:
    """Weigh the means in a graph of one of `count` slices. Return whether there are any: not if one
    is in a graph within the graph, a checkpoint's say, which runs again without other slices."""
    inner = (each for each in module.modules() if each is not module)
    within = (n for each in inner if isinstance(each, fx.GraphModule) for n in each.graph.nodes)
    if count == 1 or any(node.target in _MEANS for node in within):
        return False
    graph = module.graph
    found = [
        (node, mean)
        for node in graph.nodes
        if node.op == "call_function"
        and (mean := _mean_of(node.target, node.args, node.kwargs)) is not None
        and _counts(mean.target.meta["example_value"])
    ]
    for loss, mean in found:
        with graph.inserting_before(loss.next):
            mine = graph.call_function(counted, tuple(mean))
            whole = graph.call_function(total, (mine,))
            weighed = graph.call_function(weigh, (loss, mine, whole, count))
        loss.replace_all_uses_with(weighed, lambda user, but=weighed: user is not but)
        for node in (mine, whole, weighed):
            node.meta = dict(loss.meta)
    module.recompile()
    return bool(found)
