"""Links are measured by real ranks together: figures right, agreed, and never a hang."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from overlapc.core.errors import RankError
from overlapc.core.ir import Profile
from overlapc.emulate import Link, init_link
from overlapc.emulate.model import Kind
from overlapc.passes.capture.front import capture
from overlapc.profiler import slowdown
from overlapc.profiler.cache import Cache
from overlapc.profiler.clock import Clock
from overlapc.profiler.link_model import Collective, Curve, LinkModel
from overlapc.profiler.links import behind_launches, measure_links
from overlapc.profiler.measure import measure
from overlapc.profiler.slowdown import _alike, _Chain, _longest, _of_size, _slowdown
from tests.multiprocess.spawn import measures, run_ranks

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(150)]

LINK = Link(alpha_s=0.010, bytes_per_s=25e6)
KINDS: tuple[tuple[Kind, str], ...] = (
    ("all_reduce", "float32"),
    ("all_gather", ""),
    ("reduce_scatter", "bfloat16"),
    ("all_to_all", ""),
    ("broadcast", ""),
    ("p2p", ""),
)
SIZE = 1 << 19


def every_kind(rank: int, ranks: int) -> LinkModel:
    init_link(LINK)
    group = dist.group.WORLD.group_name
    # Splits may be uneven: the largest of any rank counts.
    calls = [Collective(group, kind, dtype, SIZE - 4096 * rank) for kind, dtype in KINDS]
    return measure_links(calls, budget_s=5)


@measures
def test_every_kind_takes_what_the_link_takes() -> None:
    one, two = run_ranks(every_kind, 2, timeout_s=120)
    assert one == two
    for curve in one.curves:
        expected = LINK.seconds(curve.kind, SIZE, 2) * 1e9
        # As long as the link takes; longer when the ranks wait for a core.
        assert 0.7 * expected < curve.time_ns(SIZE) < 2.5 * expected, curve
        assert len(curve.points) == 2  # the size itself and one for the latency
        smaller = LINK.seconds(curve.kind, SIZE // 4, 2) * 1e9
        assert 0.6 * smaller < curve.time_ns(SIZE // 4) < 3 * smaller, curve
    assert 1000 <= one.slowdown.compute_permille <= 5000
    assert 1000 <= one.slowdown.comm_permille <= 5000
    assert LinkModel.from_text(one.to_text()) == one


def small(rank: int, ranks: int) -> str:
    init_link(LINK)
    call = Collective(dist.group.WORLD.group_name, "all_gather", "", 64)
    return measure_links([call], budget_s=5).conditions["slowdown"]


@measures
def test_slowdowns_beside_small_collectives_are_measured_with_one_that_takes_long() -> None:
    """64 bytes take the latency of 10 ms, and twice as many no longer."""
    one, two = run_ranks(small, 2, timeout_s=120)
    assert one == two
    found = re.search(r"chain of all_gather of (\d+) bytes", one)
    assert found
    assert LINK.seconds("all_gather", int(found[1]), 2) > 0.015


def groups_and_faults(rank: int, ranks: int) -> tuple[str, LinkModel]:
    dist.init_process_group("gloo")
    world = dist.group.WORLD.group_name
    alone = [dist.new_group([r]) for r in range(ranks)][rank].group_name
    calls = [
        Collective(alone, "all_reduce", "float32", 1 << 20),
        Collective(world, "all_reduce", "float32", 1 << 16),
    ]
    model = measure_links(calls, repeats=2, budget_s=1)
    launches = [40 * (1 + rank), 40 * (1 + rank)]  # 60 in the mean of two ranks
    left = behind_launches(calls, [100, 100], launches, torch.device("cpu"))
    assert left == [100 - launches[0], 40]
    assert behind_launches(calls, [10, 10], launches, torch.device("cpu")) == [0, 0]

    kinds: list[Kind] = ["all_reduce"] if rank else ["all_reduce", "broadcast"]
    with pytest.raises(RankError, match="hold different collectives"):
        measure_links([Collective(world, kind, "", 1024) for kind in kinds])

    if rank == 0:  # the other one leaves
        with pytest.raises(RankError, match="a collective failed"):
            measure_links(calls * 3)
    return alone, model


def test_groups_of_one_rank_are_free_and_faults_are_rank_errors() -> None:
    for alone, model in run_ranks(groups_and_faults, 2):
        (both,) = {curve.group for curve in model.curves} - {alone}
        assert model.time_ns(Collective(alone, "all_reduce", "float32", 1 << 20)) == 0
        assert model.time_ns(Collective(both, "all_reduce", "float32", 1 << 16)) > 0


def cached(rank: int, ranks: int, folder: str) -> list[tuple[str, ...]]:
    init_link(LINK)
    group = dist.group.WORLD.group_name
    calls = [Collective(group, "all_reduce", "float32", SIZE)]
    path = Path(folder) / f"rank{rank}"
    sources = []

    def once() -> None:
        model = measure_links(calls, repeats=2, budget_s=2, cache=Cache(path))
        sources.append(tuple(curve.source for curve in model.curves))

    once()
    once()
    if rank == 1:
        path.unlink()  # only one rank has figures: both measure
    once()
    # The link has changed under the same name: one probe tells.
    dist.distributed_c10d._resolve_process_group(group).link = Link(0.1, 25e6)  # type: ignore[attr-defined]
    once()
    return sources


def test_cached_links_are_used_if_all_have_them_and_a_probe_agrees(tmp_path: Path) -> None:
    one, two = run_ranks(cached, 2, str(tmp_path), timeout_s=120)
    assert one == two
    assert one == [("measured",), ("cached",), ("measured",), ("measured",)]


class Shard(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ops = torch.ops._c10d_functional
        group = dist.group.WORLD.group_name
        h = ops.wait_tensor(ops.all_reduce(self.linear(x).detach(), "sum", group))
        return self.linear(x) * h


def whole_graph(rank: int, ranks: int) -> tuple[Profile, Any]:
    init_link(LINK)
    torch.manual_seed(0)
    model = Shard()
    x = torch.randn(1024, 64, requires_grad=True)
    captured = capture(model, x)
    profile, _ = measure(captured, [*model.parameters(), x])
    return profile, [op.name for op in captured.trace.ops if op.role == "start"]


@measures
def test_a_graph_with_collectives_is_measured_in_step() -> None:
    (one, starts), (two, _) = run_ranks(whole_graph, 2, timeout_s=120)
    assert len(starts) == 1
    expected = LINK.seconds("all_reduce", 1024 * 64 * 4, 2) * 1e9
    assert one.costs[starts[0]].comm_ns == two.costs[starts[0]].comm_ns > 0.7 * expected
    assert one.conditions["passes"] == two.conditions["passes"]
    assert one.conditions["passes"] in [f"median of {passes}" for passes in (3, 4, 5)]
    assert one.slowdown == two.slowdown


def test_the_lane_of_a_chain_never_idles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next collective is launched before one is waited for, and none is left."""
    monkeypatch.setattr(slowdown, "agree", lambda numbers, *_: numbers)
    told: list[str] = []
    numbers = iter(range(100))

    def start() -> int:
        number = next(numbers)
        told.append(f"start {number}")
        return number

    clock = Clock(torch.device("cpu"))
    work = lambda: told.append("work")  # noqa: E731
    chain = _Chain("group", clock, start, lambda k: told.append(f"wait {k}"), work)
    worked_ns, rest_ns = chain.run()
    assert worked_ns >= 0
    assert rest_ns >= 0
    expected = ["start 0"]
    for k in range(5):
        expected += [f"start {k + 1}"] * (k < 4) + ["work", f"wait {k}"]
    assert told == expected
    told.clear()
    chain.run(traffic=False)
    assert told == ["work"] * 5
    told.clear()
    chain.run(compute=False)
    assert "work" not in told
    assert len(told) == 10


