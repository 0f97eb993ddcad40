"""`Context` is how context-parallel ranks attend: what they exchange, and by which kernels."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from overlapc.nn.context import ToPieces, ToSequences, ring_attention
from overlapc.nn.layers import GatherRows


class Context:
    """The context-parallel ranks, or one rank without a group. `kind` is Megatron's
    `--cp-comm-type`. In a ring `rank` says which half of the scores each step makes."""

    def __init__(self, group: ProcessGroup | None, kind: str = "", rank: int = 0) -> None:
        self.name = group.group_name if group else ""
        self.count = group.size() if group else 1
        self.kind, self.rank = kind if group else "", rank

    def attend(self, q: Tensor, k: Tensor, v: Tensor, rows_first: bool) -> Tensor:
        """Causal attention of (batch, sequence, heads, width of a head), or with the sequence as
        the first dimension; returns the same, with heads and width as one dimension."""
        if self.kind == "all_gather":
            k, v = self.gathered(k, v, rows_first)
        order = (1, 2, 0, 3) if rows_first else (0, 2, 1, 3)
        q, k, v = (t.permute(order) for t in (q, k, v))
        if self.kind == "p2p":
            mixed = ring_attention(q, k, v, self.rank, self.count, self.name)
        elif self.kind == "a2a":
            whole = ToSequences.apply(self.count, self.name, rows_first, q, k, v)
            (mixed,) = ToPieces.apply(self.count, self.name, rows_first, _attention(*whole))
        else:
            mixed = _attention(q, k, v)
        return mixed.permute((2, 0, 1, 3) if rows_first else (0, 2, 1, 3)).flatten(2)

    def gathered(self, k: Tensor, v: Tensor, rows_first: bool) -> tuple[Tensor, Tensor]:
        """Keys and values of whole sequences, of which each rank has a part."""
        mine = torch.cat([k, v], -1)
        mine = mine if rows_first else mine.transpose(0, 1).contiguous()
        every = GatherRows.apply(mine, self.count, self.name)
        every = every if rows_first else every.transpose(0, 1)
        keys, values = every.split([k.shape[-1], v.shape[-1]], -1)
        return keys, values


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """In one kernel, which needs values as wide as keys."""
    wide = F.pad(v, (0, k.shape[-1] - v.shape[-1])) if k.shape[-1] > v.shape[-1] else v
    mixed = F.scaled_dot_product_attention(
        q, k, wide, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
    )
    return mixed[..., : v.shape[-1]] if wide is not v else mixed
