"""What a forward keeps: the tensors and plain values that it sets attributes of the model's modules
to."""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from overlapc.core.errors import OptionError
from overlapc.passes.capture.joint import Joint, is_gradient
from overlapc.passes.nodes import is_random, primal_nodes
from overlapc.state.objects import alike, inside, storage_of

_PLAIN = (type(None), bool, int, float, complex, str, bytes, enum.Enum, torch.dtype, torch.device)
_INTERNAL = set(vars(nn.Module()))


def attributes(model: nn.Module) -> dict[str, list[Tensor]]:
    """The tensors in each attribute of the model's modules, buffers included."""
    return {
        f"{path}.{name}" if path else name: _tensors(value)
        for path, module in model.named_modules()
        for name, value in {**vars(module), **module._buffers}.items()
        if name != "_buffers"
    }


def _tensors(value: Any) -> list[Tensor]:
    try:
        leaves = tree_leaves(value)
    except RecursionError:  # a container that holds itself
        leaves = list(inside("", value).values())
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def set_since(before: Mapping[str, Sequence[Tensor]], model: nn.Module) -> dict[str, Tensor]:
    """The tensors that a forward has set attributes to."""
    old = {id(x) for tensors in before.values() for x in tensors}
    return {
        f"{name}{f'[{i}]' if i else ''}, which the forward sets,": x.detach()
        for name, tensors in attributes(model).items()
        for i, x in enumerate(x for x in tensors if id(x) not in old)
    }


def plain_values(model: nn.Module) -> dict[str, Any]:
    """The plain Python values that the model's modules hold, by the way to each."""
    found = {
        way: value
        for path, module in model.named_modules()
        for name, held in vars(module).items()
        if name not in _INTERNAL
        for way, value in inside(f"{path}.{name}" if path else name, held).items()
    }
    sets = {way: frozenset(value) for way, value in found.items() if isinstance(value, set)}
    return {
        way: value
        for way, value in (found | sets).items()
        if isinstance(value, _PLAIN) or (isinstance(value, frozenset) and _all_plain(value))
    }


def _all_plain(values: frozenset[Any]) -> bool:
    return all(isinstance(value, _PLAIN) for value in values)


def refuse_inputs(named: Mapping[str, Any], inputs: Sequence[Tensor], count: int) -> None:
    """Raise for a part of an input in an attribute or object: of an input nothing is made that
    could be put together."""
    storages = {storage_of(tensor) for tensor in inputs if tensor.dim()} - {None}
    for name, value in named.items():
        if isinstance(value, Tensor) and storage_of(value) in storages:
            raise OptionError(
                f"slices={count}: {name} is an input or a view of one, so "
                "it would be the last slice's: clone it"
            )


def refuse_numbers(kept: Sequence[Mapping[str, Tensor]]) -> None:
    """Raise for a number that the forward sets and that is another for each slice."""
    for name, number in kept[0].items():
        others = [one.get(name) for one in kept]
        if not number.dim() and not all(alike(number, other) for other in others):
            raise OptionError(
                f"slices={len(kept)}: {name} is a number that is another for each slice: "
                "return it, or make it alike with overlapc.nn.layers.total"
            )


def refuse_values(
    whole: Mapping[str, Any], slices: Sequence[Mapping[str, Any]], tolerance: float
) -> None:
    """Raise for a plain value that is another after a slice than after the batch, both from the
    same state: a counter of samples, say."""
    for k, one in enumerate(slices):
        for name in dict.fromkeys((*whole, *one, *slices[0])):
            found, first, expected = (
                values.get(name, "not there") for values in (one, slices[0], whole)
            )
            if not (_agree(found, expected, tolerance) and _agree(found, first, 0.0)):
                raise OptionError(
                    f"slices={len(slices)}: {name}, which the forward sets, is {found!r:.60} for "
                    f"slice {k} and {expected!r:.60} for the batch; expected the same: count the "
                    "batch's samples with overlapc.nn.layers.whole, or return what is a slice's"
                )


def _agree(one: Any, other: Any, tolerance: float) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        both_nan = math.isnan(one) and math.isnan(other)
        return both_nan or math.isclose(one, other, rel_tol=tolerance)
    return one is other or (type(one) is type(other) and alike(one, other))


def put_together(
    parts: Sequence[Tensor | None], whole: Tensor, lasting: Counter[Any]
) -> Tensor | None:
    """What slices set, as it will be put together; None if it cannot be. `lasting` are shapes of
    what the forward makes of parameters alone, which is the batch's in each slice."""
    found = [part for part in parts if part is not None and part.dim()]
    if len(found) < len(parts):
        return None
    if lasting[whole.shape] and all(torch.equal(part, whole) for part in found):
        lasting[whole.shape] -= 1
        return found[0]
    alike = len({(part.dtype, part.shape[1:]) for part in found}) == 1
    return torch.cat(found) if alike else None


def of_parameters(joint: Joint) -> dict[str, torch.Size]:
    """The results of a graph that it makes of parameters and buffers alone, with their shapes."""
    captured = joint.captured
    inputs = primal_nodes(captured.joint)
    lasting = {inputs[place].name for place in captured.static_inputs}
    depends: dict[fx.Node, bool] = {}  # on more?
    for node in captured.joint.graph.nodes:
        given = any(depends[each] for each in node.all_input_nodes)
        own = node.op == "placeholder" and node.name not in lasting
        depends[node] = given or own or (node.op == "call_function" and is_random(node))
    results = captured.joint.graph.find_nodes(op="output")[0].args[0]
    return {
        name: node.meta["val"].shape
        for name, node in zip(joint.results, results, strict=False)  # gradients stand behind
        if is_gradient(node) and not depends[node]
    }
