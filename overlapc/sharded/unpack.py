"""`overlapc::unpacked` is the op that makes full parameters of what a group's gather brings.

It is one op for all parameters of a group, since a view for each would take as long to trace as a
product.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

_library = torch.library.Library("overlapc", "FRAGMENT")
_library.define(
    "unpacked(Tensor flat, int ranks, int[][] shards, int[][] whole, int[] dims) -> Tensor[]"
)


def _unpacked(
    flat: Tensor,
    ranks: int,
    shards: Sequence[Sequence[int]],
    whole: Sequence[Sequence[int]],
    dims: Sequence[int],
) -> list[Tensor]:
    """Full parameters: `whole` are their sizes, `shards` those of one rank's padded part, which
    lies along the parameter's dimension in `dims`."""
    numels = [math.prod(size) for size in shards]
    full = [flat.new_empty(ranks * count) for count in numels]
    out = [each.view(ranks, -1) for each in full]
    torch.split_with_sizes_copy(flat.view(ranks, -1), numels, 1, out=out)
    return [joined(full[i], ranks, shards[i], whole[i], dims[i]) for i in range(len(full))]


def _like(
    flat: Tensor,
    ranks: int,
    shards: Sequence[Sequence[int]],
    whole: Sequence[Sequence[int]],
    dims: Sequence[int],
) -> list[Tensor]:
    full = [flat.new_empty(ranks * math.prod(size)) for size in shards]
    return [joined(full[i], ranks, shards[i], whole[i], dims[i]) for i in range(len(full))]


def joined(
    rows: Tensor, ranks: int, shard: Sequence[int], whole: Sequence[int], dim: int
) -> Tensor:
    """A parameter, of the parts of all ranks."""
    if dim:
        parts = rows.view(ranks * shard[0], *shard[1:]).chunk(ranks)
        return torch.cat(parts, dim)
    count = math.prod(whole)  # padding is behind all rows
    return (rows if count == rows.numel() else rows[:count]).view(whole)


_library.impl("unpacked", _unpacked, "CompositeExplicitAutograd")
torch.library.register_fake("overlapc::unpacked", _like, lib=_library)
unpacked: Callable[..., list[Tensor]] = torch.ops.overlapc.unpacked.default
