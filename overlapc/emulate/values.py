"""Results of collectives among N ranks with the same data, computed on one rank.

One function for each operation of `EmulatedGroup`, under its name. `rank` and `ranks` come
first, then c10d's own arguments. Results go into c10d's output tensors, in place, with no
temporaries as large as a tensor, so that a GPU's memory peak stays that of real ranks.

    all-reduce = N times x · all-gather = x, N times · reduce-scatter = N times the own slice
    all-to-all = the own slice, N times · broadcast = x
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

_UNCHANGED = (dist.ReduceOp.AVG, dist.ReduceOp.MAX, dist.ReduceOp.MIN,
              dist.ReduceOp.BAND, dist.ReduceOp.BOR)  # fmt: skip


def _reduce(tensor: torch.Tensor, op: Any, ranks: int) -> None:
    """Reduce `ranks` equal tensors into this one."""
    if op == dist.ReduceOp.SUM:
        tensor.mul_(ranks)
    elif op == dist.ReduceOp.PRODUCT:
        tensor.pow_(ranks)
    elif not any(op == same for same in _UNCHANGED):
        raise NotImplementedError(
            f"the fabric cannot reduce with {_name(op)}; "
            "it knows SUM, PRODUCT, AVG, MAX, MIN, BAND and BOR"
        )


def _name(op: Any) -> str:
    kinds = dist.ReduceOp.RedOpType.__members__
    return next((name for name, kind in kinds.items() if op == kind), str(op))


def _one_by_one(single: Callable[..., None]) -> Callable[..., None]:
    """Make the coalesced form of an operation: one `single` for each pair of tensors."""

    def coalesced(
        rank: int,
        ranks: int,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        opts: Any,
    ) -> None:
        for output, tensor in zip(outputs, inputs, strict=True):
            single(rank, ranks, output, tensor, opts)

    return coalesced


@torch.no_grad()
def allreduce(rank: int, ranks: int, tensors: Sequence[torch.Tensor], opts: Any) -> None:
    for tensor in tensors:
        _reduce(tensor, opts.reduceOp, ranks)


allreduce_coalesced = allreduce


@torch.no_grad()
def allgather(
    rank: int,
    ranks: int,
    outputs: Sequence[Sequence[torch.Tensor]],
    inputs: Sequence[torch.Tensor],
    opts: Any,
) -> None:
    for slots, tensor in zip(outputs, inputs, strict=True):
        for slot in slots:
            slot.copy_(tensor)


@torch.no_grad()
def all_gather_single(
    rank: int, ranks: int, output: torch.Tensor, input: torch.Tensor, opts: Any
) -> None:
    _tiles(output, ranks).copy_(input.reshape(-1))


all_gather_single_coalesced = _one_by_one(all_gather_single)


@torch.no_grad()
def reduce_scatter(
    rank: int,
    ranks: int,
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[Sequence[torch.Tensor]],
    opts: Any,
) -> None:
    for output, slots in zip(outputs, inputs, strict=True):
        output.copy_(slots[rank])
        _reduce(output, opts.reduceOp, ranks)


@torch.no_grad()
def reduce_scatter_single(
    rank: int, ranks: int, output: torch.Tensor, input: torch.Tensor, opts: Any
) -> None:
    output.view(-1).copy_(_tiles(input, ranks)[rank])
    _reduce(output, opts.reduceOp, ranks)


reduce_scatter_single_coalesced = _one_by_one(reduce_scatter_single)


@torch.no_grad()
def all_to_all_single(
    rank: int,
    ranks: int,
    output: torch.Tensor,
    input: torch.Tensor,
    output_splits: Sequence[int],
    input_splits: Sequence[int],
    opts: Any,
) -> None:
    """Every rank sends to this one what this one sends to itself."""
    mine = (input.split(list(input_splits)) if input_splits else input.chunk(ranks))[rank]
    slots = output.split(list(output_splits)) if output_splits else output.chunk(ranks)
    for slot in slots:
        _check_uniform(slot, mine, rank)
        slot.copy_(mine.view_as(slot))


@torch.no_grad()
def alltoall(
    rank: int,
    ranks: int,
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    opts: Any,
) -> None:
    for slot in outputs:
        _check_uniform(slot, inputs[rank], rank)
        slot.copy_(inputs[rank].view_as(slot))


def broadcast(rank: int, ranks: int, tensors: Sequence[torch.Tensor], opts: Any) -> None:
    """All ranks hold the root's data already."""


@torch.no_grad()
def reduce(rank: int, ranks: int, tensors: Sequence[torch.Tensor], opts: Any) -> None:
    if rank == opts.rootRank:
        allreduce(rank, ranks, tensors, opts)


@torch.no_grad()
def gather(
    rank: int,
    ranks: int,
    outputs: Sequence[Sequence[torch.Tensor]],
    inputs: Sequence[torch.Tensor],
    opts: Any,
) -> None:
    if rank == opts.rootRank:
        allgather(rank, ranks, outputs, inputs, opts)


@torch.no_grad()
def scatter(
    rank: int,
    ranks: int,
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[Sequence[torch.Tensor]],
    opts: Any,
) -> None:
    if rank != opts.rootRank:
        raise NotImplementedError(
            f"scatter from rank {opts.rootRank}, but only rank {rank} is present in the fabric "
            "and knows no other rank's list: scatter from the present rank, be rank "
            f"{opts.rootRank}, or, with DTensors, pass src_data_rank=None, which keeps own data"
        )
    for output, slots in zip(outputs, inputs, strict=True):
        output.copy_(slots[rank])


def barrier(rank: int, ranks: int, opts: Any) -> None:
    """The only rank is always there."""


def _tiles(tensor: torch.Tensor, ranks: int) -> torch.Tensor:
    """A gathered tensor as one row for each rank; c10d wants such tensors contiguous."""
    return tensor.view(ranks, -1)


def _check_uniform(slot: torch.Tensor, mine: torch.Tensor, rank: int) -> None:
    if slot.numel() != mine.numel():
        raise ValueError(
            f"all-to-all on the fabric: every rank sends {mine.numel()} elements to rank {rank}, "
            f"but a slot of {slot.numel()} waits for them; the fabric's ranks hold the same "
            "data, so all output splits must equal input_splits[rank]. Exchange the split sizes "
            "by all-to-all first, as dropless MoE does, or give equal splits"
        )
