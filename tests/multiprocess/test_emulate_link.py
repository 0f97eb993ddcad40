"""The emulated link gives gloo's numbers, in an alpha-beta link's time."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from overlapc.emulate import Link, init_link
from overlapc.emulate.link import _Board, _Lane
from overlapc.errors import RankError
from tests.multiprocess.collectives import every_operation
from tests.multiprocess.spawn import RankFailed, measures, run_ranks

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(150)]

FAST = Link(alpha_s=0.0, bytes_per_s=1e12)
SLACK_S = 1.0  # other work shares the cores; bounds from above only catch gross mistakes


def same_results_as_gloo(rank: int, ranks: int) -> list[str]:
    init_link(FAST)
    link = every_operation(dist.group.WORLD, same_data=False)
    gloo = every_operation(dist.new_group(backend="gloo"), same_data=False)
    assert link.keys() == gloo.keys()
    different = [
        name
        for name in link
        if not all(torch.equal(a, b) for a, b in zip(link[name], gloo[name], strict=True))
    ]
    dist.destroy_process_group()
    return different


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_operation_is_bitwise_gloo(ranks: int) -> None:
    assert run_ranks(same_results_as_gloo, ranks, timeout_s=90) == [[]] * ranks


def timings(rank: int, ranks: int) -> dict[str, float]:
    """Seconds of each case, all on one link: alpha 50 ms, 10 MB/s."""
    link = Link(alpha_s=0.05, bytes_per_s=10e6)
    init_link(link)
    x = torch.ones(125_000)  # 0.5 MB: 50 ms on the wire for two ranks
    took = {}

    def start() -> float:
        dist.barrier()
        return time.monotonic()

    begin = start()
    dist.all_reduce(x)
    took["one"] = time.monotonic() - begin

    begin = start()
    for work in [dist.all_reduce(x, async_op=True) for _ in range(3)]:
        work.wait()
    took["three in flight"] = time.monotonic() - begin

    funcol.wait_tensor(funcol.all_reduce(x, "sum", dist.group.WORLD))  # imports on first use
    start()
    y = funcol.all_reduce(x, "sum", dist.group.WORLD)
    time.sleep(0.3)  # stands for compute
    begin_wait = time.monotonic()
    funcol.wait_tensor(y)
    took["residual wait"] = time.monotonic() - begin_wait

    begin = start()
    if rank == 1:
        time.sleep(0.3)
    dist.all_reduce(x)
    took["one rank late"] = time.monotonic() - begin

    begin = start()
    other = 1 - rank
    received = torch.empty_like(x)
    for work in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, x, other), dist.P2POp(dist.irecv, received, other)]
    ):
        work.wait()
    took["exchange"] = time.monotonic() - begin

    # Uneven splits: the rank with most to send decides for all.
    sizes = [[0, 1000], [250_000, 0]]
    begin = start()
    dist.all_to_all_single(
        torch.empty(sizes[other][rank]),
        torch.ones(sizes[rank][other]),
        [sizes[0][rank], sizes[1][rank]],
        sizes[rank],
    )
    took["uneven all-to-all"] = time.monotonic() - begin

    slow = dist.new_group(backend="overlapc_link", pg_options=Link(0.4, 1e9))
    inherits = dist.new_group()
    assert slow.link == Link(0.4, 1e9)
    assert inherits.link == link
    begin = start()
    dist.all_reduce(x, group=slow)
    took["own link"] = time.monotonic() - begin

    work = dist.all_reduce(x, async_op=True)
    took["completed early"] = work.is_completed()
    future = work.get_future()
    assert torch.equal(future.wait()[0], x)
    took["completed late"] = work.is_completed()
    work.wait()
    work.wait()
    dist.destroy_process_group()
    return took


@measures
def test_time_follows_the_model() -> None:
    one = 0.1
    expected = {
        "one": one,
        "three in flight": 3 * one,
        "one rank late": 0.3 + one,
        "exchange": one,
        "uneven all-to-all": 0.15,
        "own link": 0.4,
    }
    for rank, took in enumerate(run_ranks(timings, 2)):
        for case, seconds in expected.items():
            # Ranks leave the barrier at slightly different times.
            least = seconds - 0.02
            assert least <= took[case] <= seconds + SLACK_S, (rank, case, took)
        assert took["residual wait"] < 0.09, took  # hidden: 100 ms of link under 300 of compute
        assert not took["completed early"]
        assert took["completed late"]


def two_lanes() -> list[_Lane]:
    """One lane as two ranks see it, in one process."""
    store = dist.HashStore()
    with ThreadPoolExecutor() as pool:
        boards = pool.map(lambda rank: _Board(store, rank, 2, timedelta(seconds=5)), range(2))
        return [_Lane(board, mine=r, all_rows=[0, 1]) for r, board in enumerate(boards)]


def test_lane_begins_with_the_last_rank_and_keeps_order() -> None:
    ours, theirs = two_lanes()
    first, second, third = (ours.launch(at, 100) for at in (1000, 1010, 2000))
    assert ours.end_of(first, block=False) is None  # the other rank has launched nothing
    for at, duration in [(1050, 100), (1060, 300), (1990, 100)]:
        theirs.launch(at, duration)
    assert ours.end_of(third) == 2100  # the link was idle before
    assert (first.end_ns, second.end_ns) == (1150, 1450)  # one after the other; the longer counts


def test_works_nobody_waits_for_do_not_fill_the_ring() -> None:
    ours, theirs = two_lanes()
    for at in range(3 * _Board.RING):
        ours.launch(at, 1)
        last = theirs.launch(at, 1)
    assert theirs.end_of(last) == 3 * _Board.RING


def test_too_many_in_flight_is_an_error() -> None:
    ours, theirs = two_lanes()
    first = ours.launch(0, 1)
    for at in range(_Board.RING + 1):
        theirs.launch(at, 1)
    with pytest.raises(RankError, match="in flight"):
        ours.end_of(first)


def tensor_parallel(rank: int, ranks: int) -> bool:
    """A column-row matmul on DTensors, eager and traced, on the link and on gloo."""
    init_link(FAST)

    def step(mesh) -> list[torch.Tensor]:
        torch.manual_seed(0)
        x = distribute_tensor(torch.randn(8, 16), mesh, [Replicate()])
        up = distribute_tensor(torch.randn(16, 32), mesh, [Shard(1)]).requires_grad_()
        down = distribute_tensor(torch.randn(32, 16), mesh, [Shard(0)]).requires_grad_()
        y = (x @ up).relu() @ down
        out = y.redistribute(mesh, [Replicate()])
        out.square().sum().backward()
        assert isinstance(up.grad, DTensor)
        assert isinstance(down.grad, DTensor)
        return [out.to_local(), up.grad.full_tensor(), down.grad.full_tensor()]

    mesh = init_device_mesh("cpu", (ranks,))
    gloo_group = dist.new_group(backend="gloo")
    gloo_mesh = dist.DeviceMesh.from_group(gloo_group, "cpu")
    equal = all(
        torch.equal(a.detach(), b.detach())
        for a, b in zip(step(mesh), step(gloo_mesh), strict=True)
    )

    def traced(x: torch.Tensor) -> torch.Tensor:
        y = funcol.all_reduce(x * 2, "sum", mesh.get_group())
        return funcol.all_gather_tensor(y + 1, 0, mesh.get_group())

    x = torch.full((2, 3), float(rank))
    compiled = torch.compile(traced, backend="aot_eager", fullgraph=True)
    equal &= torch.equal(compiled(x), traced(x))
    dist.destroy_process_group()
    return equal


def test_dtensor_and_compiled_collectives_match_gloo() -> None:
    assert run_ranks(tensor_parallel, 2, timeout_s=50) == [True, True]


def data_parallel(rank: int, ranks: int) -> list[torch.Tensor]:
    init_link(FAST)
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 3))
    model(torch.full((2, 4), float(rank + 1))).sum().backward()
    grads = [p.grad for p in model.parameters()]
    dist.destroy_process_group()
    return grads


def test_data_parallel_averages_gradients() -> None:
    for weight, bias in run_ranks(data_parallel, 2):
        assert torch.equal(weight, torch.full((3, 4), 3.0))
        assert torch.equal(bias, torch.full((3,), 2.0))


def asks_without_settings(rank: int, ranks: int) -> None:
    import overlapc.emulate.link  # noqa: F401 - registers the backend

    dist.init_process_group("overlapc_link")


def test_missing_settings_are_named() -> None:
    with pytest.raises(RankFailed, match="init_link"):
        run_ranks(asks_without_settings, 1)


def sleeps_too_long(rank: int, ranks: int) -> None:
    time.sleep(60 if rank else 0)


def test_run_ranks_ends_in_time() -> None:
    begin = time.monotonic()
    with pytest.raises(RankFailed, match="not done after 5 s"):
        run_ranks(sleeps_too_long, 2, timeout_s=5)
    assert time.monotonic() - begin < 40
