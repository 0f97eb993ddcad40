"""In slices a mean over counted targets is the batch's: `F.cross_entropy` and `F.nll_loss` leave
out the targets with their `ignore_index`, of which one slice may have more than another.

A slice's mean is weighed with the slice's share of the batch's targets, times the number of slices,
because their losses are averaged. Where each slice has as many, that is 1 and changes no bit.

That is right only of a mean over the batch's targets, not over a piece of them (a sample's), and
only if the mean goes into the results as a summand. So what a graph does with targets and means is
followed (`_is_of_batch`, `_is_summand`); if one mean does not do, none is weighed.

`weigh_means` does so in a graph of Dynamo's, `Weighing` where eager runs a slice, or is traced.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from overlapc.nn.layers import total
from overlapc.passes.nodes import line_of

__all__ = ["Weighing", "weigh_means"]

_MEANS = {function: inspect.signature(function) for function in (F.cross_entropy, F.nll_loss)}
_OWN = (
    "a slice's mean is not weighed with its share of the batch's targets: gradients are another "
    "where slices have other numbers of targets that are not to be ignored"
)


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


def _counts(target: Any) -> bool:
    """Are these classes? Probabilities of classes all count."""
    return not (isinstance(target, Tensor) and target.is_floating_point())


def counted(target: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor:
    """The number of targets that count, or the sum of their weights."""
    counts = target != ignore_index
    if weight is None:
        return counts.sum()
    return (weight[torch.where(counts, target, 0)] * counts).sum()


def weigh(loss: Tensor, mine: Tensor, whole: Tensor, count: int) -> Tensor:
    """The mean over `mine` targets as one of `count` parts of the mean over the `whole`."""
    share = (mine.double() * count / whole).to(loss.dtype)
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


def weigh_means(module: fx.GraphModule, count: int, lines: list[str]) -> bool:
    """Weigh the means in a graph of one of `count` slices. Return whether it has any. Not weighed,
    but added to `lines`, are those in a graph within the graph, a checkpoint's say, which runs
    again without other slices, those under `vmap`, and all others beside such."""
    inside = [each for each in module.modules() if isinstance(each, fx.GraphModule)]
    nodes = [node for each in inside for node in each.graph.nodes] if count > 1 else []
    found = [(node, mean) for node in nodes if (mean := _mean_at(node)) is not None]
    mapped = any("_increment_nesting" in _name(node) for node in nodes)
    if mapped or not all(_may_be_weighed(module, *each) for each in found):
        lines += [f"{line_of(loss)}: {_name(loss)}: {_OWN}" for loss, _ in found]
        return False
    graph = module.graph
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


def _mean_at(node: fx.Node) -> _Mean | None:
    mean = _mean_of(node.target, node.args, node.kwargs) if node.op == "call_function" else None
    return mean if mean is not None and _counts(_value(mean.target)) else None


def _may_be_weighed(module: fx.GraphModule, loss: fx.Node, mean: _Mean) -> bool:
    return loss.graph is module.graph and _is_of_batch(mean.target) and _is_summand(loss)


# --------------------------------------------------------------------------- what a graph does

# Functions and methods that take a piece of a tensor.
_PIECES = {"select", "unbind", "chunk", "split", "tensor_split", "narrow", "index_select", "take"}
# Those that leave a summand one, whatever else they read.
_SUMS = {
    *("add", "add_", "iadd", "sub", "sub_", "isub", "neg", "sum", "mean", "stack", "cat"),
    *("clone", "contiguous", "detach", "float", "double", "to", "view", "reshape", "squeeze"),
}
_PRODUCTS = {"mul", "mul_", "imul", "multiply"}
_QUOTIENTS = {"div", "div_", "truediv", "itruediv"}


def _name(node: fx.Node) -> str:
    return str(getattr(node.target, "__name__", node.target))


def _value(node: Any) -> Any:
    return node.meta.get("example_value") if isinstance(node, fx.Node) else node


def _before(node: fx.Node) -> Iterator[fx.Node]:
    """The node and all that it is made of."""
    seen, left = {node}, [node]
    while left:
        yield (one := left.pop())
        new = [each for each in one.all_input_nodes if each not in seen]
        seen.update(new)
        left += new


def _is_of_batch(target: fx.Node) -> bool:
    """Are these the targets of all samples, not a piece of them?"""
    return not any(_takes_a_piece(node) for node in _before(target))


def _takes_a_piece(node: fx.Node) -> bool:
    if node.op not in ("call_function", "call_method"):
        return False
    if node.target is not operator.getitem or not isinstance(_value(node.args[0]), Tensor):
        return _name(node) in _PIECES
    index: Any = node.args[1]
    first = index[0] if isinstance(index, tuple) else index
    if isinstance(first, fx.Node):  # by a mask, all that count are taken
        return getattr(_value(first), "dtype", None) != torch.bool
    return first is not Ellipsis and first != slice(None)


def _is_summand(loss: fx.Node) -> bool:
    """Do the graph's results have the loss as a summand, times what is no part of the batch?"""
    left, seen = [loss], {loss}
    while left:
        node = left.pop()
        for user in node.users:
            if user.op != "output" and not _keeps(user, node):
                return False
            if user not in seen:
                seen.add(user)
                left.append(user)
    return True


def _keeps(user: fx.Node, summand: fx.Node) -> bool:
    name = _name(user)
    if name in _SUMS:
        return True
    others = [node for node in user.all_input_nodes if node is not summand]
    times = name in _PRODUCTS or (name in _QUOTIENTS and user.args[:1] == (summand,))
    return times and user.args.count(summand) == 1 and not any(map(_is_data, others))


def _is_data(node: fx.Node) -> bool:
    """Is it made of anything else than parameters?"""
    given = (each for each in _before(node) if each.op == "placeholder")
    return any(not isinstance(_value(each), nn.Parameter) for each in given)
