from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Kernel(torch.autograd.Function):
    """A function of tensors that no trace enters, and its gradients."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Tensor], *tensors: Tensor | None) -> Tensor:
        for tensor in tensors:
            if tensor is not None:
                tensor.data_ptr()
        ctx.function = function
        ctx.save_for_backward(*tensors)
        return function(*tensors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        grad.data_ptr()
        pairs = zip(ctx.saved_tensors, ctx.needs_input_grad[1:], strict=True)
        given = [t if t is None else t.detach().requires_grad_(needs) for t, needs in pairs]
        with torch.enable_grad():
            out = ctx.function(*given)
        wanted = [each for each in given if each is not None and each.requires_grad]
        found = iter(torch.autograd.grad(out, wanted, grad))
        return None, *(next(found) if t is not None and t.requires_grad else None for t in given)
