"""Loads of experts depend on data; where nothing is measured they are taken as even."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.distributed.fake_pg import FakeStore

from overlapc.passes.storages import UNBACKED_HINT, storage_bytes
from overlapc.passes.trace import trace_in_order

RANKS, ROWS, WIDTH = 4, 24, 8


@pytest.fixture
def group() -> Iterator[str]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    yield dist.group.WORLD.group_name
    dist.destroy_process_group()


def dispatched(group: str) -> fx.GraphModule:
    ops = torch.ops._c10d_functional

    def step(x: Tensor, sent: Tensor, got: Tensor) -> Tensor:
        there, back = got.tolist(), sent.tolist()
        for size in (*there, *back):
            torch._check(size >= 0)
        rows = ops.wait_tensor(ops.all_to_all_single(x, there, back, group)).sin()
        home = ops.wait_tensor(ops.all_to_all_single(rows, back, there, group))
        return home.sum() + rows.nonzero().sum()

    loads = torch.full((RANKS,), ROWS // RANKS)
    return make_fx(step, tracing_mode="symbolic")(torch.ones(ROWS, WIDTH), loads, loads)


def test_ranks_get_as_many_rows(group: str) -> None:
    graph = dispatched(group)
    trace_in_order(graph)
    [sin] = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default)
    starts = graph.graph.find_nodes(
        op="call_function", target=torch.ops._c10d_functional.all_to_all_single.default
    )
    for node in (sin, *starts):
        assert storage_bytes(node.meta["val"]) == ROWS * WIDTH * 4
    [found] = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.nonzero.default)
    assert storage_bytes(found.meta["val"]) == UNBACKED_HINT * 2 * 8
