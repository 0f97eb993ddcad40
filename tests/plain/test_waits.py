"""Ranks of frameworks that wait for their transfers run nothing meanwhile."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from overlapc.core.pipeline import StageCost, simulate_pipeline
from overlapc.search.frameworks.known import find_framework
from overlapc.search.layouts import Cluster, Layout
from overlapc.search.place import sent_between
from overlapc.search.rows import Rows, waited

COST = StageCost(forward_ns=100, input_ns=130, weight_ns=70, sent_ns=10)
LAYOUT = Layout(1, 4, 1, 1)
UNIT = cast(Any, SimpleNamespace(boundary_bytes=1 << 24))


def last(costs: tuple[StageCost, ...], count: int = 40) -> int:
    slowest_ns = max(cost.forward_ns + cost.takes("B") for cost in costs)
    return Rows.of(LAYOUT, count).last(costs, count, slowest_ns)


def test_a_microbatch_takes_what_a_rank_waits_with_both_its_neighbours() -> None:
    costs = (COST,) * 4
    waiting = waited(costs, [10, 10, 10])
    assert [cost.forward_ns for cost in waiting] == [110, 110, 110, 100]
    assert [cost.takes("B") for cost in waiting] == [200, 210, 210, 210]
    assert last(waiting) - last(waiting, 39) == 320
    assert 300 < last(costs) - last(costs, 39) < 320  # as few are in flight, some are waited for
    # In a pipeline of one microbatch each way is there and back, waited for or not.
    once = Layout(1, 4, 1, 1).rows(1)
    assert simulate_pipeline(once, waiting).step_ns == simulate_pipeline(once, costs).step_ns


def test_only_the_slowest_transfer_counts_where_a_node_holds_many_stages() -> None:
    """Of 16 stages on two nodes two send to each other between nodes."""
    cluster = Cluster("a100-sxm-80", 16, 8, 1 << 40, 8)
    between = sent_between(cluster, Layout(1, 16, 1, 1), UNIT)
    assert [ns > min(between) for ns in between] == [stage == 7 for stage in range(15)]
    turns = sent_between(cluster, Layout(1, 16, 1, 1, "zero-bubble-v"), UNIT)
    assert [stage for stage, ns in enumerate(turns) if ns > min(turns)] == [7, 23]
    around = sent_between(cluster, Layout(1, 16, 1, 1, "interleaved", chunks=2), UNIT)
    assert [stage for stage, ns in enumerate(around) if ns > min(around)] == [7, 15, 23]
    assert len(set(sent_between(cluster, Layout(8, 2, 1, 1), UNIT))) == 1


@pytest.mark.parametrize(
    ("framework", "waits"),
    [
        ("overlapc", (0, 0, 0)),
        ("megatron", (1, 0, 0)),
        ("megatron-2021", (1, 1, 0)),
        ("megatron-deepspeed", (2, 0, 0)),
        ("scaling", (2, 0, 0)),
    ],
)
def test_who_waits(framework: str, waits: tuple[int, ...]) -> None:
    found = find_framework(framework)
    schedules = "1f1b", "interleaved", "zero-bubble"
    assert tuple(map(found.waits_in, schedules)) == waits
