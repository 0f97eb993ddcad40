"""Modules that no trace enters, on tensors whose size depends on data, as an expert's tokens."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from overlapc import TrainStep
from overlapc.core.errors import CaptureError
from overlapc.passes.capture.front import capture
from overlapc.profiler.measure import measure
from tests.torch.exact import randn
from tests.torch.test_opaque import WIDTH, Foreign, Kernel, Numpy


class Rows(nn.Module):
    """Runs its kernel on the rows whose first number is positive."""

    def __init__(self, kernel: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.kernel = kernel()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        (rows,) = (x[:, 0] > 0).nonzero(as_tuple=True)
        y, most = self.kernel(x[rows], times=2)
        return (x.index_add(0, rows, y) / (1 + most)).square().mean()


class Doubling(Kernel):
    """Returns twice as many rows as it is given."""

    def forward(self, x: Tensor, *, times: int) -> tuple[Tensor, Tensor]:
        y, most = super().forward(x, times=times)
        return torch.cat([y, y])[: len(x) * 2], most


class Square(Kernel):
    """Keeps what grows faster than its rows."""

    def forward(self, x: Tensor, *, times: int) -> tuple[Tensor, Tensor]:
        y, most = super().forward(Numpy.apply(x @ x.t()) @ x, times=times)
        return y, most


def model_of(kernel: Callable[[], nn.Module]) -> Rows:
    torch.manual_seed(0)
    return Rows(kernel)


@pytest.mark.filterwarnings("error:overlapc runs the model as plain")
@pytest.mark.filterwarnings("ignore:overlapc runs as one op")
def test_a_step_is_eagers_whatever_the_number_of_rows() -> None:
    model, twin = model_of(Foreign), model_of(Foreign)
    step = TrainStep(model, profile="estimate", memory_budget=1.0)
    for seed in range(3):
        torch.manual_seed(seed)
        batches = [randn(6, WIDTH), randn(6, WIDTH)]
        for each in (model, twin):
            each.zero_grad()
        found = step(batches)
        expected = [twin(x) for x in batches]
        for loss in expected:
            loss.backward()
        assert torch.equal(torch.stack(found).detach(), torch.stack(expected).detach())
        for one, other in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(one.grad, other.grad)
    assert step.report is not None
    ops = step.report.problem.trace.ops
    assert any(op.name.startswith("opaque_forward") for op in ops)


def captured(kernel: Callable[[], nn.Module]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return capture(model_of(kernel), randn(6, WIDTH))


def test_a_handle_has_the_bytes_of_the_rows_there_are() -> None:
    x = randn(6, WIDTH)
    model = model_of(Kernel)
    count = int((model.first(x)[:, 0] > 0).sum())
    found = captured(Kernel)
    (op,) = [op for op in found.trace.ops if op.name.startswith("opaque_forward")]
    _, sizes = measure(found, [*model.parameters(), *model.buffers(), x])
    assert 0 < count < 6
    assert sizes[op.outputs[-1]] == 2 * count * WIDTH * 4


@pytest.mark.parametrize("kernel", [Doubling, Square])
def test_what_does_not_grow_as_the_rows_is_refused(kernel: Any) -> None:
    with pytest.raises(CaptureError, match="does not grow as its data-dependent size"):
        captured(kernel)
