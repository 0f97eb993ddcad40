"""The emulated link gives gloo's numbers, in an alpha-beta link's time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from overlapc.core.errors import OptionError, RankError
from overlapc.emulate import Link, init_fabric, init_link, now_ns, virtual_clock
from overlapc.emulate.link import _Board, _Lane
from tests.multiprocess import spawn
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


def work_for(ns: int) -> None:
    """Keep this thread's core busy."""
    until_ns = time.thread_time_ns() + ns
    while time.thread_time_ns() < until_ns:
        pass


def virtual_times(rank: int, ranks: int) -> dict[str, tuple[int, int]]:
    """(virtual, stood) nanoseconds of each case, on the link of `timings`."""
    init_link(Link(alpha_s=0.05, bytes_per_s=10e6), clock="virtual")
    x = torch.ones(125_000)
    clock = virtual_clock()
    took = {}

    def case(name: str, run: Callable[[], object]) -> None:
        dist.barrier()
        since_ns, stood_ns = now_ns(), clock.stood_ns
        run()
        took[name] = now_ns() - since_ns, clock.stood_ns - stood_ns

    def hidden(work_ns: int) -> None:
        work = dist.all_reduce(x, async_op=True)
        work_for(work_ns)
        assert work.is_completed() == (work_ns > 100_000_000)
        work.wait()
        work.wait()

    def late() -> None:
        if rank == 1:
            work_for(80_000_000)
        dist.all_reduce(x)

    def pipeline() -> None:
        if rank == 0:
            dist.send(x, 1)
        elif rank == 1:
            time.sleep(0.1)
            dist.recv(x, 0)

    dist.all_reduce(x)
    case("asleep", lambda: time.sleep(0.2))
    case("one", lambda: dist.all_reduce(x))
    case("half hidden", lambda: hidden(60_000_000))
    case("hidden", lambda: hidden(150_000_000))
    case("one rank late", late)
    case("sent", pipeline)
    with pytest.raises(NotImplementedError, match="machine"):
        dist.all_reduce(x, async_op=True).get_future()
    dist.destroy_process_group()
    return took


def test_virtual_time_is_compute_and_the_models_waits() -> None:
    """Three ranks share the cores; each has the times of a core of its own."""
    one_ns = 50_000_000 + round(4 / 3 * 500_000 / 10e6 * 1e9)  # an all-reduce of three ranks
    sent_ns = 100_000_000
    expected = {
        "asleep": (0, 0),
        "one": (one_ns, one_ns),
        "half hidden": (one_ns, one_ns - 60_000_000),
        "hidden": (150_000_000, 0),
        "one rank late": (80_000_000 + one_ns, None),
        "sent": (sent_ns, sent_ns),
    }
    slack_ns = 8_000_000  # the interpreter's own work
    for rank, took in enumerate(run_ranks(virtual_times, 3)):
        for case, (all_ns, stood_ns) in expected.items():
            if case == "sent" and rank == 2:
                all_ns = stood_ns = 0
            assert all_ns <= took[case][0] <= all_ns + slack_ns, (rank, case, took)
            if stood_ns is not None:
                assert abs(took[case][1] - stood_ns) <= slack_ns, (rank, case, took)


def waits_elsewhere(rank: int, ranks: int) -> tuple[int, int]:
    """The virtual time of one thread that works and of another that works and waits."""
    init_link(Link(alpha_s=0.05, bytes_per_s=1e12), clock="virtual")

    def other() -> None:
        work_for(30_000_000)
        work.wait()
        work_for(20_000_000)

    dist.barrier()
    since_ns = now_ns()
    work_for(10_000_000)
    work = dist.all_reduce(torch.ones(1), async_op=True)
    with ThreadPoolExecutor() as pool:
        pool.submit(other).result()
        took_ns = now_ns() - since_ns
    work_for(10_000_000)
    all_ns = now_ns() - since_ns
    dist.destroy_process_group()
    return took_ns, all_ns


def test_virtual_time_goes_on_in_another_thread() -> None:
    """What a thread did before its first reading, here 30 ms, is not seen."""
    for took_ns, all_ns in run_ranks(waits_elsewhere, 2):
        assert 60_000_000 <= took_ns <= 84_000_000
        assert 10_000_000 <= all_ns - took_ns <= 14_000_000


def test_a_clock_is_named() -> None:
    with pytest.raises(OptionError, match="unknown clock 'wall'; known: machine, virtual"):
        init_link(FAST, clock="wall")


def test_an_init_that_fails_leaves_the_clock() -> None:
    init_link(FAST, clock="virtual", store=dist.HashStore(), rank=0, world_size=1)
    clock = virtual_clock()
    try:
        assert clock is not None
        for name in ("machine", "virtual"):
            with pytest.raises(ValueError, match="twice"):
                init_link(FAST, clock=name, store=dist.HashStore(), rank=0, world_size=1)
            with pytest.raises(ValueError, match="twice"):
                init_fabric(FAST, clock=name, world_size=2)
        with pytest.raises(OptionError, match="unknown clock"):
            init_fabric(FAST, clock="wall", world_size=2)
        assert virtual_clock() is clock
    finally:
        dist.destroy_process_group()
    with pytest.raises(TypeError):
        init_link(FAST, clock="virtual", no_such_option=1)
    assert virtual_clock() is None


@pytest.mark.parametrize("fabric", [False, True], ids=["link", "fabric"])
def test_virtual_time_ends_with_the_default_group(fabric: bool) -> None:
    if fabric:
        init_fabric(FAST, clock="virtual", world_size=2)
    else:
        init_link(FAST, clock="virtual", store=dist.HashStore(), rank=0, world_size=1)
    clock = virtual_clock()
    assert clock is not None
    dist.destroy_process_group(dist.new_group([0]))
    assert virtual_clock() is clock
    dist.destroy_process_group()
    assert virtual_clock() is None
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert virtual_clock() is None
    dist.destroy_process_group()


def barrier_of_init(rank: int, ranks: int) -> int:
    """Virtual nanoseconds of a transfer behind a barrier that is part of the init."""
    os.environ["TORCH_DIST_INIT_BARRIER"] = "1"
    init_link(Link(alpha_s=0.05, bytes_per_s=1e12), clock="virtual")
    since_ns = now_ns()
    dist.all_reduce(torch.ones(1))
    took_ns = now_ns() - since_ns
    dist.destroy_process_group()
    return took_ns


def test_a_barrier_of_the_init_is_in_virtual_time() -> None:
    for took_ns in run_ranks(barrier_of_init, 2):
        assert 50_000_000 <= took_ns <= 100_000_000


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


def test_run_ranks_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spawn, "PATIENCE", 1)
    begin = time.monotonic()
    with pytest.raises(RankFailed, match="not done after 5 s"):
        run_ranks(sleeps_too_long, 2, timeout_s=5)
    assert time.monotonic() - begin < 40
