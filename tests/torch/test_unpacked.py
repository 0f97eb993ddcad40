"""The op that makes full parameters of a gather, against parameters cut as FSDP2 cuts them."""

from __future__ import annotations

import math
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F

from overlapc.sharded.unpack import unpacked


@st.composite
def groups(draw: st.DrawFn) -> tuple[int, list[tuple[tuple[int, ...], int]]]:
    """A number of ranks, and sizes of parameters with the dimension along which each is cut."""
    ranks = draw(st.integers(1, 4))
    found = []
    for _ in range(draw(st.integers(1, 4))):
        size = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
        dim = draw(st.integers(0, len(size) - 1))
        if dim:
            size[dim] *= ranks  # FSDP2 pads the first dimension alone
        found.append((tuple(size), dim))
    return ranks, found


def shards(parameter: Tensor, dim: int, ranks: int) -> list[Tensor]:
    count = math.ceil(parameter.shape[dim] / ranks)
    if dim:
        return list(parameter.chunk(ranks, dim))
    behind = [0, 0] * (parameter.dim() - 1)
    padded = F.pad(parameter, [*behind, 0, count * ranks - parameter.shape[0]])
    return list(padded.split(count))


@given(groups())
def test_parameters_are_those_that_were_cut(
    group: tuple[int, list[tuple[tuple[int, ...], int]]],
) -> None:
    ranks, cases = group
    whole = [torch.rand(size) for size, _ in cases]
    dims = [dim for _, dim in cases]
    cut = [shards(each, dim, ranks) for each, dim in zip(whole, dims, strict=True)]
    flat = torch.cat([parts[rank].reshape(-1) for rank in range(ranks) for parts in cut])
    arguments: list[Any] = [[list(parts[0].shape) for parts in cut], [size for size, _ in cases]]
    found = unpacked(flat, ranks, *arguments, dims)
    assert all(torch.equal(*pair) for pair in zip(found, whole, strict=True))
    with FakeTensorMode() as mode:
        like = unpacked(mode.from_tensor(flat), ranks, *arguments, dims)
    for real, fake in zip(found, like, strict=True):
        assert (real.shape, real.stride()) == (fake.shape, fake.stride())
        assert real.untyped_storage().nbytes() == fake.untyped_storage().nbytes()
