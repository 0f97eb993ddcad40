"""The same graph met again is neither measured nor planned again."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import overlapc
from overlapc.api import capture
from overlapc.planning import agreement, road
from overlapc.planning.options import Options
from overlapc.planning.problem import TrainingStep


class Asked:
    """Counts the calls of what it stands for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str) -> None:
        self.count = 0
        self.real = getattr(module, name)
        monkeypatch.setattr(module, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        return self.real(*args, **kwargs)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Asked]:
    torch._dynamo.reset()
    called = {"profile_captured": agreement, "solve": road}
    return {name: Asked(monkeypatch, module, name) for name, module in called.items()}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))


def test_a_graph_that_is_compiled_again(asked: dict[str, Asked]) -> None:
    planned: Any = overlapc.optimize(model())
    for _ in range(2):
        planned(torch.ones(4, 8)).sum().backward()
        torch._dynamo.reset()  # as when a guard failed, and the graph came out the same
    assert len(planned.graphs) == 2
    assert planned.graphs[0].plan == planned.graphs[1].plan
    assert {name: each.count for name, each in asked.items()} == {
        "profile_captured": 1,
        "solve": 1,
    }
    planned(torch.ones(6, 8)).sum().backward()
    assert asked["profile_captured"].count == 2, "other sizes take other times"


def test_another_number_of_microbatches(asked: dict[str, Asked]) -> None:
    step = overlapc.TrainStep(model(), lambda model, x: model(x).sum())
    for count in (1, 2, 3):
        step([(torch.ones(4, 8),)] * count)
    assert asked["profile_captured"].count == 1


def test_plans_for_more_in_flight_have_the_peak_of_each_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each microbatch holds less of some values than the most that the plan has room for."""
    layers = [nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8)) for _ in range(3)]
    captured = capture(nn.Sequential(*layers), torch.ones(128, 8))
    report = road.plan(captured, Options(profile="estimate", hardware="a100-sxm-80")).report
    most = {value.storage: value.bytes for value in captured.trace.values}
    one, other = (
        {name: size - size // 8 * (i % 2 == less) for i, (name, size) in enumerate(most.items())}
        for less in range(2)
    )
    real = agreement.profile_captured
    monkeypatch.setattr(agreement, "profile_captured", lambda *args: (real(*args)[0], one))
    monkeypatch.setattr(agreement, "measured_sizes", lambda *_: [other])
    options = Options(profile="estimate", memory_budget=2 * report.timeline.peak_bytes)
    planned = road.plan(captured, options, TrainingStep(gradients=(), in_flight=1, further=6))
    assert planned.roomier
    for each in (planned.report, *planned.roomier):
        (peak,) = each.rank_peaks
        assert 0.8 * each.timeline.peak_bytes < peak < each.timeline.peak_bytes
