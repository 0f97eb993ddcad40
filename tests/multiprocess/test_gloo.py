"""All-gathers over gloo that overlap: PyTorch's own damage the heap of most runs of this size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from overlapc.ranks.gloo import mend_gathers
from tests.multiprocess.spawn import run_ranks

pytestmark = pytest.mark.multiprocess
functional = torch.ops._c10d_functional


def gathers(rank: int, ranks: int) -> list[bool]:
    dist.init_process_group("gloo")
    mend_gathers()
    name: Any = dist.group.WORLD.group_name
    random = torch.Generator().manual_seed(rank)
    parts = [
        torch.randn(6, 5, generator=random),
        torch.randn(7, generator=random).bfloat16(),
        torch.randint(9, (2, 3, 4), generator=random),
        torch.randn(6, 5, generator=random).T,
        torch.randn(0, 3),
        torch.randn(4, dtype=torch.complex64, generator=random),
    ]
    same = []
    for part in parts:
        expected = [torch.empty(part.shape, dtype=part.dtype) for _ in range(ranks)]
        dist.all_gather(expected, part.contiguous())
        found = functional.wait_tensor(functional.all_gather_into_tensor(part, ranks, name))
        same.append(torch.equal(found, torch.cat(expected)))
    part, whole = torch.full((2000,), float(rank)), torch.arange(float(ranks))
    for _ in range(1000):
        found = [functional.all_gather_into_tensor(part, ranks, name) for _ in range(8)]
        ends = [functional.wait_tensor(each)[::2000] for each in found]
    same.append(all(torch.equal(each, whole) for each in ends))
    dist.destroy_process_group()
    return same


def test_overlapping_all_gathers_leave_the_heap_alone() -> None:
    assert run_ranks(gathers, 2) == [[True] * 7] * 2
