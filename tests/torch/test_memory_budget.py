"""What a step really allocates stays under the budget, and falls with it."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import overlapc
from examples.gpt.model import GPT, GPTConfig
from overlapc.api import capture
from overlapc.core.errors import Infeasible
from overlapc.core.simulate import peak_bytes
from overlapc.planning.options import Options
from overlapc.planning.road import plan
from overlapc.profiler.memory import measure_peak
from overlapc.solvers.field.baselines import full
from tests.torch.exact import DYNAMO_WARNINGS
from tests.torch.zoo import on_fabric, tokens

pytestmark = DYNAMO_WARNINGS


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            *(
                nn.Sequential(
                    nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.1)
                )
                for _ in range(3)
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).square().mean()


class Perceptrons(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(64), nn.Linear(64, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 64)
            )
            for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.softmax(-1).square().sum()


def gpt() -> tuple[nn.Module, tuple[Tensor, ...]]:
    config = GPTConfig(vocab=64, layers=2, width=64, heads=4, max_seq=64, dropout=0.1)
    return GPT(config, torch.distributed.group.WORLD), (
        tokens(8, 64, below=64),
        tokens(8, 64, seed=1, below=64),
    )


MODELS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "perceptrons": (lambda: (Perceptrons(), (torch.randn(512, 64),)), contextlib.nullcontext),
    "convolutions": (
        lambda: (Convolutions(), (torch.randn(4, 8, 24, 24),)),
        contextlib.nullcontext,
    ),
    "gpt on a fabric": (gpt, on_fabric),
}


def optimized(
    make: Callable[[], Any], budget: int | None, cache: Path
) -> tuple[Any, Callable[[], None]]:
    """The model planned for this budget, and one training step of it. Costs are measured once:
    with other costs another plan may be the fastest, and have another peak."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain, batch = make()
    model: Any = overlapc.optimize(plain, memory_budget=budget, cache=cache)

    def step() -> None:
        model(*batch).backward()

    step()
    assert model.fallbacks == []
    return model, step


def peak(model: nn.Module, step: Callable[[], None]) -> int:
    """The least of a few: see `measure_peak`."""
    found = []
    for _ in range(3):
        model.zero_grad()
        found.append(measure_peak(step))
    return min(found)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("name", "budgets"),
    [("convolutions", 3), *(pytest.param(n, 12, marks=pytest.mark.slow) for n in MODELS)],
)
def test_a_row_of_budgets(
    name: str, budgets: int, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    make, world = MODELS[name]
    cache = tmp_path / "costs"
    lines, measured, seen = [], [], []
    with world():
        model, _ = optimized(make, None, cache)
        most = model.graphs[0].eager.peak_bytes
        with pytest.raises(Infeasible) as caught:
            optimized(make, 1, cache)
        least = caught.value.smallest_bytes
        assert least < 0.9 * most
        for index in range(budgets):
            budget = most - (most - least) * index // (budgets - 1)
            model, step = optimized(make, budget, cache)
            found = peak(model, step)
            predicted = model.timeline.peak_bytes
            recomputed = len(model.plan.recomputed)
            lines.append(
                f"{name}: budget {budget:9,} predicted {predicted:9,} measured {found:9,} "
                f"measured/predicted {found / predicted:.4f} recomputed {recomputed}"
            )
            measured.append((budget, found))
            seen.append(recomputed)
    with capsys.disabled():
        print("\n" + "\n".join(lines))
    assert seen[-1] > seen[0]
    for budget, found in measured:
        assert found <= budget, lines
    for (_, more), (_, fewer) in pairwise(measured):
        assert fewer <= more, lines


def test_a_fraction_is_answered_by_a_fraction() -> None:
    captured = capture(Perceptrons(), torch.randn(64, 64))
    with pytest.raises(Infeasible, match=r"memory_budget=0.01 \(\d+ bytes\)") as caught:
        plan(captured, Options(profile="estimate", memory_budget=0.01))
    assert caught.value.fractions is not None
    _, least = caught.value.fractions
    assert f"pass memory_budget={least} or more" in str(caught.value)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    report = plan(captured, Options(profile="estimate", memory_budget=least)).report
    assert caught.value.smallest_bytes <= (report.problem.budget_bytes or 0)
    assert (report.problem.budget_bytes or 0) <= 1.02 * caught.value.smallest_bytes


def test_the_default_budget_is_what_the_models_own_recompute_takes() -> None:
    captured = capture(Perceptrons(), torch.randn(64, 64))
    options = Options(profile="estimate")
    free = plan(captured, options).report
    report = plan(captured, options, own=full).report
    own = full(report.problem)
    assert (
        report.problem.budget_bytes == peak_bytes(report.problem, own) < free.problem.budget_bytes
    )
    assert report.timeline.peak_bytes <= report.problem.budget_bytes
    nothing_fits = Options(profile="estimate", solver="none")  # it recomputes nothing
    assert plan(captured, nothing_fits, own=full).report.plan.saved == own.saved
    asked = Options(profile="estimate", memory_budget=10**9)
    assert plan(captured, asked, own=full).report.problem.budget_bytes == 10**9


def test_a_baseline_without_a_budget_takes_what_it_takes():
    """Where random states are kept, full recompute of something small takes more than eager."""
    model = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.1), nn.Linear(16, 16))
    peaks = {}
    for solver in ("none", "full"):
        report = overlapc.predict(model, torch.randn(4, 16), solver=solver)
        peaks[solver] = report.timeline.peak_bytes
        assert report.problem.budget_bytes == peaks[solver]
    assert peaks["full"] > peaks["none"]
    with pytest.raises(Infeasible):
        overlapc.predict(model, torch.randn(4, 16), solver="full", memory_budget=peaks["none"])
