"""What is known of `transformers` by name, on functions of these names: tests/loops and
tests/zoo_public have the library itself."""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import overlapc
from tests.torch.exact import randn

OPTIONS = {"solver": "none", "profile": "estimate"}
_lock = threading.Lock()


def find_packed_sequence_indices(position_ids: Tensor) -> Tensor | None:
    """As transformers has it: only eager looks."""
    packed = (torch.diff(position_ids, prepend=position_ids[:, :1] - 1) != 1).cumsum(-1)
    if not torch.compiler.is_compiling() and (packed[:, -1] == 0).all():
        return None
    return packed


def maybe_install_capturing_hooks(model: Any) -> None:
    if not getattr(model, "hooked", False):
        with _lock:
            model.register_forward_hook(lambda module, given, out: out * 2)
            model.hooked = True


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, function in (
        ("transformers.masking_utils", find_packed_sequence_indices),
        ("transformers.utils.output_capturing", maybe_install_capturing_hooks),
    ):
        module = types.ModuleType(name)
        setattr(module, function.__name__, function)
        monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setattr(function, "__module__", name)


class Masked(nn.Module):
    """Attention of another kernel where there is a mask."""

    def __init__(self, positions: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.positions = nn.Linear(8, 8), positions

    def forward(self, x: Tensor) -> Tensor:
        mask = find_packed_sequence_indices(self.positions(x))
        if mask is None:
            return self.linear(x).sum(1).square().sum()
        kept = (mask[:, :, None] == mask[:, None]).to(x.dtype)
        return (kept @ self.linear(x)).square().sum()


def of_sizes(x: Tensor) -> Tensor:
    """As models make them."""
    return (torch.arange(x.shape[1], device=x.device) + 0).unsqueeze(0).expand(x.shape[0], -1)


def of_two_texts(x: Tensor) -> Tensor:
    return torch.arange(2, device=x.device).repeat(x.shape[1] // 2)[None, :]


def of_data(x: Tensor) -> Tensor:
    return torch.arange(x.shape[1])[None, :] + (x[:, :1, 0] * 0).long()


@pytest.mark.parametrize("make", [of_sizes, of_two_texts, of_data])
def test_positions_of_sizes_are_looked_at(make: Callable[[Tensor], Tensor]) -> None:
    model = Masked(make)
    twin: Any = overlapc.optimize(model, **OPTIONS)
    for columns in (4, 6):
        x, found = randn(3, columns, 8), []
        for run in (model, twin):
            model.zero_grad()
            loss = run(x)
            loss.backward()
            found.append((loss.detach(), *(p.grad for p in model.parameters())))
        equal = all(map(torch.equal, *found))
        assert equal or make is of_data
    if make is of_sizes:
        assert twin.differences == []
    else:
        (line,) = twin.differences
        assert "in find_packed_sequence_indices: asks whether it is compiled" in line


class Hooked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        maybe_install_capturing_hooks(self.linear)
        return self.linear(x).square().sum()


def test_hooks_are_installed_before_their_lock_is_traced() -> None:
    model, x = Hooked(), randn(3, 8)
    step = overlapc.TrainStep(model, **OPTIONS)
    losses = step([x, x])
    assert step.fallbacks == []
    assert model.linear.hooked
    assert torch.equal(losses[1], model(x).detach())
