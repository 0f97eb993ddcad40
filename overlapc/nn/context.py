"""Causal attention of sequences that are divided over ranks (context parallelism).

Each of n ranks has two pieces of every sequence, cut in 2n: rank r has piece r and piece 2n-1-r, so
that all ranks have as many scores under the causal mask. Queries, keys and values are (batch,
heads, sequence, width of a head).

    ring_attention     keys and values go round; attention on those that are here hides the sends
                       (Liu et al. 2023; Transformer Engine's `p2p`)
    ToSequences        all-to-alls give each rank whole sequences of a part of the heads, and
    ToPieces           take them back (Jacobs et al. 2023; Transformer Engine's `a2a`)

Both can be captured, and are exact: the first to rounding, since it adds partial results up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

_c10d = torch.ops._c10d_functional


def ring_attention(q: Tensor, k: Tensor, v: Tensor, rank: int, ranks: int, group: str) -> Tensor:
    """Attention of this rank's queries to the keys and values of all ranks of the group. There may
    be fewer heads of keys than of queries, and values may be narrower than keys."""
    found: Tensor = _Ring.apply(q, k, v, rank, ranks, group)
    return found


class _Ring(torch.autograd.Function):
    """In step i a rank has the keys and values of the i-th rank before it. Step 0 is causal; behind
    it half of the scores are made: of all queries and the first half of the keys, where these are
    of a rank before, else of the second half of the queries and all keys. The backward goes the way
    back, and the gradients of keys and values with it, so that they end where they belong."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, rank: int, ranks: int, group: str
    ) -> Tensor:
        pair = _Pair.of(k, v)
        kv = torch.cat([x.permute(pair.order).reshape(-1) for x in (k, v)])
        out = sums = flight = q.new_empty(0)
        for step in range(ranks):
            if step < ranks - 1:
                flight = _send(kv, 1, rank, ranks, group)
            keys = pair.views(kv)
            if step == 0:
                part, part_sums = torch.ops.overlapc.ring_attention_diagonal(q, *keys)
            else:
                part, part_sums = torch.ops.overlapc.ring_attention(q, *keys, rank, step)
            if step == 0:
                out, sums = part, part_sums
            else:
                out, sums = torch.ops.overlapc.ring_merge(out, sums, part, part_sums)
            if step < ranks - 1:
                kv = _c10d.wait_tensor(flight)
        ctx.save_for_backward(q, kv, out, sums)
        ctx.where = pair, rank, ranks, group
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, kv, out, sums = ctx.saved_tensors
        pair, rank, ranks, group = ctx.where
        order = _order(q)
        dq: Tensor | None = None
        dkv: Tensor | None = None
        for step in reversed(range(ranks)):
            flight = None if step == 0 else _send(kv, -1, rank, ranks, group)
            flight_of_gradient = None if dkv is None else _send(dkv, -1, rank, ranks, group)
            if step == 0:
                parts = torch.ops.overlapc.ring_attention_diagonal_backward(
                    grad, q, out, sums, *pair.views(kv)
                )
            else:
                parts = torch.ops.overlapc.ring_attention_backward(
                    grad, q, out, sums, *pair.views(kv), rank, step
                )
            dq_part, *dkv_part = parts
            dq = torch.ops.overlapc.ring_add(dq, [dq_part], order)
            if flight_of_gradient is not None:
                dkv = _c10d.wait_tensor(flight_of_gradient)
            dkv = torch.ops.overlapc.ring_add(dkv, dkv_part, pair.order)
            if flight is not None:
                kv = _c10d.wait_tensor(flight)
        assert dq is not None
        assert dkv is not None
        return _lying(dq, q.shape, order), *pair.views(dkv), None, None, None


@dataclass(frozen=True)
class _Pair:
    """Keys and values as they travel: one behind the other, each as it lies in memory."""

    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    order: list[int]  # of their dimensions in memory

    @staticmethod
    def of(k: Tensor, v: Tensor) -> _Pair:
        return _Pair((tuple(k.shape), tuple(v.shape)), _order(k))

    def views(self, kv: Tensor) -> tuple[Tensor, Tensor]:
        k, v = kv.split([math.prod(shape) for shape in self.shapes])
        return _lying(k, self.shapes[0], self.order), _lying(v, self.shapes[1], self.order)


def _order(x: Tensor) -> list[int]:
    return sorted(range(x.dim()), key=lambda dim: -x.stride(dim))


def _lying(flat: Tensor, shape: Sequence[int], order: Sequence[int]) -> Tensor:
    """The tensor of that shape whose dimensions lie in that order."""
    back = sorted(range(len(order)), key=order.__getitem__)
    return flat.view([shape[dim] for dim in order]).permute(back)


