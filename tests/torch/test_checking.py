"""`optimize(check=True)` says what is bitwise, what is not, and why; and leaves no trace."""

from __future__ import annotations

import contextlib
import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import overlapc


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"out": F.dropout(self.norm(self.linear(x)), 0.2)}


class Branches(Plain):
    """Sums in another order when it is traced."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.linear(x)
        if torch.compiler.is_compiling():
            return {"out": (x + 1e-3) + x.cos()}
        return {"out": (x + x.cos()) + 1e-3}


def checked(model: nn.Module, x: Tensor) -> tuple[Any, list[str]]:
    optimized = overlapc.optimize(model, solver="full", memory_budget=100.0, check=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            optimized(x)["out"].float().sum().backward()
    return optimized, [str(each.message) for each in caught if "not as eager" in str(each.message)]


@pytest.mark.parametrize("half", [False, True])
def test_a_model_that_is_bitwise_trains_as_without_a_check(half: bool) -> None:
    torch.manual_seed(0)
    plain = Plain()
    model = copy.deepcopy(plain)
    x = torch.randn(16, 8)
    region = torch.autocast("cpu", torch.bfloat16) if half else contextlib.nullcontext()
    with region:
        torch.manual_seed(1)
        optimized, said = checked(model, x)
        state = torch.get_rng_state()
        assert said == []
        assert "checked: bitwise eager's" in optimized.explain()
        if half:  # the backward above is under autocast, which no plan is made for
            return
        torch.manual_seed(1)
        for _ in range(2):
            plain(x)["out"].sum().backward()
    assert torch.equal(state, torch.get_rng_state())
    for name, expected in plain.named_parameters():
        assert torch.equal(expected.grad, model.get_parameter(name).grad)
    for name, buffer in plain.named_buffers():
        assert torch.equal(buffer, model.get_buffer(name))


def test_what_differs_is_said_with_op_line_and_blame() -> None:
    torch.manual_seed(0)
    optimized, (said,) = checked(Branches(), torch.randn(16, 8))
    assert "result 0" in said
    assert "aten.add.Tensor" in said
    assert "test_checking.py" in said
    assert 'torch.compile(backend="eager") gives what the plan gives' in said
    assert said.removeprefix("overlapc ") in optimized.explain()
