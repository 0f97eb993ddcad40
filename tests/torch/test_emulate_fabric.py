"""The one-process fabric computes what real ranks with the same data compute."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from overlapc.core.errors import OptionError
from overlapc.emulate import Fabric, Link, init_fabric
from tests.multiprocess.collectives import Results, every_operation
from tests.multiprocess.spawn import run_ranks

FAST = Link(alpha_s=0.0, bytes_per_s=1e12)
SLACK_S = 1.0  # other work shares the cores; bounds from above only catch gross mistakes


@pytest.fixture(autouse=True)
def leave_no_group() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def on_gloo(rank: int, ranks: int) -> Results:
    dist.init_process_group("gloo")
    results = every_operation(dist.group.WORLD, same_data=True)
    dist.destroy_process_group()
    return results


def on_fabric(rank: int, ranks: int) -> Results:
    init_fabric(FAST, world_size=ranks, rank=rank)
    results = every_operation(dist.group.WORLD, same_data=True)
    dist.destroy_process_group()
    return results


@pytest.mark.multiprocess
@pytest.mark.timeout(150)
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_operation_matches_real_ranks(ranks: int) -> None:
    for rank, real in enumerate(run_ranks(on_gloo, ranks, timeout_s=120)):
        fabric = on_fabric(rank, ranks)
        assert fabric.keys() == real.keys()
        for name, expected in real.items():
            # A power may round otherwise than multiplying one by one; all else is bitwise.
            exact = {} if "PRODUCT" in name else {"rtol": 0, "atol": 0}
            torch.testing.assert_close(
                fabric[name], expected, msg=lambda m, n=name, r=rank: f"{n}, rank {r}: {m}", **exact
            )


def test_values_of_each_reduction() -> None:
    init_fabric(FAST, world_size=8, rank=5)
    assert (dist.get_world_size(), dist.get_rank()) == (8, 5)
    for op, expected in [("SUM", 24), ("AVG", 3), ("MAX", 3), ("MIN", 3), ("PRODUCT", 3**8)]:
        x = torch.tensor([3.0])
        dist.all_reduce(x, getattr(dist.ReduceOp, op))
        assert x.item() == expected, op
    with pytest.raises(NotImplementedError, match="BXOR"):
        dist.all_reduce(torch.tensor([3]), dist.ReduceOp.BXOR)


def test_tensor_parallel_mesh_and_compiled_collectives() -> None:
    """A TP layer of rank 1 of 2, in a data-parallel world of 8: groups of the right size."""
    init_fabric(FAST, world_size=8, rank=3)
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
    tp = mesh["tp"]
    assert (tp.get_group().size(), tp.get_group().rank()) == (2, 1)
    assert (mesh["dp"].get_group().size(), mesh["dp"].get_group().rank()) == (4, 1)
    assert tp.get_group().link == FAST

    def place(tensor: torch.Tensor, placement: Placement) -> DTensor:
        return distribute_tensor(tensor, tp, [placement], src_data_rank=None)

    x = place(torch.ones(4, 8), Replicate())
    up = place(torch.ones(8, 6), Shard(1)).requires_grad_()
    down = place(torch.ones(6, 8), Shard(0)).requires_grad_()
    with pytest.raises(NotImplementedError, match="src_data_rank=None"):
        distribute_tensor(torch.ones(8, 6), tp, [Shard(1)])
    assert up.to_local().shape == (8, 3)
    y = ((x @ up) @ down).redistribute(tp, [Replicate()])
    assert torch.equal(y.to_local(), torch.full((4, 8), 48.0))
    y.sum().backward()
    assert torch.equal(up.grad.to_local(), torch.full((8, 3), 32.0))

    def traced(x: torch.Tensor) -> torch.Tensor:
        return funcol.all_gather_tensor(funcol.all_reduce(x, "sum", tp) + 1, 0, tp)

    compiled = torch.compile(traced, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(torch.ones(2)), torch.full((4,), 3.0))


def test_time_follows_the_model() -> None:
    link = Link(alpha_s=0.05, bytes_per_s=10e6)
    init_fabric(link, world_size=2)
    x = torch.ones(125_000)  # 0.5 MB: 50 ms on the wire for two ranks
    one = link.seconds("all_reduce", 500_000, 2)
    assert one == pytest.approx(0.1)

    begin = time.monotonic()
    dist.all_reduce(x)
    assert one <= time.monotonic() - begin <= one + SLACK_S

    begin = time.monotonic()
    works = [dist.all_reduce(x, async_op=True) for _ in range(3)]  # one after the other
    sent = dist.isend(x, 1)  # on a lane of its own
    sent.wait()
    assert one <= time.monotonic() - begin
    works[-1].wait()
    assert 3 * one <= time.monotonic() - begin <= 3 * one + SLACK_S

    work = dist.all_reduce(x, async_op=True)
    assert not work.is_completed()
    time.sleep(0.2)  # stands for compute
    assert work.is_completed()
    begin = time.monotonic()
    work.wait()
    assert time.monotonic() - begin < 0.09  # hidden

    begin = time.monotonic()
    dist.all_reduce(x, async_op=True).get_future().wait()
    assert one <= time.monotonic() - begin


def test_receives_of_a_pipeline_are_zeros() -> None:
    """No rank sends what this one waits for; it neither hangs nor reads what lay in memory."""
    init_fabric(FAST, world_size=4, rank=2)
    x = torch.ones(3)
    dist.recv(x, src=1)
    assert torch.equal(x, torch.zeros(3))
    dist.send(torch.ones(3), dst=3)  # waited for, thus gone
    dist.recv(x, src=1)
    assert torch.equal(x, torch.zeros(3))


def test_uneven_splits_that_no_equal_ranks_could_have() -> None:
    init_fabric(FAST, world_size=2)
    with pytest.raises(ValueError, match=r"input_splits\[rank\]"):
        dist.all_to_all_single(torch.empty(5), torch.ones(5), [2, 3], [2, 3])


def test_splits_of_numpy() -> None:
    init_fabric(FAST, world_size=2)
    out = torch.empty(4)
    dist.all_to_all_single(out, torch.arange(4.0), np.array([2, 2]), np.array([2, 2]))
    assert out.tolist() == [0.0, 1.0, 0.0, 1.0]


def test_settings_are_checked() -> None:
    with pytest.raises(OptionError, match="ideal, copy_engine, contending"):
        Fabric(FAST, mode="perfect")
    with pytest.raises(OptionError, match="bytes_per_s"):
        Link(alpha_s=0, bytes_per_s=0)


def test_package_imports_without_torch() -> None:
    program = "import overlapc.emulate as e, sys; e.Link(0, 1.0); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("mode", ["ideal", "copy_engine", "contending"])
def test_on_a_gpu_the_stream_waits_and_the_host_does_not(mode: str) -> None:
    link = Link(alpha_s=1e-3, bytes_per_s=10e9)
    init_fabric(Fabric(link, mode=mode), world_size=4, rank=1)
    x = torch.ones(10 << 20, device="cuda")  # 40 MB: 6 ms on the wire
    model_ms = 1e3 * link.seconds("all_reduce", 40 << 20, 4)
    dist.all_reduce(x)  # compiles
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    x.fill_(1)
    begin.record()
    host = time.monotonic()
    works = [dist.all_reduce(x, async_op=True) for _ in range(2)]
    for work in works:
        work.wait()
    assert time.monotonic() - host < 2 * model_ms / 1e3
    end.record()
    torch.cuda.synchronize()
    assert begin.elapsed_time(end) >= 2 * model_ms * 0.98
    assert begin.elapsed_time(end) <= 2 * model_ms + 100
    assert torch.equal(x, torch.full_like(x, 16))
    del works, work
    assert torch.cuda.memory_allocated() == before
    # Dropped without a wait: the allocator still keeps the memory until the transfer ends.
    dist.all_reduce(torch.ones(1 << 20, device="cuda"), async_op=True)
    torch.cuda.synchronize()
