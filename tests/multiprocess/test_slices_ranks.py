"""Slices on several ranks: gradients are those of accumulation over slices there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from examples.moe.model import MoEConfig, MoEGPT
from overlapc import TrainStep
from overlapc.emulate import Link, init_link
from overlapc.layers import SumOverRanks
from tests.multiprocess.mortal import caught
from tests.multiprocess.spawn import run_ranks
from tests.multiprocess.test_exactness_ranks import gpt
from tests.torch.test_slices import gradients, plainly

pytestmark = pytest.mark.multiprocess

SLOW_LINK = Link(alpha_s=2e-3, bytes_per_s=1e8)  # so that there is something to hide


def moe() -> nn.Module:
    config = MoEConfig(vocab=32, width=32, heads=4, experts=4, expert_width=32, max_seq=16)
    return MoEGPT(config, dist.group.WORLD)


def tokens(seed: int) -> Tensor:
    return torch.randint(0, 32, (4, 16), generator=torch.Generator().manual_seed(seed))


def on_rank(rank: int, ranks: int, name: str, budget: Any) -> dict[str, Any]:
    init_link(SLOW_LINK)
    own = rank if name == "moe" else 0  # tensor parallel ranks read the same

    def made() -> Any:
        torch.manual_seed(1)
        return moe() if name == "moe" else gpt(dropout=0.0)

    model, twin = made(), made()
    step = TrainStep(twin, memory_budget=budget, solver="heu", timeout_s=30, slices=2)
    same = []
    for i in range(2):  # the second adds to what the first left
        batch = tokens(10 * i + own), tokens(i + 100 * own + 50)
        expected = plainly(model, batch, 2)
        (found,) = step([batch])
        same.append(torch.equal(expected, found))
    mine, others = gradients(model), gradients(twin)
    same += [torch.equal(mine[name], others[name]) for name in mine]
    report = step.report
    dist.barrier()
    dist.destroy_process_group()
    return {
        "same": all(same) and mine.keys() == others.keys(),
        "order": report.plan.order,
        "hidden": report.timeline.exposed_ns < report.eager.exposed_ns,
        "unchanged": step.unchanged,
    }


@pytest.mark.parametrize(
    ("name", "budget"),
    [
        ("moe", None),
        pytest.param("gpt", None, marks=pytest.mark.slow),
        pytest.param("gpt", 0.6, marks=pytest.mark.slow),
        pytest.param("moe", 0.6, marks=pytest.mark.slow),
    ],
)
def test_two_ranks(name: str, budget: float | None) -> None:
    everyone = run_ranks(on_rank, 2, name, budget, timeout_s=280)
    for found in everyone:
        assert found["same"]
        assert found["unchanged"] == []
        assert found["order"] == everyone[0]["order"]
        assert found["hidden"]


class Centered(nn.Module):
    """On rank 1 a sample's result depends on the others."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        out = SumOverRanks.apply(self.inner(x), dist.group.WORLD.group_name)
        return (out - dist.get_rank() * out.mean(0)).square().mean()


def centered(rank: int, ranks: int) -> Any:
    dist.init_process_group("gloo")
    step = TrainStep(Centered(), timeout_s=5, slices=2)
    return caught(lambda: step([torch.randn(4, 16)]))


def test_what_one_rank_refuses_all_refuse() -> None:
    for kind, said, _, _ in run_ranks(centered, 2, timeout_s=120):
        assert kind == "OptionError"
        assert "is another in slices" in said
