"""Which of a model's results is the loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from overlapc.core.errors import OptionError
from overlapc.passes.capture.joint import NO_GRADIENT
from overlapc.state.objects import detached


def loss_of(result: Any) -> Any:
    loss = result.get("loss") if isinstance(result, Mapping) else getattr(result, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    leaves = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    return next((leaf for leaf in leaves if leaf.requires_grad), None)


def loss_alone(result: Any) -> Any:
    """The loss of a result; the result itself if there is none."""
    loss = None if isinstance(result, Tensor) else loss_of(result)
    return result if loss is None else loss


def checked_loss(result: Any) -> Tensor:
    loss = result if isinstance(result, Tensor) else loss_of(result)
    if loss is None or not loss.requires_grad:
        raise OptionError(f"{NO_GRADIENT}; it is a {type(result).__name__}")
    if loss.numel() != 1:
        raise OptionError(f"the loss has the shape {tuple(loss.shape)}; expected one number")
    return loss


def plainly(result: Any) -> Any:
    """Run the backward of a forward that ran as plain PyTorch."""
    checked_loss(result).backward()
    return detached(result)
