"""What an opaque module reads or changes beside its arguments is seen, or refused by name."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from overlapc import TrainStep
from overlapc.errors import CaptureError, OverlapcError
from overlapc.passes.capture import capture
from overlapc.passes.reached import reached
from tests.torch.exact import randn
from tests.torch.test_opaque import ESTIMATE, WIDTH, Around, Numpy, foreign

pytestmark = pytest.mark.filterwarnings("ignore:overlapc runs")


class Settings:
    shift = 1.0


class Scaled(nn.Module):
    """No trace enters it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop, self.factor = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3), 2.0
        self.settings = Settings()

    def forward(self, x: Tensor) -> Tensor:
        return foreign(self.drop(self.linear(x)) + self.settings.shift) * self.factor


def _sets(module: Any) -> None:
    module.factor = 3.0


def _sets_in_a_helper(module: Any) -> None:
    module.settings.shift = 2.0


def _evaluates(module: Any) -> None:
    module.eval()


def _replaces(module: Any) -> None:
    module.forward = lambda x: foreign(x) * 5


def _hooks(module: Any) -> None:
    module.linear.register_forward_hook(lambda _module, _given, result: result * 2)


def steps_of(model: nn.Module, change: Callable[[Any], None], planned: bool) -> list[Any]:
    """Losses and gradients of two steps, with a change of the kernel between them."""
    torch.manual_seed(3)
    step = TrainStep(model, **ESTIMATE) if planned else None
    found: list[Any] = []
    for seed in range(3):
        if seed == 1:
            change(model.kernel)
        model.zero_grad()
        x = randn(4, WIDTH, seed=seed)
        if step is not None:
            found += step([x])
            assert step.report is not None, step.explain()
        else:
            found.append(model(x))
            found[-1].backward()
        found += [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    return found


@pytest.mark.parametrize("change", [_sets, _sets_in_a_helper, _evaluates, _replaces, _hooks])
def test_a_change_between_steps_is_seen(change: Callable[[Any], None]) -> None:
    torch.manual_seed(0)
    model = Around(Scaled(), lambda result: result)
    twin = copy.deepcopy(model)
    pairs = zip(steps_of(twin, change, False), steps_of(model, change, True), strict=True)
    for expected, found in pairs:
        assert found is expected is None or torch.equal(found, expected)


def test_numbers_and_tensors_may_change_at_each_step_without_a_new_trace() -> None:
    torch.manual_seed(0)
    model = Around(Scaled().eval(), lambda result: result)
    model.kernel.mask = torch.ones(WIDTH)
    twin = copy.deepcopy(model)
    step = TrainStep(model, **ESTIMATE)
    reports = []
    for i in range(4):
        for each in (model, twin):
            each.kernel.factor, each.kernel.mask = 1.0 + i, torch.full((WIDTH,), float(i))
        assert torch.equal(step([randn(4, WIDTH)])[0], twin(randn(4, WIDTH)))
        reports.append(step.report)
    assert all(each is reports[0] is not None for each in reports)


class Drops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.chance = 0.0

    def forward(self, x: Tensor) -> Tensor:
        return foreign(nn.functional.dropout(x, self.chance) if self.chance else x)


def test_a_number_that_makes_a_kernel_draw_is_an_error() -> None:
    model = Around(Drops(), lambda result: result)
    step = TrainStep(model, **ESTIMATE)
    step([randn(4, WIDTH)])
    model.kernel.chance = 0.5
    with pytest.raises(OverlapcError, match="a Drops, which runs as one op, draws random numbers"):
        step([randn(4, WIDTH)])


SHARED = torch.ones(WIDTH)


class Reads(nn.Module):
    """Reads a tensor that is no parameter or buffer of its own."""

    def __init__(self, where: str, tensor: Tensor) -> None:
        super().__init__()
        if where == "attribute":
            self.tensor = tensor
        elif where == "list":
            self.tensors = [tensor]
        elif where == "helper":
            self.helper = SimpleNamespace(tensor=tensor)
        self._where = where

    def forward(self, x: Tensor) -> Tensor:
        return foreign(x * self._read())

    def _read(self) -> Tensor:
        if self._where == "attribute":
            return self.tensor
        if self._where == "list":
            return self.tensors[0]
        return self.helper.tensor if self._where == "helper" else SHARED


class Writes(nn.Module):
    """Changes the tensor that its kernel reads, before or after."""

    def __init__(self, where: str) -> None:
        super().__init__()
        tensor = SHARED if where == "global" else torch.ones(WIDTH)
        self.first, self.kernel = nn.Linear(WIDTH, WIDTH), Reads(where, tensor)
        self.register_buffer("moved", tensor)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.moved.mul_(0.5)
        return self.kernel(self.first(x)).square().mean()


@pytest.mark.parametrize("where", ["attribute", "list", "helper", "global"])
def test_a_tensor_that_the_model_changes_is_not_read_by_an_op(where: str) -> None:
    torch.manual_seed(0)
    model, x = Writes(where), randn(4, WIDTH)
    expected = eager_twice(model, x)
    step = TrainStep(model, **ESTIMATE)
    with pytest.warns(RuntimeWarning, match="a Reads, which runs as one op, may read a tensor"):
        found = [step([x])[0] for _ in range(2)]
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
    model.moved.fill_(1.0)
    with pytest.raises(CaptureError, match=r"may read a tensor|a tensor 'tensor', which the model"):
        capture(model, x)


def eager_twice(model: nn.Module, x: Tensor) -> list[Tensor]:
    found = [model(x) for _ in range(2)]
    model.moved.fill_(1.0)  # type: ignore[operator]
    return found


class Sets(nn.Module):
    """Changes an object that its kernel reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.kernel = nn.Linear(WIDTH, WIDTH), Scaled().eval()

    def forward(self, x: Tensor) -> Tensor:
        self.kernel.settings.shift = self.kernel.settings.shift + 1
        return self.kernel(self.first(x)[:, :WIDTH]).square().mean()


def test_an_object_that_the_model_changes_is_not_read_by_an_op() -> None:
    torch.manual_seed(0)
    model, x = Sets(), randn(4, WIDTH)
    twin = copy.deepcopy(model)
    step = TrainStep(model, **ESTIMATE)
    with pytest.warns(RuntimeWarning, match="a Scaled, which runs as one op, may read an object"):
        found = [step([x])[0] for _ in range(2)]
    assert all(torch.equal(one, twin(x)) for one in found)


class Twice(nn.Module):
    """Has a buffer and a parameter under two names each."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(WIDTH, WIDTH)
        self.other = self.one
        self.weight = self.one.weight
        self.register_buffer("scale", torch.ones(WIDTH))
        self.register_buffer("again", self.scale)

    def forward(self, x: Tensor) -> Tensor:
        return foreign(self.one(x) * self.scale + self.other(x) @ self.weight) * self.again


class MovesBuffer(Around):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.kernel.again.mul_(0.5)
        return super().forward(x)


def test_a_tensor_of_two_names_is_one() -> None:
    torch.manual_seed(0)
    model, x = MovesBuffer(Twice(), lambda result: result), randn(4, WIDTH)
    twin = copy.deepcopy(model)
    step = TrainStep(model, **ESTIMATE)
    for _ in range(3):
        (found,) = step([x])
        expected = twin(x)
        expected.backward()
        assert torch.equal(found, expected)
    assert step.report is not None, step.explain()
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


class Remembers(nn.Module):
    """Changes what it holds, or draws, as `how` says."""

    def __init__(self, how: Callable[[Any, Tensor], None]) -> None:
        super().__init__()
        self.linear, self.how = nn.Linear(WIDTH, WIDTH), how
        self.helper, self.tensors = SimpleNamespace(calls=0), [[torch.zeros(1)]]

    def forward(self, x: Tensor) -> Tensor:
        y = Numpy.apply(self.linear(x))
        self.how(self, y)
        return y


def _counts(module: Any, _: Tensor) -> None:
    module.helper.calls += 1


def _adds(module: Any, y: Tensor) -> None:
    module.tensors[0][0].add_(1)


def _appends(module: Any, y: Tensor) -> None:
    module.tensors[0].append(y)


def _pythons(_: Any, y: Tensor) -> None:
    random.random()


def _numpys(_: Any, y: Tensor) -> None:
    np.random.rand()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (_counts, "changes its attribute 'helper'"),
        (_adds, "changes a tensor that it holds"),
        (_appends, "changes its attribute 'tensors'"),
        (_pythons, "draws from Python's or NumPy's"),
        (_numpys, "draws from Python's or NumPy's"),
    ],
)
def test_what_it_changes_on_noise_is_refused_and_put_back(how: Any, message: str) -> None:
    kernel = Remembers(how)
    before = random.getstate(), repr(np.random.get_state())
    with pytest.raises(CaptureError, match=message):
        capture(Around(kernel, lambda result: result), randn(4, WIDTH))
    assert (random.getstate(), repr(np.random.get_state())) == before
    assert kernel.helper.calls == 0
    assert kernel.tensors == [[torch.zeros(1)]]


def test_code_reaches_closures_globals_and_what_its_functions_name() -> None:
    held, own = torch.ones(1), SimpleNamespace(tensor=torch.ones(1))

    def inner() -> Tensor:
        return held + SHARED

    class Calls(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + inner() + own.tensor + len(ESTIMATE)

    found = reached([Calls()])
    assert all(id(each) in found for each in (held, SHARED, own, own.tensor, ESTIMATE, inner))
    assert id(Scaled) not in found


class Turns(nn.Module):
    """Lays its result out in another order for some values."""

    def forward(self, x: Tensor) -> Tensor:
        y = foreign(x)
        return y.t().contiguous().t() if bool(x[0, 0] == 7) else y


def test_a_result_that_is_laid_out_otherwise_than_on_noise_is_an_error() -> None:
    model = Around(Turns(), lambda result: result)
    nn.init.zeros_(model.first.weight)
    step = TrainStep(model, **ESTIMATE)
    step([randn(4, WIDTH)])
    nn.init.constant_(model.first.bias, 7.0)
    with pytest.raises(OverlapcError, match="a Turns, which runs as one op, gives other results"):
        step([randn(4, WIDTH)])
