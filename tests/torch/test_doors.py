"""Every front door says what it planned by the same members."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import overlapc
from overlapc.core.door import Door
from overlapc.core.errors import OptionError
from overlapc.runtime.hosted import PipelineSchedule
from overlapc.runtime.pipeline import Pipeline
from tests.torch.exact import DYNAMO_WARNINGS
from tests.torch.zoo import MLP

pytestmark = DYNAMO_WARNINGS
HOW: dict[str, Any] = {"profile": "estimate", "solver": "heu"}


class Untraceable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return self.linear(x) * self.linear(x).sum().item()


def ran(kind: str, model: nn.Module) -> Any:
    x = torch.ones(4, 16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if kind == "optimize":
            twin: Any = overlapc.optimize(model, **HOW)
            twin(x).sum().backward()
            return twin
        slices = "auto" if kind == "slices" else 1
        step = overlapc.TrainStep(model, lambda model, x: model(x).sum(), slices=slices, **HOW)
        step([(x,), (x,)])
        return step


@pytest.mark.parametrize("kind", ["optimize", "TrainStep", "slices"])
def test_planned(kind: str) -> None:
    door = ran(kind, MLP())
    assert isinstance(door, Door)
    assert [type(report) for report in door.graphs] == [overlapc.Report]
    assert door.step_ms == sum(report.step_ns for report in door.graphs) / 1e6 > 0
    assert door.peak_bytes == door.graphs[0].peak_bytes > 0
    assert door.fallbacks == []
    assert door.differences == []
    assert "recompute" in door.explain()


def test_plain() -> None:
    door = ran("TrainStep", Untraceable())
    assert door.fallbacks != []
    assert all(reason in door.explain() for reason in door.fallbacks)


def test_a_warning_stands_at_the_users_line() -> None:
    step = overlapc.TrainStep(Untraceable(), lambda model, x: model(x).sum(), **HOW)
    x = torch.ones(4, 16)
    with pytest.warns(RuntimeWarning, match="as plain PyTorch") as told:
        step([(x,), (x,)])
    step([(x,), (x,)])  # it is not told again
    assert [warning.filename for warning in told] == [__file__]


def test_a_step_shows_all_that_it_planned() -> None:
    step = overlapc.TrainStep(MLP(), lambda model, x: model(x).sum(), **HOW)
    large, small = torch.ones(64, 16), torch.ones(4, 16)
    step([(large,), (large,), (small,)])
    assert len(step.graphs) == 2
    assert step.peak_bytes == max(report.peak_bytes for report in step.graphs)
    assert step.report is not None
    assert step.step_ms == step.report.step_ns / 1e6


def test_what_the_twin_hides_is_named_once() -> None:
    model = MLP()
    model.graphs, model.step_ms = "mine", 7
    with pytest.warns(RuntimeWarning, match=r"the model's graphs, step_ms cannot be read"):
        overlapc.optimize(model, **HOW)


def test_all_front_doors_are_doors() -> None:
    from overlapc.megatron.loop import TrainStep
    from overlapc.megatron.steps import Steps

    assert all(issubclass(kind, Door) for kind in (Pipeline, PipelineSchedule, TrainStep, Steps))


def test_the_top_level_has_twelve_names() -> None:
    assert len(overlapc.__all__) == 12
    for name in overlapc.__all__:
        assert getattr(overlapc, name) is not None


def test_what_predict_returns_says_it_in_one_line() -> None:
    report = overlapc.predict(MLP(), torch.ones(4, 16), hardware="a100-sxm-80")
    assert report.step_ms == report.step_ns / 1e6 > 0
    assert len(repr(report).splitlines()) == 1
    assert f"{report.step_ms:.3f} ms" in repr(report)
    assert f"{report.peak_bytes:,} bytes" in repr(report)


@pytest.mark.parametrize("how", ["torch.compile(model)", "model.compile()"])
def test_a_compiled_model_is_refused_by_name(how: str) -> None:
    model: Any = MLP()
    if how == "model.compile()":
        model.compile()
    else:
        model = torch.compile(model)
    with pytest.raises(OptionError, match="expected the model itself"):
        overlapc.optimize(model)
