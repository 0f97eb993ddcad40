"""What a forward keeps beside its loss: tensors with a gradient that it sets attributes to."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from overlapc.core.errors import OptionError
from overlapc.runtime.pipeline import Pipeline
from overlapc.runtime.train_step import TrainStep
from tests.torch.exact import randn

BATCHES = [(randn(8, 16, seed=i), randn(8, 16, seed=10 + i)) for i in range(3)]


class Gated(nn.Module):
    """Keeps an auxiliary loss for the training loop, and what its gate said."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.gate = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.said = self.gate(x).softmax(-1)
        self.auxiliary = self.said.mean(0).square().sum()
        return x + self.inner(x) * self.said[:, :1]


class Remembers(nn.Module):
    """Reads what it kept in its last forward, detached or not."""

    def __init__(self, detaches: bool) -> None:
        super().__init__()
        self.inner, self.detaches = nn.Linear(16, 16), detaches
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        made = self.inner(x)
        if self.last is not None:
            made = made + (self.last.detach() if self.detaches else self.last)
        self.last = made
        return made


class KeepsLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        self.out = self.inner(x)
        return self.out


def normed(norm: Callable[..., nn.Module]) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.Sequential(norm(nn.Linear(16, 32)), nn.ReLU(), nn.Linear(32, 16))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "auxiliary losses": lambda: nn.Sequential(Gated(), nn.GELU(), Gated()),
    "weight norm": lambda: normed(nn.utils.weight_norm),
    "spectral norm": lambda: normed(nn.utils.spectral_norm),
    "its own output": lambda: Remembers(detaches=True),
    "the loss": KeepsLoss,
}


def loss(model: nn.Module, x: Tensor, y: Tensor) -> Any:
    found = F.mse_loss(model(x), y)
    if isinstance(model, KeepsLoss):
        model.loss = found
        return {"loss": found, "again": found, "out": model.out}
    return found + sum(0.1 * m.auxiliary for m in model.modules() if isinstance(m, Gated))


def twins(name: str) -> list[nn.Module]:
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        made.append(MODELS[name]())
    return made


def kept(model: nn.Module) -> dict[str, Tensor]:
    return {
        f"{path}.{name}": value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, Tensor)
    }


def assert_alike(mine: nn.Module, twin: nn.Module) -> None:
    for one, other in zip(mine.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)  # type: ignore[arg-type]
    expected, found = kept(mine), kept(twin)
    assert expected
    assert expected.keys() == found.keys()
    for name, one in expected.items():
        assert torch.equal(one, found[name])
        assert one.requires_grad == found[name].requires_grad


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo asks for it
@pytest.mark.parametrize("solver", ["overlap", "full"])
@pytest.mark.parametrize("name", MODELS)
def test_it_is_kept_as_eager_keeps_it(name: str, solver: str) -> None:
    mine, twin = twins(name)
    step = TrainStep(twin, loss, profile="estimate", solver=solver)
    for _ in range(2):
        for each in BATCHES:
            found = loss(mine, *each)
            (found["loss"] if isinstance(found, dict) else found).backward()
        step(BATCHES)
        assert_alike(mine, twin)
    assert step.fallbacks == []
    assert step.report is not None


@pytest.mark.usefixtures("alone")
def test_a_stage_of_a_pipeline_keeps_it() -> None:
    mine, twin = twins("auxiliary losses")
    pipeline = Pipeline({0: twin}, "1f1b", 3, F.mse_loss, profile="estimate")
    pipeline([x for x, _ in BATCHES], [y for _, y in BATCHES])
    for x, y in BATCHES:
        F.mse_loss(mine(x), y).backward()
    assert_alike(mine, twin)


@pytest.mark.filterwarnings("ignore:The .grad attribute", "ignore:overlapc runs the step as plain")
def test_a_backward_through_what_an_earlier_forward_kept_is_an_error() -> None:
    """As in eager, whose first backward has freed that history."""
    mine, twin = Remembers(detaches=False), Remembers(detaches=False)
    loss(mine, *BATCHES[0]).backward()
    second = loss(mine, *BATCHES[1])
    with pytest.raises(RuntimeError, match="second time"):
        second.backward()
    with pytest.raises(RuntimeError, match="expected what is kept to be read in the same forward"):
        TrainStep(twin, loss, profile="estimate")(BATCHES)


@pytest.mark.parametrize("name", ["weight norm", "its own output"])
def test_in_slices_it_is_the_batchs(name: str) -> None:
    mine, twin = twins(name)
    x, y = BATCHES[0]
    step = TrainStep(twin, loss, profile="estimate", slices=2)
    step([(x, y)])
    for part in zip(x.chunk(2), y.chunk(2), strict=True):
        if isinstance(mine, Remembers):
            mine.last = None
        (loss(mine, *part) / 2).backward()
    for one, other in zip(mine.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)  # type: ignore[arg-type]
    assert step.fallbacks == []
    found, expected = kept(twin), kept(mine)
    for path, whole in found.items():
        cut = whole.shape != expected[path].shape
        assert torch.equal(whole[4:] if cut else whole, expected[path])


def test_in_slices_it_is_refused_where_it_is_no_slice() -> None:
    step = TrainStep(twins("auxiliary losses")[0], loss, profile="estimate", slices=2)
    with pytest.raises(OptionError, match=r"auxiliary, which the forward sets, is a number that"):
        step(BATCHES[:1])