def _send(x: Tensor, by: int, rank: int, ranks: int, group: str) -> Tensor:
    """Start to send all of `x` so many ranks on, and to receive as much from as many ranks back: an
    all-to-all in which each rank sends to one."""
    rows = x.shape[0]
    sends = [rows if other == (rank + by) % ranks else 0 for other in range(ranks)]
    receives = [rows if other == (rank - by) % ranks else 0 for other in range(ranks)]
    found: Tensor = _c10d.all_to_all_single(x, receives, sends, group)
    return found


# --------------------------------------------------------------------------- ops of the ring


def _seen(step: int, rank: int, rows: int) -> tuple[slice, slice]:
    """The queries and the keys between which scores are made. The ranks' graphs are the same: what
    differs is inside of their ops."""
    if step == 0:
        return slice(0, rows), slice(0, rows)
    if step <= rank:
        return slice(0, rows), slice(0, rows // 2)
    return slice(rows // 2, rows), slice(0, rows)


def _attend(q: Tensor, k: Tensor, v: Tensor, rank: int, step: int) -> tuple[Tensor, Tensor]:
    """Attention to the keys of one rank, and the logarithms of the sums of its weights: zeros, and
    of nothing, where none is seen."""
    _refuse_other_devices(q)
    rows, keys = _seen(step, rank, q.shape[2])
    part, part_sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *_alike(q[:, :, rows], k[:, :, keys], v[:, :, keys]), 0.0, step == 0
    )
    found = torch.zeros_like(q[..., : v.shape[-1]])
    sums = part_sums.new_full(q.shape[:-1], -math.inf)
    found[:, :, rows], sums[:, :, rows] = part[..., : v.shape[-1]], part_sums
    return found, sums


def _as_attended(q: Tensor, k: Tensor, v: Tensor, *_: int) -> tuple[Tensor, Tensor]:
    sums = q.new_empty(q.shape[:-1], dtype=_exact(q))
    return torch.empty_like(q[..., : v.shape[-1]]), sums


def _went_back(
    grad: Tensor, q: Tensor, out: Tensor, sums: Tensor, k: Tensor, v: Tensor, rank: int, step: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients by the scores of one rank's keys, of attention whose result and sums are those
    of all keys."""
    _refuse_other_devices(q)
    rows, keys = _seen(step, rank, q.shape[2])
    more = q.shape[-1] - v.shape[-1]
    given = (F.pad(t[:, :, rows], (0, more)).contiguous() for t in (grad, out))
    grad, out = given
    parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad,
        *_alike(q[:, :, rows], k[:, :, keys], v[:, :, keys]),
        out,
        sums[:, :, rows].contiguous(),
        0.0,
        step == 0,
    )
    heads = k.shape[1], q.shape[1] // k.shape[1]
    dq, dk, dv = (torch.zeros_like(t) for t in (q, k, v))
    dq[:, :, rows] = parts[0]
    dk[:, :, keys] = parts[1].unflatten(1, heads).sum(2)
    dv[:, :, keys] = parts[2].unflatten(1, heads).sum(2)[..., : v.shape[-1]]
    return dq, dk, dv


def _as_went_back(
    grad: Tensor, q: Tensor, out: Tensor, sums: Tensor, k: Tensor, v: Tensor, *_: int
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


# Ops of one name and of the same shapes cost the same, so the diagonal has ops of its own.


@torch.library.custom_op("overlapc::ring_attention_diagonal", mutates_args=())
def _diagonal(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return _attend(q, k, v, 0, 0)


@torch.library.custom_op("overlapc::ring_attention", mutates_args=())
def _beside(q: Tensor, k: Tensor, v: Tensor, rank: int, step: int) -> tuple[Tensor, Tensor]:
    return _attend(q, k, v, rank, step)


@torch.library.custom_op("overlapc::ring_attention_diagonal_backward", mutates_args=())
def _diagonal_backward(
    grad: Tensor, q: Tensor, out: Tensor, sums: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return _went_back(grad, q, out, sums, k, v, 0, 0)


@torch.library.custom_op("overlapc::ring_attention_backward", mutates_args=())
def _beside_backward(
    grad: Tensor, q: Tensor, out: Tensor, sums: Tensor, k: Tensor, v: Tensor, rank: int, step: int
) -> tuple[Tensor, Tensor, Tensor]:
    return _went_back(grad, q, out, sums, k, v, rank, step)


_diagonal.register_fake(_as_attended)
_beside.register_fake(_as_attended)
_diagonal_backward.register_fake(_as_went_back)
_beside_backward.register_fake(_as_went_back)


@torch.library.custom_op("overlapc::ring_merge", mutates_args=())
def _merge(out: Tensor, sums: Tensor, part: Tensor, part_sums: Tensor) -> tuple[Tensor, Tensor]:
    """Attention to more keys, of results for some each."""
    both = torch.logaddexp(sums, part_sums)
    merged = (sums - both).exp()[..., None] * out + (part_sums - both).exp()[..., None] * part
    return torch.empty_like(out).copy_(merged), both


@_merge.register_fake
def _(out: Tensor, sums: Tensor, part: Tensor, part_sums: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(out), torch.empty_like(sums)


@torch.library.custom_op("overlapc::ring_add", mutates_args=())
def _add(whole: Tensor | None, parts: Sequence[Tensor], order: Sequence[int]) -> Tensor:
    """`whole`, or nothing, with the parts added, which lie one behind the other."""
    found = torch.cat([part.permute(list(order)).reshape(-1) for part in parts])
    return found if whole is None else whole + found


@_add.register_fake
def _(whole: Tensor | None, parts: Sequence[Tensor], order: Sequence[int]) -> Tensor:
    return parts[0].new_empty(sum(part.numel() for part in parts))


def _alike(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As many heads of all three, of the same width, as the kernel needs them."""
    v = F.pad(v, (0, q.shape[-1] - v.shape[-1]))
    times = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(times, 1) for t in (k, v))
    return q.contiguous(), k.contiguous(), v.contiguous()


def _exact(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _refuse_other_devices(x: Tensor) -> None:
    if x.device.type != "cpu":
        raise NotImplementedError(
            f"ring_attention: found tensors on {x.device}, expected them on a CPU, where alone it "
            "was tried; on GPUs Transformer Engine has the same attention"
        )


def _flops(q: Any, *_: Any, **__: Any) -> int:
    """Of two products, of all scores. Values are taken to be as wide as keys: kernels need that."""
    batch, heads, rows, width = q
    return 4 * int(batch * heads * rows * width) * int(rows)


def _flops_back(grad: Any, q: Any, *_: Any, **__: Any) -> int:
    return _flops(q) * 5 // 2


def _half(*given: Any, **named: Any) -> int:
    return _flops(*given, **named) // 2


def _half_back(*given: Any, **named: Any) -> int:
    return _flops_back(*given, **named) // 2


register_flop_formula(torch.ops.overlapc.ring_attention_diagonal)(_flops)
register_flop_formula(torch.ops.overlapc.ring_attention_diagonal_backward)(_flops_back)
register_flop_formula(torch.ops.overlapc.ring_attention)(_half)
register_flop_formula(torch.ops.overlapc.ring_attention_backward)(_half_back)


# --------------------------------------------------------------------------- all-to-alls of heads


class ToSequences(torch.autograd.Function):
    """Of this rank's pieces of all heads make whole sequences of a part of the heads. With
    `rows_first` rows lie before the batch in memory."""

    @staticmethod
    def forward(
        ctx: Any, ranks: int, group: str, rows_first: bool, *pieces: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.where = ranks, group, rows_first
        return _to_sequences(ranks, group, pieces)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ranks, group, rows_first = ctx.where
        return None, None, None, *_to_pieces(ranks, group, rows_first, grads)


class ToPieces(torch.autograd.Function):
    """The way back from `ToSequences`."""

    @staticmethod
    def forward(
        ctx: Any, ranks: int, group: str, rows_first: bool, *sequences: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.where = ranks, group
        return _to_pieces(ranks, group, rows_first, sequences)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ranks, group = ctx.where
        return None, None, None, *_to_sequences(ranks, group, grads)


def _to_sequences(ranks: int, group: str, pieces: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """A copy before the all-to-all, and one behind it which puts pieces in the sequence's order."""
    found = []
    for flight in [_start(x.unflatten(1, (ranks, -1)).movedim(1, 0), group) for x in pieces]:
        first, last = _c10d.wait_tensor(flight).chunk(2, 3)  # (rank, batch, heads, rows, width)
        found.append(torch.cat([*first.unbind(0), *last.unbind(0)[::-1]], 2))
    return tuple(found)


def _to_pieces(
    ranks: int, group: str, rows_first: bool, sequences: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    flights = []
    for x in sequences:
        cut = x.chunk(2 * ranks, 2)
        ordered = [piece for r in range(ranks) for piece in (cut[r], cut[2 * ranks - 1 - r])]
        flights.append(_start(torch.stack(ordered).unflatten(0, (ranks, 2)), group))
    found = []
    for flight in flights:
        there = _c10d.wait_tensor(flight)  # (rank, two, batch, heads, rows, width)
        if rows_first:
            rows = there.permute(1, 4, 2, 0, 3, 5).flatten(3, 4).flatten(0, 1).permute(1, 2, 0, 3)
        else:
            rows = there.permute(2, 1, 4, 0, 3, 5).flatten(3, 4).flatten(1, 2).transpose(1, 2)
        found.append(rows)
    return tuple(found)


def _start(x: Tensor, group: str) -> Tensor:
    even = [1] * x.shape[0]
    found: Tensor = _c10d.all_to_all_single(x.contiguous(), even, even, group)
    return found
