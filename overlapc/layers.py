"""What models of several ranks are made of, so that it is captured: Megatron's f and g operators
and the experts' all-to-all, as functional collectives inside autograd Functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def all_reduce(x: Tensor, group: str) -> Tensor:
    """The sum of `x` over the ranks of the process group with that name."""
    start = torch.ops._c10d_functional.all_reduce(x.contiguous(), "sum", group)
    return torch.ops._c10d_functional.wait_tensor(start)


class CopyToRanks(torch.autograd.Function):
    """Megatron's f: every rank uses `x`, so the gradients of all ranks add up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grad, ctx.group), None


class SumOverRanks(torch.autograd.Function):
    """Megatron's g: the ranks' partial results add up, every rank gets the whole gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def exchange(x: Tensor, receive: Sequence[int], send: Sequence[int], group: str) -> Tensor:
    """All-to-all of rows: `send[r]` of ours go to rank r, `receive[r]` come from it."""
    start = torch.ops._c10d_functional.all_to_all_single(x.contiguous(), receive, send, group)
    return torch.ops._c10d_functional.wait_tensor(start)


class Exchange(torch.autograd.Function):
    """`exchange`, differentiable: gradients travel the same roads backwards."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, receive: Sequence[int], send: Sequence[int], group: str
    ) -> Tensor:
        ctx.receive, ctx.send, ctx.group = receive, send, group
        return exchange(x, receive, send, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return exchange(grad, ctx.send, ctx.receive, ctx.group), None, None, None
