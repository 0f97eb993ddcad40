"""Collectives of a block that become one give every bit that they gave apart."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn

from overlapc.nn.layers import GatherRows
from overlapc.passes.buckets import fuse
from overlapc.passes.whole import peak_in_order
from overlapc.planning.options import Options
from overlapc.ranks.groups import Attempts
from overlapc.runtime.whole import plan_step
from tests.torch.exact import randn
from tests.torch.test_whole_step import Step
from tests.torch.zoo import on_fabric

BLOCKS, RANKS = 3, 4
KINDS = {
    "gathers": torch.ops._c10d_functional.all_gather_into_tensor.default,
    "reductions": torch.ops._c10d_functional.reduce_scatter_tensor.default,
}


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    with on_fabric():
        yield


class Sharded(nn.Module):
    """Blocks of two weights, of which each rank has rows; each weight is gathered by itself."""

    def __init__(self, width: int) -> None:
        super().__init__()
        shapes = [(2 * width, width), (width, 2 * width)] * BLOCKS
        self.shards = nn.ParameterList(
            randn(rows // RANKS, columns, seed=i) / width
            for i, (rows, columns) in enumerate(shapes)
        )

    def forward(self, x: Tensor) -> Tensor:
        group = dist.group.WORLD.group_name  # type: ignore[union-attr]
        for i in range(0, 2 * BLOCKS, 2):
            first, second = (GatherRows.apply(self.shards[i + k], RANKS, group) for k in (0, 1))
            x = x + torch.tanh(x @ first.T) @ second.T
        return x


def sharded(width: int = 16, rows: int = 8) -> Step:
    """A step whose collectives say in which block they are."""
    step = Step(Sharded(width), randn(rows, width, seed=9))
    for kind, target in KINDS.items():
        starts = step.graph.graph.find_nodes(op="call_function", target=target)
        assert len(starts) == 2 * BLOCKS
        for i, start in enumerate(starts if kind == "gathers" else reversed(starts)):
            start.meta["block"] = f"layers.{i // 2}.weights"
    return step


def path_of(node: fx.Node) -> str:
    return str(node.meta.get("block", ""))


def counts(graph: fx.GraphModule) -> list[int]:
    return [
        len(graph.graph.find_nodes(op="call_function", target=target)) for target in KINDS.values()
    ]


def test_joined_collectives_give_the_same_bits() -> None:
    step = sharded()
    graph = copy.deepcopy(step.graph)
    assert fuse(graph, path_of) == {dist.group.WORLD.group_name}  # type: ignore[union-attr]
    assert counts(graph) == [BLOCKS, BLOCKS]
    assert step.same(graph)
    assert fuse(graph, path_of) == set()  # each block has one of each now


def test_what_is_of_no_block_stays() -> None:
    step = sharded()
    graph = copy.deepcopy(step.graph)
    assert fuse(graph, lambda node: "head") == set()
    assert step.same(graph)
    assert counts(graph) == counts(step.graph)


@pytest.mark.parametrize("large", [False, True])
def test_collectives_are_joined_where_that_is_faster(large: bool) -> None:
    """Latency rules in a small model; in a large one copies cost more than it."""
    step = sharded(*((512, 4096) if large else (16, 8)))
    attempts = Attempts("test")
    options = Options(profile="estimate", hardware="cpu-gloo", memory_budget="1GB")

    def planned(*given: Any) -> tuple[fx.GraphModule, Any]:
        graph = copy.deepcopy(step.graph)
        gradients, static = step.gradients, range(step.static)
        return graph, plan_step(graph, gradients, static, options, attempts, *given)

    apart, as_traced = planned()
    graph, report = planned(path_of)
    assert counts(apart) == [2 * BLOCKS, 2 * BLOCKS]
    assert counts(graph) == ([2 * BLOCKS] * 2 if large else [BLOCKS] * 2)
    assert report.step_ns <= as_traced.step_ns
    assert (report.step_ns == as_traced.step_ns) == large
    assert report.peak_bytes == peak_in_order(graph)
    assert step.same(graph)
