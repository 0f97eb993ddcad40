"""What an opaque module reads or changes beside its arguments is seen, or refused by name."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from overlapc import TrainStep
from overlapc.core.errors import CaptureError, OverlapcError
from overlapc.passes.capture.front import capture
from overlapc.passes.opaque.reached import Reached
from tests.torch.exact import randn
from tests.torch.test_opaque import ESTIMATE, WIDTH, Around, foreign

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
    """Losses and gradients of three steps, with a change of the kernel before the second."""
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
        self.chance, self.settings = 0.0, Settings()
        self.settings.shift = 0.0

    def forward(self, x: Tensor) -> Tensor:
        chance = self.chance + self.settings.shift
        return foreign(nn.functional.dropout(x, chance) if chance else x)


@pytest.mark.parametrize("where", ["attribute", "helper"])
def test_a_number_that_makes_a_kernel_draw_is_an_error(where: str) -> None:
    model = Around(Drops(), lambda result: result)
    step = TrainStep(model, **ESTIMATE)
    step([randn(4, WIDTH)])
    if where == "helper":
        model.kernel.settings.shift = 0.5
    else:
        model.kernel.chance = 0.5
    with pytest.raises(OverlapcError, match="a Drops, which runs as one op, draws random numbers"):
        step([randn(4, WIDTH)])


SHARED = torch.ones(WIDTH)


class Slotted:
    __slots__ = ("calls", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.calls = tensor, 0


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
        elif where == "slot":
            self.slotted = Slotted(tensor)
        elif where == "array":
            self.array = tensor.numpy()
        elif where == "alias":
            self.register_buffer("own", tensor)
            self.tensors = [self.own]
        self._where = where

    def forward(self, x: Tensor) -> Tensor:
        return foreign(x * self._read())

    def _read(self) -> Tensor:
        if self._where == "attribute":
            return self.tensor
        if self._where in ("list", "alias"):
            return self.tensors[0]
        if self._where == "slot":
            return self.slotted.tensor
        if self._where == "array":
            return torch.from_numpy(self.array)
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


@pytest.mark.parametrize(
    "where", ["attribute", "list", "helper", "slot", "array", "alias", "global"]
)
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


FACTOR = 1.0


class Multiplies(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * FACTOR


class Sets(nn.Module):
    """Changes an object, or a global, that its kernel reads."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.first, self.kernel, self._what = nn.Linear(WIDTH, WIDTH), Multiplies().eval(), what

    def forward(self, x: Tensor) -> Tensor:
        global FACTOR
        if self._what == "global":
            FACTOR = FACTOR + 1
        else:
            self.kernel.settings.shift = self.kernel.settings.shift + 1
        return self.kernel(self.first(x)).square().mean()


@pytest.mark.parametrize("what", ["global", "helper"])
def test_an_object_that_the_model_changes_is_not_read_by_an_op(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model, x = Sets(what), randn(4, WIDTH)
    twin = copy.deepcopy(model)
    monkeypatch.setattr(f"{__name__}.FACTOR", 1.0)
    expected = [twin(x) for _ in range(2)]
    monkeypatch.setattr(f"{__name__}.FACTOR", 1.0)
    step = TrainStep(model, **ESTIMATE)
    with pytest.warns(RuntimeWarning, match="a Multiplies, which runs as one op, may read an obj"):
        found = [step([x])[0] for _ in range(2)]
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


class Parent(Around):
    """Its kernel knows it, and does not read it; the script has a global of a name in its code."""

    def __init__(self) -> None:
        super().__init__(Scaled(), lambda result: result)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.kernel.parents = [self]
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(self.norm(x))


linear = Parent()


def test_what_its_code_does_not_read_may_change() -> None:
    step = TrainStep(linear, **ESTIMATE)
    for calls in range(2):
        step([randn(4, WIDTH)])
        assert step.report is not None, step.explain()
        assert linear.calls == calls + 1


class Pool(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pool = ThreadPoolExecutor(1)

    def forward(self, x: Tensor) -> Tensor:
        return self._elsewhere(x)

    @torch.compiler.disable
    def _elsewhere(self, x: Tensor) -> Tensor:
        return self.pool.submit(foreign, x).result()


def test_threads_that_a_kernel_starts_stay() -> None:
    model = Around(Pool(), lambda result: result)
    step = TrainStep(model, **ESTIMATE)
    step([randn(4, WIDTH)])
    with model.kernel.pool as pool:
        assert step.report is not None, step.explain()
        assert len(pool._threads) == 1


def test_a_model_and_its_kernel_are_gone_with_their_step() -> None:
    model = Around(Scaled(), lambda result: result)
    step = TrainStep(model, **ESTIMATE)
    step([randn(4, WIDTH)])
    model.kernel = Scaled()
    step([randn(4, WIDTH)])
    assert step.report is not None, step.explain()
    gone = [weakref.ref(each) for each in (model, model.kernel, step)]
    del model, step
    torch._dynamo.reset()
    gc.collect()
    assert [each() for each in gone] == [None, None, None]


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


def test_code_reaches_closures_globals_and_what_its_functions_name() -> None:
    held, own = torch.ones(1), SimpleNamespace(tensor=torch.ones(1))

    def inner() -> Tensor:
        return held + SHARED

    class Calls(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + inner() + own.tensor + len(ESTIMATE)

    found = Reached([Calls()]).objects
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
