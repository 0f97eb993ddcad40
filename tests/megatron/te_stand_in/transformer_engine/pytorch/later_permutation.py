"""What release 2.18 has otherwise than 2.9 in `permutation`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import permutation as before


def moe_permute(
    inp: Tensor,
    routing_map: Tensor,
    num_out_tokens: int | None,
    max_token_num: int = -1,
    map_type: str = "mask",
) -> Any:
    assert num_out_tokens is not None
    return before.permuted(inp, routing_map, num_out_tokens)


def moe_permute_with_probs(
    inp: Tensor, probs: Tensor, routing_map: Tensor, num_out_tokens: int | None
) -> Any:
    assert num_out_tokens is not None
    return before.permuted_with_probs(inp, probs, routing_map, num_out_tokens)


def moe_unpermute(
    inp: Tensor,
    row_id_map: Tensor,
    merging_probs: Tensor | None = None,
    restore_shape: torch.Size | None = None,
    map_type: str = "mask",
    probs: Tensor | None = None,
    pad_offsets: Tensor | None = None,
) -> Tensor:
    assert merging_probs is None
    assert pad_offsets is None
    return before.unpermuted(inp, row_id_map, restore_shape)
