"""Ranks divide the budget of a step of several graphs alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import overlapc
from overlapc.core.errors import Infeasible
from tests.multiprocess.spawn import run_ranks
from tests.torch.exact import Batch, differences, randn, train

pytestmark = pytest.mark.multiprocess


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.loss = Block(), Block(), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        x = self.second(x)
        torch._dynamo.graph_break()
        return self.loss(x).square().mean()


def broken() -> nn.Module:
    torch.manual_seed(1)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan: dict[str, Any] = {}
    for block in ("first", "second"):
        plan |= {f"{block}.up": ColwiseParallel(), f"{block}.down": RowwiseParallel()}
    return parallelize_module(Broken(), mesh, plan)


def on_rank(rank: int, ranks: int) -> list[Any]:
    dist.init_process_group("gloo")
    batches = [Batch((randn(32, 16, seed=i),)) for i in range(3)]
    plain = broken()
    plain.compile(backend="aot_eager")
    expected = train(plain, batches)
    found: list[Any] = []
    for budget in (1, 0.9):
        torch._dynamo.reset()
        twin: Any = overlapc.optimize(broken(), solver="heu", memory_budget=budget)
        try:
            found += [differences(expected, train(twin, batches)), twin.fallbacks]
            found.append([report.plan for report in twin.graphs])
        except Infeasible as infeasible:
            found.append(infeasible.smallest_bytes)
    dist.barrier()
    dist.destroy_process_group()
    return found


def test_ranks_share_alike() -> None:
    first, second = run_ranks(on_rank, 2, timeout_s=200)
    smallest, differs, unchanged, plans = first
    assert smallest > 1
    assert differs == unchanged == []
    assert len(plans) == 3
    assert second == first
