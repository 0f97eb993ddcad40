"""These autograd Functions do the communication of a model on several ranks; all can be captured.

Megatron's f and g operators, those of its sequence parallelism, and the experts' all-to-all, as
functional collectives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def all_reduce(x: Tensor, group: str) -> Tensor:
    """Return the sum of `x` over the ranks of the process group with that name."""
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


def gather(x: Tensor, ranks: int, group: str) -> Tensor:
    """Concatenate the rows of all ranks of the group, in the order of ranks."""
    start = torch.ops._c10d_functional.all_gather_into_tensor(x.contiguous(), ranks, group)
    return torch.ops._c10d_functional.wait_tensor(start)


def scatter_sum(x: Tensor, ranks: int, group: str) -> Tensor:
    """Sum `x` over the ranks of the group and return this rank's rows of it."""
    start = torch.ops._c10d_functional.reduce_scatter_tensor(x.contiguous(), "sum", ranks, group)
    return torch.ops._c10d_functional.wait_tensor(start)


class GatherRows(torch.autograd.Function):
    """f where each rank has a part of the rows: every rank uses all of them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: int, group: str) -> Tensor:
        ctx.where = ranks, group
        return gather(x, ranks, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return scatter_sum(grad, *ctx.where), None, None


class ScatterRows(torch.autograd.Function):
    """g where each rank gets a part of the rows: of the sum of the ranks' partial results."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: int, group: str) -> Tensor:
        ctx.where = ranks, group
        return scatter_sum(x, ranks, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return gather(grad, *ctx.where), None, None


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
