"""What a forward keeps: the tensors that it sets attributes of the model's modules to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from overlapc.passes.joint import Joint, is_gradient
from overlapc.passes.nodes import is_random, primal_nodes


def attributes(model: nn.Module) -> dict[str, list[Tensor]]:
    """The tensors in each attribute of the model's modules, buffers included."""
    return {
        f"{path}.{name}" if path else name: [x for x in tree_leaves(value) if isinstance(x, Tensor)]
        for path, module in model.named_modules()
        for name, value in {**vars(module), **module._buffers}.items()
        if name != "_buffers"
    }


def set_since(before: Mapping[str, Sequence[Tensor]], model: nn.Module) -> dict[str, Tensor]:
    """The tensors that a forward has set attributes to."""
    old = {id(x) for tensors in before.values() for x in tensors}
    return {
        f"{name}{f'[{i}]' if i else ''}, which the forward sets,": x.detach()
        for name, tensors in attributes(model).items()
        for i, x in enumerate(x for x in tensors if id(x) not in old)
    }


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
