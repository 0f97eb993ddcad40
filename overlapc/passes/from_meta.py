"""`on_cpu` lets a model that was built on the meta device be traced as one with data.

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
from torch.utils._pytree import tree_leaves, tree_map_only


@contextlib.contextmanager
def on_cpu(model: nn.Module, given: Any) -> Iterator[Any]:
    """Within this context fake CPU tensors stand in the places of the model's parameters and
    buffers that are on the meta device; yields what is `given` to it, treated alike. Tensors of
    subclasses (DTensor) stay."""
    places = [
        (held, name, tensor)
        for module in model.modules()
        for held in (module._parameters, module._buffers)
        for name, tensor in held.items()
        if tensor is not None and _is_placeless(tensor)
    ]
    leaves = [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)]
    if not places and not any(map(_is_placeless, leaves)):
        yield given
        return
    made: dict[int, Tensor] = {}  # a tensor in two places stays one

    def stands(tensor: Tensor) -> Tensor:
        if not _is_placeless(tensor):
            return tensor
        if id(tensor) not in made:
            found = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu"
            )
            trained = tensor.requires_grad
            is_parameter = isinstance(tensor, nn.Parameter)
            made[id(tensor)] = (
                nn.Parameter(found, trained) if is_parameter else found.requires_grad_(trained)
            )
        return made[id(tensor)]

    try:
        with FakeTensorMode():
            for held, name, tensor in places:
                held[name] = stands(tensor)
            yield tree_map_only(Tensor, stands, given)
    finally:
        for held, name, tensor in places:
            held[name] = tensor


def _is_placeless(tensor: Tensor) -> bool:
    return tensor.is_meta and type(tensor) in (Tensor, nn.Parameter, nn.Buffer)
