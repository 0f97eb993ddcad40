"""`instead_of_meta` lets a model that was built on the meta device be traced as one with data.

Tensors on the meta device have no backend, so PyTorch picks other ops for them than for a CPU or a
GPU: attention op by op, with all its scores, and losses without a backward. A plan of such a trace
would be of another step. Fake CPU tensors have no data either, and give the ops of real ones.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map_only


def has_meta(model: nn.Module, given: Any) -> bool:
    """Is a parameter or a buffer of the model, or a tensor that is `given` to it, on the meta
    device?"""
    tensors = [*model.parameters(), *model.buffers(), *tree_leaves(given)]
    return any(isinstance(tensor, Tensor) and tensor.is_meta for tensor in tensors)


@contextlib.contextmanager
def instead_of_meta(model: nn.Module, given: Any) -> Iterator[Any]:
    """Within this context fake CPU tensors stand in for the model's tensors that are on the meta
    device: parameters, buffers, and attributes of modules that are tensors or hold some. Yields
    what is `given` to the model, treated alike. Tensors of wrapping subclasses (DTensor) stay."""
    made: dict[int, Tensor] = {}  # a tensor in two places stays one

    def stand_in(tensor: Tensor) -> Tensor:
        if not tensor.is_meta or is_traceable_wrapper_subclass(tensor):
            return tensor
        if id(tensor) not in made:
            made[id(tensor)] = _on_cpu(tensor)
        return made[id(tensor)]

    before: list[tuple[dict[str, Any], str, Any]] = []
    try:
        with FakeTensorMode(), torch.device("cpu"):
            for module in model.modules():
                for held in (module._parameters, module._buffers, vars(module)):
                    for name, value in [*held.items()]:
                        if name in ("_parameters", "_buffers", "_modules"):
                            continue
                        found = tree_map_only(Tensor, stand_in, value)
                        pairs = zip(tree_leaves(value), tree_leaves(found), strict=True)
                        if any(one is not other for one, other in pairs):
                            before.append((held, name, value))
                            held[name] = found
            yield tree_map_only(Tensor, stand_in, given)
    finally:
        for held, name, value in reversed(before):
            held[name] = value


def _on_cpu(tensor: Tensor) -> Tensor:
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    if isinstance(tensor, nn.Parameter):
        made = nn.Parameter(made, tensor.requires_grad)
    else:
        made.requires_grad_(tensor.requires_grad)
    vars(made).update(vars(tensor))  # what a framework notes on its parameters
    return made
