from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .kernels import gathered, kernel


class CrossEntropyFunction(torch.autograd.Function):
    """As TE's it writes its gradient where its input was, unseen by autograd."""

    @staticmethod
    def forward(
        ctx: Any,
        _input: Tensor,
        target: Tensor,
        label_smoothing: float = 0.0,
        reduce_loss: bool = False,
        dist_process_group: Any = None,
        ignore_idx: int = -100,
        is_cg_capturable: bool = False,
    ) -> Tensor:
        kernel(_input, target)
        count, rank, part = 1, 0, _input.shape[-1]
        whole = _input
        if dist_process_group is not None:
            count, rank = dist_process_group.size(), dist_process_group.rank()
            whole = torch.cat(gathered(_input, dist_process_group).chunk(count), -1)
        logs = torch.log_softmax(whole.float(), -1)
        wrong = logs.exp()
        wrong.scatter_add_(-1, target[..., None], -torch.ones_like(wrong[..., :1]))
        _input.data.copy_(wrong[..., rank * part : (rank + 1) * part])
        ctx.save_for_backward(_input.detach())
        return -logs.gather(-1, target[..., None])[..., 0]

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        (wrong,) = ctx.saved_tensors
        kernel(grad_output)
        return (wrong * grad_output[..., None]).to(wrong.dtype), *[None] * 6


parallel_cross_entropy = CrossEntropyFunction.apply
