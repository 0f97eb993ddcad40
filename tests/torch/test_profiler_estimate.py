"""`estimate` follows the hardware's figures, on fake tensors and fake groups, and quickly."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from overlapc.core.errors import OptionError
from overlapc.core.ir import Profile, Slowdown
from overlapc.passes.capture.front import capture
from overlapc.passes.trace import Captured
from overlapc.profiler.estimate import describe, estimate, priced
from overlapc.profiler.hardware import load_hardware

H100, CPU = load_hardware("h100-sxm"), load_hardware("cpu-gloo")


def cost_of(captured: Captured, profile: Profile, target: str) -> list[int]:
    return [
        profile.costs[op.name].compute_ns
        for op in captured.trace.ops
        if op.signature.startswith(target)
    ]


def on_meta(model: nn.Module, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Captured:
    x = torch.empty(*shape, device="meta", dtype=dtype, requires_grad=True)
    return capture(model.to(device="meta", dtype=dtype), x)


def test_a_matmul_takes_its_flops_at_the_reachable_rate() -> None:
    captured = on_meta(nn.Linear(8192, 8192, bias=False), 8192, 8192)
    l40 = load_hardware("l40")
    assert l40.kernels is None
    took = 2 * 8192**3 / (l40.half_flops * l40.matmul_part(8192)) * 1e9
    found = cost_of(captured, estimate(captured, l40), "aten.mm")
    assert found == [pytest.approx(l40.launch_ns + took, rel=1e-6)] * 3
    assert H100.kernels is not None
    # Where kernels are known, by tiles: 2,048 of 128 by 256 in 16 waves of 132 multiprocessors.
    found = cost_of(captured, estimate(captured, H100), "aten.mm")
    part = H100.kernels.parts["tn"] * 2048 / (16 * 132) * 8192 / (8192 + 128)
    assert found == [pytest.approx(5000 + 2 * 8192**3 / (989e12 * part) * 1e9, rel=1e-6)] * 3


def test_small_matmuls_reach_less_and_other_dtypes_have_other_peaks() -> None:
    def rate(n: int, dtype: torch.dtype) -> float:
        captured = on_meta(nn.Linear(n, n, bias=False), n, n, dtype=dtype)
        return n**3 / cost_of(captured, estimate(captured, H100), "aten.mm")[0]

    assert rate(8192, torch.bfloat16) > 1.4 * rate(1024, torch.bfloat16)
    assert rate(8192, torch.bfloat16) > 10 * rate(8192, torch.float32)
    exact = rate(8192, torch.float32)
    torch.set_float32_matmul_precision("high")
    try:
        assert rate(8192, torch.float32) > 5 * exact  # tf32
    finally:
        torch.set_float32_matmul_precision("highest")


def test_other_ops_take_their_bytes_and_views_take_nothing() -> None:
    class Body(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.gelu(x.t()).unsqueeze(0).expand(4, -1, -1) + x.t()

    captured = on_meta(Body(), 4096, 4096)
    profile = estimate(captured, H100)
    one = 4096 * 4096 * 2
    moved = {"aten.gelu.": 2 * one, "aten.add.": (1 + 1 + 4) * one}  # expanded: read once
    for target, size in moved.items():
        assert cost_of(captured, profile, target)[0] == pytest.approx(
            5000 + size / (3350e9 * 0.85) * 1e9, rel=1e-3
        )
    for target in ("aten.t.", "aten.transpose", "aten.unsqueeze", "aten.expand"):
        assert set(cost_of(captured, profile, target)) <= {0}


def test_attention_convolution_and_lookup() -> None:
    class Body(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(8, 16, 3)
            self.table = nn.Embedding(100_000, 64)

        def forward(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
            x = self.conv(x)
            q = x.flatten(2)[:, :, :64].unsqueeze(1)
            return F.scaled_dot_product_attention(q, q, q).sum() + self.table(tokens).sum()

    model = Body()
    captured = capture(
        model, torch.randn(2, 8, 32, 32, requires_grad=True), torch.zeros(10, dtype=torch.int64)
    )
    profile = estimate(captured, CPU)
    pixels = 2 * 16 * 30 * 30
    launch = CPU.launch_ns
    conv = cost_of(captured, profile, "aten.convolution.")[0] - launch
    assert conv >= 2 * pixels * 8 * 9 / 100e9 * 1e9
    attention = cost_of(captured, profile, "aten._scaled_dot_product")
    assert len(attention) == 2
    assert all(ns > launch for ns in attention)
    assert attention[1] > attention[0]  # backward is more work
    (lookup,) = cost_of(captured, profile, "aten.embedding.")
    assert lookup < launch + 5000  # ten rows, not the table of 25 MB


@pytest.fixture
def fake_world() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=16)
    yield
    dist.destroy_process_group()


class Reduced(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        summed = torch.ops._c10d_functional.all_reduce(x * 2, "sum", dist.group.WORLD.group_name)
        return torch.ops._c10d_functional.wait_tensor(summed) + x


@pytest.mark.usefixtures("fake_world")
def test_collectives_on_fake_groups() -> None:
    captured = on_meta(Reduced(), 4096, 4096)
    (group,) = captured.trace.lanes

    def comm(**options: object) -> Profile:
        return estimate(captured, H100, **options)  # type: ignore[arg-type]

    start = next(op.name for op in captured.trace.ops if op.role == "start")
    size = 4096 * 4096 * 2
    asked, told = comm(), comm(group_sizes={group: 8})
    assert asked.costs[start].comm_ns == H100.collective_ns("all_reduce", size, 16, 8)
    assert told.costs[start].comm_ns == H100.collective_ns("all_reduce", size, 8, 8)
    assert told.costs[start].compute_ns == H100.launch_ns
    assert (asked.slowdown, told.slowdown) == (Slowdown(1020, 1000), Slowdown(1176, 1000))
    assert "h100-sxm" in told.conditions["hardware"]
    assert all(cost.source == "estimated" for cost in told.costs.values())
    with pytest.raises(OptionError, match="says nothing useful"):
        comm(group_sizes={})


@pytest.mark.usefixtures("fake_world")
def test_unknown_groups_are_named() -> None:
    captured = on_meta(Reduced(), 64, 64)
    dist.destroy_process_group()
    try:
        with pytest.raises(OptionError, match="knows no process group"):
            estimate(captured, H100)
    finally:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=16)


def test_ten_thousand_nodes_take_less_than_two_seconds() -> None:
    body = nn.Sequential(*(nn.Linear(8, 8) for _ in range(40)))
    captured = capture(body, torch.randn(4, 8, requires_grad=True))
    trace = captured.trace
    # The same graph again and again; every op with a signature of its own, so none is reused.
    ops, times = list(trace.ops), -(-10_000 // len(trace.ops))
    began = time.perf_counter()
    for n in range(times):
        captured.trace = replace(
            trace, ops=tuple(replace(op, signature=f"{op.signature} {n} {op.name}") for op in ops)
        )
        estimate(captured, CPU)
    assert time.perf_counter() - began < 2 * 3  # others may be using these cores


class Norm(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, x.shape[-1:])


def test_pytorchs_pytorch_kernels_stream_at_rates_of_their_own() -> None:
    assert H100.stream_ns(1e9, "") == H100.memory_ns(1e9)
    assert H100.stream_ns(1e9, "norm") > H100.memory_ns(1e9)
    with FakeTensorMode():
        x = torch.empty(4096, 4096, requires_grad=True)
        captured = capture(Norm(), x)
    (own,) = cost_of(captured, estimate(captured, H100), "aten.native_layer_norm.")
    assert own == pytest.approx(H100.launch_ns + H100.stream_ns(2 * x.nbytes, "norm"), rel=0.01)
    fused = priced(describe(captured), H100, pytorch_kernels=False)
    (as_fast,) = cost_of(captured, fused, "aten.native_layer_norm.")
    assert as_fast == pytest.approx(H100.launch_ns + H100.memory_ns(2 * x.nbytes), rel=0.01)
