"""Ranks that do the same work trace to the same digest, whatever differs by rank only in name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import overlapc
from overlapc.api import capture
from overlapc.passes.emit.rewrite import rewrite
from overlapc.passes.trace import Captured


@contextmanager
def rank_of(world: int, rank: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


class OwnPart(nn.Module):
    """The backward of DTensor's gather: every rank goes on with its own part of a split."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        parts = torch.ops.aten.split.Tensor(self.up(x), 4, -1)
        first, last = torch.ops.aten.split.Tensor(x, 4, -1)
        return self.down(parts[dist.get_rank()]).sum() + (first * last).sum()


class TwoGroups(nn.Module):
    """A mesh of two dimensions, whose groups torch numbers by rank."""

    def __init__(self) -> None:
        super().__init__()
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        self.groups = [mesh.get_group("tensor"), mesh.get_group("data")]
        self.up = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        for group in self.groups:
            x = funcol.all_reduce(self.up(x), "sum", group)
        return x.square().mean()


def captured(kind: type[nn.Module], world: int, rank: int) -> Captured:
    with rank_of(world, rank):
        return capture(kind(), torch.ones(4, 8, requires_grad=True))


@pytest.mark.parametrize("kind", [OwnPart, TwoGroups])
def test_a_plan_of_one_rank_is_one_for_another(kind: type[nn.Module]) -> None:
    first, last = captured(kind, 4, 0), captured(kind, 4, 3)
    assert first.trace.digest == last.trace.digest
    with rank_of(4, 0):
        report = overlapc.predict(kind(), torch.ones(4, 8, requires_grad=True), solver="heu")
    with rank_of(4, 3):
        rewrite(last, report.plan)


def test_groups_have_other_names_on_other_ranks() -> None:
    """Or the test above says nothing; and the digest still tells one group from two."""
    first, last = captured(TwoGroups, 4, 0), captured(TwoGroups, 4, 3)
    assert first.trace.lanes != last.trace.lanes
    with rank_of(4, 0):
        model = TwoGroups()
        model.groups = [model.groups[0]] * 2
        once = capture(model, torch.ones(4, 8, requires_grad=True))
    assert once.trace.digest != first.trace.digest
