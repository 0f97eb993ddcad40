"""Lengths of packed sequences: graphs have tickets, ops the microbatch's own object."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from overlapc.core.errors import CaptureError, OverlapcError
from overlapc.megatron import packed


@dataclass
class PackedSeqParams:
    qkv_format: str = "thd"
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_q_padded: Tensor | None = None
    max_seqlen_q: Any = None
    max_seqlen_kv: Any = None
    cp_group: Any = None


def made(*ends: int) -> PackedSeqParams:
    longest = max(b - a for a, b in pairwise(ends))
    return PackedSeqParams("thd", torch.tensor(ends), None, longest, longest)


def test_an_op_finds_the_lengths_of_its_own_microbatch() -> None:
    each = [made(0, 5, 16), made(0, 9, 10, 16)]
    flat = [tree_flatten(packed.standing_for(one, 16)) for one in each]
    assert flat[0][1] == flat[1][1]  # one graph serves both
    found = [tree_unflatten(leaves, spec) for leaves, spec in flat]
    assert all(one is other for one, other in zip(found, each, strict=True))
    ends = [tree_flatten(packed.standing_for(one, 16).cu_seqlens_q) for one in each]
    assert [tree_unflatten(*one)[1] for one in ends] == [11, 9]


def test_a_graph_has_other_parts_where_fields_differ() -> None:
    one = packed.standing_for(made(0, 16), 16)
    other = packed.standing_for(PackedSeqParams("thd", torch.tensor([0, 16])), 16)
    assert str(tree_flatten(one)[1]) == str(tree_flatten(other)[1])
    padded = PackedSeqParams("thd", torch.tensor([0, 9]), torch.tensor([0, 16]), 16, 16)
    assert str(tree_flatten(packed.standing_for(padded, 16))[1]) != str(tree_flatten(one)[1])
    assert packed.standing_for(padded, 16).max_seqlen_q == 16


def test_ops_are_tried_out_on_one_sequence_of_all_tokens() -> None:
    (_, spec) = tree_flatten(packed.standing_for(made(0, 5, 16), 16))
    tried = tree_unflatten([torch.tensor(0)], spec)
    assert tried.cu_seqlens_q.tolist() == [0, 16]
    assert tried.max_seqlen_q == 16


def test_a_longest_length_may_be_a_tensor() -> None:
    longest = torch.tensor(11)
    one = PackedSeqParams("thd", torch.tensor([0, 5, 16]), None, longest, longest)
    standing = packed.standing_for(one, 16)
    assert standing.max_seqlen_q == 16
    tried = tree_unflatten([torch.tensor(0)], tree_flatten(standing)[1])
    assert (tried.max_seqlen_q, tried.max_seqlen_kv) == (16, 16)


@pytest.mark.parametrize(
    "read",
    [
        lambda each: each.cu_seqlens_q[1:],
        lambda each: each.cu_seqlens_q - 1,
        lambda each: len(each.cu_seqlens_q),
        lambda each: each.cu_seqlens_q.shape,
        lambda each: torch.diff(each.cu_seqlens_q),
        lambda each: each.something_new,
    ],
)
def test_what_else_reads_the_lengths_is_named(read: Any) -> None:
    with pytest.raises(CaptureError, match=r"forward reads (cu_seqlens_q|something_new)"):
        read(packed.standing_for(made(0, 5, 16), 16))


def test_lengths_that_are_gone_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "_MOST", 3)
    first = tree_flatten(packed.standing_for(made(0, 16), 16))
    for _ in range(3):
        packed.standing_for(made(0, 16), 16)
    with pytest.raises(OverlapcError, match="more than 3 microbatches are in flight"):
        tree_unflatten(*first)


def test_a_process_group_is_left_to_megatron() -> None:
    assert packed.unserved(made(0, 16)) == ""
    strange = packed.unserved(PackedSeqParams(cp_group=object()))
    assert strange == "packed sequences with a object as cp_group"
