"""What a forward keeps: the tensors that it sets attributes of the model's modules to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


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


def end_to_end(parts: Sequence[Tensor | None]) -> Tensor | None:
    """What slices set, as it will be put together; None if it cannot be."""
    found = [part for part in parts if part is not None and part.dim()]
    alike = len({(part.dtype, part.shape[1:]) for part in found}) == 1
    return torch.cat(found) if alike and len(found) == len(parts) else None