def test_slowdowns_from_four_times() -> None:
    # free, alone, beside, rest -> compute, comm
    assert _slowdown(60, 100, 60, 40) == [1000, 1000]
    assert _slowdown(60, 100, 90, 40) == [1500, 1500]  # 90 to do what takes 60 alone
    assert _slowdown(60, 100, 60, 70) == [1000, 2000]
    assert _slowdown(60, 100, 60, 120) == [1000, 5000]  # no progress at all: as bad as it gets
    assert _slowdown(60, 100, 200, 0) == [3333, 1000]  # it had ended: nothing to tell


def test_two_runs_that_say_the_same_are_enough() -> None:
    assert _alike((60, 100, 90, 40), (61, 100, 91, 39))
    assert not _alike((60, 100, 90, 40), (60, 100, 95, 40))  # compute is slowed more
    assert not _alike((60, 100, 90, 40), (60, 100, 90, 50))  # traffic is


def test_slowdowns_are_measured_with_a_size_that_takes_long() -> None:
    points = tuple((1 << 14 + i, ms * 1_000_000) for i, ms in enumerate((0, 5, 40, 340)))
    curve = Curve("one", "all_reduce", "float32", 2, points, "measured")
    call = Collective("one", "all_reduce", "float32", 1 << 16)
    assert _of_size(curve, 20_000_000) == (call, 40_000_000)
    assert _of_size(replace(curve, points=points[:2]), 20_000_000)[1] == 5_000_000


def longest(rank: int, ranks: int) -> list[str | None]:
    dist.init_process_group("gloo")
    meshes = [("row", [[0, 1], [2, 3]]), ("column", [[0, 2], [1, 3]])]
    groups = {
        name: next(group for group in made if rank in dist.get_process_group_ranks(group))
        for name, halves in meshes
        if (made := [dist.new_group(half) for half in halves])
    }

    def found(total_ns: dict[str, int], names: list[str]) -> str | None:
        kinds = {"row": "all_reduce", "column": "all_to_all"}
        curves = {
            Curve(groups[name].group_name, kinds[name], "", 2, ((8, 1),), "measured"): ns
            for name, ns in ((name, total_ns[name]) for name in names)
        }
        curve = _longest(curves, torch.device("cpu"))
        return curve and curve.kind

    far = {"row": 50 if rank > 1 else 5, "column": 20}  # ranks 0 and 1 would choose otherwise
    near = {"row": 5, "column": 20 if rank % 2 else 1}
    other = ["column", "row"] if rank == 2 else ["row", "column"]
    return [found(far, ["row", "column"]), found(near, ["row", "column"]), found(far, other)]


def test_all_ranks_choose_the_collective_that_takes_longest_anywhere() -> None:
    assert run_ranks(longest, 4) == [["all_reduce", "all_to_all", None]] * 4
