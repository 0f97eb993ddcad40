from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import transformer_engine

from .kernels import kernel


class _Moved(torch.autograd.Function):
    """Rows of a tensor, and numbers beside them, in another order."""

    @staticmethod
    def forward(ctx: Any, inp: Tensor, rows: Tensor, numbers: Tensor | None, places: Any) -> Any:
        kernel(inp, rows, numbers)
        ctx.save_for_backward(rows)
        ctx.count, ctx.numbers, ctx.places = inp.shape[0], numbers, places
        moved = None if numbers is None else numbers[places] if places else numbers[rows]
        return inp[rows], moved

    @staticmethod
    def backward(ctx: Any, grad: Tensor, of_numbers: Tensor | None) -> Any:
        (rows,) = ctx.saved_tensors
        kernel(grad)
        back = grad.new_zeros(ctx.count, *grad.shape[1:]).index_add_(0, rows, grad)
        if ctx.numbers is None:
            return back, None, None, None
        place = ctx.places or (rows,)
        numbers = torch.zeros_like(ctx.numbers).index_put_(place, of_numbers, accumulate=True)
        return back, None, numbers, None


def _rows(routing_map: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Token and expert of each row, sorted by expert. (For a map of nothing: the first.)"""
    experts, tokens = routing_map.bool().t().nonzero(as_tuple=True)
    lacking = tokens.new_zeros(max(0, count - len(tokens)))
    return torch.cat((tokens, lacking))[:count], torch.cat((experts, lacking))[:count]


def permuted(inp: Tensor, routing_map: Tensor, count: int) -> tuple[Tensor, Tensor]:
    tokens, _ = _rows(routing_map, count)
    out, _ = _Moved.apply(inp, tokens, None, None)
    return out, tokens


def permuted_with_probs(
    inp: Tensor, probs: Tensor, routing_map: Tensor, count: int
) -> tuple[Tensor, Tensor, Tensor]:
    tokens, experts = _rows(routing_map, count)
    out, moved = _Moved.apply(inp, tokens, probs, (tokens, experts))
    return out, moved, tokens


def unpermuted(inp: Tensor, row_id_map: Tensor, restore_shape: torch.Size | None) -> Tensor:
    assert restore_shape is not None
    out: Tensor = _Summed.apply(inp, row_id_map, restore_shape[0])
    return out


def moe_permute(
    inp: Tensor,
    routing_map: Tensor,
    num_out_tokens: int = -1,
    max_token_num: int = -1,
    map_type: str = "mask",
) -> tuple[Tensor, Tensor]:
    return permuted(inp, routing_map, num_out_tokens)


def moe_permute_with_probs(
    inp: Tensor, probs: Tensor, routing_map: Tensor, num_out_tokens: int = -1
) -> tuple[Tensor, Tensor, Tensor]:
    return permuted_with_probs(inp, probs, routing_map, num_out_tokens)


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inp: Tensor, rows: Tensor, count: int) -> Tensor:
        kernel(inp, rows)
        rows = rows[: len(inp)]  # of made-up rows
        ctx.save_for_backward(rows)
        ctx.count = len(inp)
        return inp.new_zeros(count, *inp.shape[1:]).index_add_(0, rows, inp[: len(rows)])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        kernel(grad)
        (rows,) = ctx.saved_tensors
        back = grad.new_zeros(ctx.count, *grad.shape[1:])
        back[: len(rows)] = grad[rows]
        return back, None, None


def moe_unpermute(
    inp: Tensor,
    row_id_map: Tensor,
    merging_probs: Tensor | None = None,
    restore_shape: torch.Size | None = None,
    map_type: str = "mask",
    probs: Tensor | None = None,
) -> Tensor:
    assert merging_probs is None
    return unpermuted(inp, row_id_map, restore_shape)


def _sorted(split_sizes: Tensor, sorted_index: Tensor, count: int) -> Tensor:
    starts = split_sizes.cumsum(0) - split_sizes
    pieces = [torch.arange(int(n)) + int(s) for s, n in zip(starts, split_sizes, strict=True)]
    rows = torch.cat([pieces[int(i)] for i in sorted_index])
    return rows if len(rows) == count else torch.arange(count)


def moe_sort_chunks_by_index(inp: Tensor, split_sizes: Tensor, sorted_index: Tensor) -> Tensor:
    rows = _sorted(split_sizes, sorted_index, inp.shape[0])
    out: Tensor = _Moved.apply(inp, rows, None, None)[0]
    return out


def moe_sort_chunks_by_index_with_probs(
    inp: Tensor, probs: Tensor, split_sizes: Tensor, sorted_index: Tensor
) -> tuple[Tensor, Tensor]:
    rows = _sorted(split_sizes, sorted_index, inp.shape[0])
    out, moved = _Moved.apply(inp, rows, probs, None)
    return out, moved


if transformer_engine.__version__ != "2.9.0":
    from . import later_permutation as later

    for _each in (later.moe_permute, later.moe_permute_with_probs, later.moe_unpermute):
        _each.__module__ = __name__
        globals()[_each.__name__] = _each
