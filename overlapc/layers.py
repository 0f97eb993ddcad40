"""Autograd Functions for the communication of a model on several ranks; all can be captured.

Megatron's f and g operators, those of its sequence parallelism, and the experts' all-to-all, as
functional collectives. And what a model asks for that sees its whole batch, also where it is run in
slices: `whole` and `before`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor


def all_reduce(x: Tensor, group: str) -> Tensor:
    """Return the sum of `x` over the ranks of the process group with that name."""
    start = torch.ops._c10d_functional.all_reduce(x.contiguous(), "sum", group)
    return torch.ops._c10d_functional.wait_tensor(start)


class CopyToRanks(torch.autograd.Function):
    """Megatron's f: every rank uses the whole of `x`; the backward sums the gradients of all
    ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grad, ctx.group), None


class SumOverRanks(torch.autograd.Function):
    """Megatron's g: sums the ranks' partial results; in the backward every rank gets the whole
    gradient."""

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
    """f for rows split over ranks: gathers all rows; the backward sums and scatters gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: int, group: str) -> Tensor:
        ctx.where = ranks, group
        return gather(x, ranks, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return scatter_sum(grad, *ctx.where), None, None


class ScatterRows(torch.autograd.Function):
    """g for rows split over ranks: sums the partial results, and each rank gets its part of the
    rows."""

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
    """`exchange` with a backward: gradients are exchanged back to where the rows came from."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, receive: Sequence[int], send: Sequence[int], group: str
    ) -> Tensor:
        ctx.receive, ctx.send, ctx.group = receive, send, group
        return exchange(x, receive, send, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return exchange(grad, ctx.send, ctx.receive, ctx.group), None, None, None


# --------------------------------------------------------------------------- what sees the batch

_count = 1  # slices of the batch that the model is called with
_turns: list[_Turns] = []  # of slices that run one after the other, the innermost last


def whole(rows: int) -> int:
    """How many rows (tokens, samples) the whole batch has, of which this call has so many: the
    same number, or that of all slices where `TrainStep(slices=k)` has cut the batch."""
    return rows * _count


def before(counts: Tensor) -> Tensor:
    """What the slices before this one counted at this place, added up: zeros, unless
    `TrainStep(slices=k)` has cut the batch. With it a gate whose experts take only so many tokens
    gives and drops in slices what it gives and drops of the whole batch:

        place = hot.cumsum(0) + before(hot.sum(0))  # of each token among those of its expert
        keep = place <= factor * whole(tokens) / experts
    """
    if counts.requires_grad:
        raise ValueError("before: found counts that require a gradient; expected numbers of rows")
    found: Tensor = torch.ops.overlapc.before(counts)
    return found


@torch.library.custom_op("overlapc::before", mutates_args=())
def _before(counts: Tensor) -> Tensor:
    return _turns[-1].pass_on(counts) if _turns else torch.zeros_like(counts)


@_before.register_fake
def _(counts: Tensor) -> Tensor:
    return torch.empty_like(counts)


class _Turns:
    """Slices that run one after the other: what those so far counted, by place in the model."""

    def __init__(self) -> None:
        self.totals: list[Tensor] = []
        self.place = 0

    def begin(self) -> None:
        self.place = 0

    def pass_on(self, counts: Tensor) -> Tensor:
        if self.place == len(self.totals):
            self.totals.append(torch.zeros_like(counts))
        found = self.totals[self.place]
        self.totals[self.place] = found + counts
        self.place += 1
        return found


@contextlib.contextmanager
def sliced(count: int) -> Iterator[None]:
    """While this is on, a model is called with one of so many slices of a batch."""
    global _count
    outer, _count = _count, count
    try:
        yield
    finally:
        _count = outer


@contextlib.contextmanager
def in_turn(count: int) -> Iterator[Callable[[], None]]:
    """Run so many slices of a batch one after the other as plain PyTorch:

    with in_turn(len(slices)) as begin:
        for each in slices:
            begin()
            (model(*each) / len(slices)).backward()
    """
    turns = _Turns()
    _turns.append(turns)
    try:
        with sliced(count):
            yield turns.begin
    finally:
        _turns.pop()
