"""What is measured on a GPU is plausible, and predicts a step that was not measured with it."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
import torch.distributed as dist

import overlapc
from examples.gpt.model import GPT, GPTConfig
from overlapc.core.ir import Slowdown
from overlapc.emulate import Fabric, Link, init_fabric
from overlapc.profiler.hardware import Hardware, format_hardware, load_hardware
from overlapc.profiler.link_model import Collective
from overlapc.profiler.links import measure_links
from overlapc.profiler.machine import measure_machine

pytestmark = pytest.mark.filterwarnings("ignore:.*deterministic:UserWarning")
CONFIG = GPTConfig(vocab=32000, layers=2, width=2048, heads=16, max_seq=2048)


@pytest.fixture(scope="module")
def here() -> Hardware:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    return measure_machine("here", load_hardware("h100-sxm"), budget_s=15)


def test_figures_are_plausible(here: Hardware, tmp_path: Path) -> None:
    kernels = here.kernels
    assert kernels is not None
    print(format_hardware(here))
    assert all(0.3 < part <= 1 for part in kernels.parts.values())
    assert all(0.2 < part <= 1 for part in here.streams.values())
    assert 500 < here.launch_ns < 20_000
    path = tmp_path / "here.toml"
    path.write_text(format_hardware(here))
    assert load_hardware(path).kernels == kernels


def test_they_predict_a_step(here: Hardware, tmp_path: Path) -> None:
    path = tmp_path / "here.toml"
    path.write_text(format_hardware(here))
    with torch.device("meta"):
        model = GPT(CONFIG).to(torch.bfloat16)
        words = torch.empty(4, 2048, dtype=torch.long)
    report = overlapc.predict(model, words, words, hardware=path, solver="none")
    with torch.device("cuda"):
        model = GPT(CONFIG).to(torch.bfloat16)
        words = torch.randint(0, 32000, (4, 2048))
    took_ms = [timed_ms(model, words) for _ in range(12)][2:]
    predicted_ms = report.timeline.step_ns / 1e6
    print(f"measured {median(took_ms):.2f} ms, predicted {predicted_ms:.2f}")
    assert 0.85 < predicted_ms / median(took_ms) < 1.15


def timed_ms(model: Any, words: Any) -> float:
    model.zero_grad()
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    model(words, words).backward()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end)


def slowdown(**settings: Any) -> Slowdown:
    """Of an all-reduce that takes 2 ms, among 8 ranks."""
    init_fabric(Fabric(Link(1e-5, 100e9), **settings), world_size=8)
    try:
        group = dist.group.WORLD.group_name
        call = Collective(group, "all_reduce", "bfloat16", 1 << 27)
        return measure_links([call], device=torch.device("cuda", 0)).slowdown
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("mode", ["ideal", "contending"])
def test_slowdowns_repeat(mode: str) -> None:
    """Traffic that takes multiprocessors slows products."""
    found = [slowdown(mode=mode) for _ in range(2)]
    print(mode, found)
    for which in ("compute_permille", "comm_permille"):
        one, other = (getattr(each, which) for each in found)
        assert max(one, other) <= 1.15 * min(one, other)


def test_a_watched_clock_slows_no_product_that_leaves_it_a_multiprocessor() -> None:
    """(One that would fill all of them waits for that one, and is slowed.)"""
    from overlapc.emulate.gpu_lane import GpuLane

    device = torch.device("cuda", 0)
    lane = GpuLane(device, "ideal", 16)
    a = torch.randn(2048, 2048, dtype=torch.bfloat16, device=device)  # 128 blocks

    def took_ms(traffic: bool) -> float:
        torch.cuda.synchronize()
        torch.cuda._sleep(20_000_000)  # products are launched before they run
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if traffic:
            lane.launch(100_000_000, 1.0, lambda: None)
            torch.cuda._sleep(400_000)  # the clock is watched by then
        begin.record()
        for _ in range(200):
            torch.mm(a, a)
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end)

    if torch.cuda.get_device_properties(device).multi_processor_count < 130:
        pytest.skip("128 blocks leave no two multiprocessors free here")
    alone, beside = (median([took_ms(each) for _ in range(5)]) for each in (False, True))
    print(f"alone {alone:.2f} ms, beside a watched clock {beside:.2f} ms")
    assert beside < 1.05 * alone


def test_a_block_of_the_paced_copy_is_alone_on_its_multiprocessor() -> None:
    """So the copy goes on beside products as fast as its slowdown says, and not at a quarter."""
    from overlapc.emulate.gpu_lane import GpuLane

    device = torch.device("cuda", 0)
    lane = GpuLane(device, "contending", 16)
    a = torch.randn(4096, 4096, dtype=torch.bfloat16, device=device)

    def took_ms(products: int) -> float:
        torch.cuda.synchronize()
        torch.cuda._sleep(20_000_000)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        lane.launch(2_000_000, 450e9 * 2e-3, lambda: None)
        end.record(lane.stream)
        for _ in range(products):
            torch.mm(a, a)
        torch.cuda.synchronize()
        return begin.elapsed_time(end)

    alone, beside = (median([took_ms(count) for _ in range(5)]) for count in (0, 20))
    print(f"alone {alone:.2f} ms, beside products {beside:.2f} ms")
    assert beside < 2.5 * alone
