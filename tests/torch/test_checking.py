"""`optimize(verify=True)` says what is bitwise, what is not, and why; and leaves no trace."""

from __future__ import annotations

import contextlib
import copy
import random
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
    optimized = overlapc.optimize(model, solver="full", memory_budget=100.0, verify=True)
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


class Rebinds(nn.Module):
    """Changes of itself whatever a module may."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))
        self.code = nn.Parameter(torch.ones(8), requires_grad=False)
        self.scales = [torch.ones(8, requires_grad=True)]
        self.calls = {"forward": 0, "seen": [0]}

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        self.calls["forward"] += 1
        self.calls["seen"].append(self.calls["forward"])
        h = self.linear(x) * min(1.0, self.calls["forward"] / 4) + random.random()
        self.mean = self.mean * 0.9 + h.detach().mean(0) * 0.1
        with torch.no_grad():
            self.code.mul_(0.9).add_(self.mean)
        return {"out": h * self.scales[0] * self.code.clone() - self.mean}


def trained(check: bool) -> list[Any]:
    """What two steps make, with an optimizer that hooks run in the backward."""
    torch.manual_seed(0)
    random.seed(0)
    outside = torch.ones(8, requires_grad=True)
    model: Any = Rebinds()

    def learn(parameter: Tensor) -> None:
        with torch.no_grad():
            parameter -= 0.1 * parameter.grad
        parameter.grad = None

    for parameter in model.linear.parameters():
        parameter.register_post_accumulate_grad_hook(learn)
    twin: Any = overlapc.optimize(model, solver="heu", verify=True) if check else model
    x = torch.randn(4, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Dynamo's of random.random()
        for _ in range(2):
            (twin(x)["out"] * outside).square().sum().backward()
    if check:
        assert "checked: bitwise eager's" in twin.explain()
    tensors = [*model.parameters(), model.mean, outside.grad, model.scales[0].grad]
    return [*(t.detach().clone() for t in tensors), model.calls, random.random(), torch.rand(1)]


def test_a_check_leaves_no_trace_in_a_model_that_changes_itself() -> None:
    for expected, found in zip(trained(check=False), trained(check=True), strict=True):
        if isinstance(expected, Tensor):
            assert torch.equal(expected, found)
        else:
            assert expected == found


def test_a_check_looks_at_gradients_of_tensors_that_a_model_closes_over() -> None:
    scale = torch.ones(8, requires_grad=True)

    class Closes(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * scale

    twin = overlapc.optimize(Closes(8, 8), verify=True)
    twin(torch.randn(4, 8)).sum().backward()
    once = scale.grad.clone()
    scale.grad = None
    twin(torch.randn(4, 8)).sum().backward()
    assert "checked: bitwise eager's" in twin.explain()
    assert once.shape == scale.grad.shape


def test_sparse_gradients_are_compared() -> None:
    model = nn.Sequential(nn.Embedding(20, 8, sparse=True), nn.Linear(8, 4))
    twin: Any = overlapc.optimize(model, solver="heu", verify=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a sparse gradient runs as plain PyTorch
        twin(torch.randint(0, 20, (3, 5))).sum().backward()
    assert "checked: bitwise eager's" in twin.explain()
    assert model[0].weight.grad.is_sparse


def test_a_model_that_torch_compile_does_not_trace_is_checked_all_the_same(monkeypatch) -> None:
    twin: Any = overlapc.optimize(Branches(), solver="full", memory_budget=100.0, verify=True)

    def fails(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr(torch, "compile", lambda *_, **__: fails)
    with pytest.warns(RuntimeWarning, match=r"not as eager: .*ends in a ZeroDivisionError"):
        twin(torch.randn(16, 8))
