"""Modules that no trace enters are ops of the graph: kept, run again, merged, bitwise eager's."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from overlapc import TrainStep
from overlapc.core.errors import CaptureError, OverlapcError
from overlapc.emulate import Link, init_fabric
from overlapc.passes.capture.front import capture
from overlapc.passes.emit.rewrite import rewrite
from overlapc.planning.options import Options
from overlapc.planning.road import plan
from overlapc.profiler.measure import measure
from tests.torch.exact import randn
from tests.torch.raw_models import Row

WIDTH = 16
ESTIMATE = {"profile": "estimate"}


class Numpy(torch.autograd.Function):
    """Hands data to a kernel that PyTorch does not know, as extensions do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = torch.from_numpy(x.detach().numpy().copy()).tanh_()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return torch.from_numpy(gradient.numpy() * (1 - y.numpy() ** 2))


class Kernel(nn.Module):
    """Has a parameter, an argument that is no tensor, and results with and without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x: Tensor, *, times: int) -> tuple[Tensor, Tensor]:
        y = Numpy.apply(self.linear(x)) * self.scale * times
        return y, y.detach().amax()


class Drops(Kernel):
    def forward(self, x: Tensor, *, times: int) -> tuple[Tensor, Tensor]:
        return super().forward(nn.functional.dropout(x, 0.3), times=times)


class Model(nn.Module):
    def __init__(self, kernel: Callable[[], nn.Module] = Kernel, layers: int = 3) -> None:
        super().__init__()
        self.ins = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.kernels = nn.ModuleList(kernel() for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for linear, kernel in zip(self.ins, self.kernels, strict=True):
            y, most = kernel(linear(x), times=2)
            x = x + y / (1 + most)
        return x.square().mean()


def model_of(kernel: Callable[[], nn.Module] = Kernel) -> Model:
    torch.manual_seed(0)
    return Model(kernel)


def captured(model: nn.Module, *args: Tensor) -> Any:
    with pytest.warns(RuntimeWarning, match=r"as one op, .*, kernels\.\d \(\w+\)") as warned:
        found = capture(model, *args)
    assert len(warned) == 1
    assert ") and 2 more: " in str(warned[0].message)
    return found


def eager(model: nn.Module, x: Tensor) -> list[Tensor]:
    torch.manual_seed(7)
    loss = model(x)
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters())]


@pytest.mark.parametrize("kernel", [Kernel, Drops])
@pytest.mark.parametrize("solver", ["none", "full", "heu"])
def test_a_planned_step_is_eagers(kernel: Any, solver: str) -> None:
    x = randn(4, WIDTH)
    expected = eager(model_of(kernel), x)
    model = model_of(kernel)
    options = Options(memory_budget="1MB" if solver == "full" else 1.0, solver=solver, **ESTIMATE)
    planned = plan(captured(model, x), options)
    forward, backward = rewrite(planned.captured, planned.report.plan)
    again = [name for name in planned.report.plan.recomputed if name.startswith("opaque_forward")]
    torch.manual_seed(7)
    with torch.no_grad():
        loss, *saved = forward([*model.parameters(), *model.buffers(), x])
        found = backward([*saved, torch.ones_like(loss)])
    gradients = found[: len(expected) - 1]
    assert bool(again) == (solver == "full" and kernel is Kernel)
    for one, other in zip(expected, [loss, *gradients], strict=True):
        assert torch.equal(one, other)


def test_a_handle_has_the_bytes_that_autograd_keeps() -> None:
    found = captured(model_of(), randn(4, WIDTH))
    ops = [op for op in found.trace.ops if op.name.startswith("opaque_forward")]
    assert len(ops) == 3
    activation = 4 * WIDTH * 4
    _, sizes = measure(found, None)
    for op in ops:
        handle = op.outputs[-1]
        # What enters, and tanh's result.
        assert found.trace.value[handle].bytes == 2 * activation
        assert sizes[handle] == found.trace.value[handle].bytes


def test_nothing_is_left_behind() -> None:
    model = model_of()
    captured(model, randn(4, WIDTH))
    assert all("forward" not in vars(module) for module in model.modules())
    assert all(p.grad is None for p in model.parameters())
    gone = weakref.ref(model.kernels[0])
    del model
    gc.collect()
    assert gone() is None


class Counts(Kernel):
    def forward(self, x: Tensor, *, times: int) -> tuple[Tensor, Tensor]:
        self.calls = getattr(self, "calls", 0) + 1
        return super().forward(x, times=times)


class Follows(Kernel):
    def forward(self, x: Tensor, *, times: int) -> tuple[Tensor, Tensor]:
        self.scale.mul_(0.9)
        return super().forward(x, times=times)


@pytest.mark.parametrize(
    ("kernel", "message"),
    [(Counts, "changes its attribute 'calls'"), (Follows, "changes a parameter or buffer")],
)
def test_what_might_run_twice_may_change_nothing(kernel: Any, message: str) -> None:
    model = model_of(kernel)
    with pytest.raises(CaptureError, match=message):
        capture(model, randn(4, WIDTH))


def test_a_model_whose_own_code_cannot_be_traced_is_refused() -> None:
    class Whole(Model):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(Numpy.apply(x))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(CaptureError, match="could not be traced as one graph"):
            capture(Whole(), randn(4, WIDTH))


@torch.compiler.disable
def foreign(x: Tensor) -> Tensor:
    found: Tensor = Numpy.apply(x)
    return found


class Foreign(Kernel):
    """Calls what Dynamo does not enter."""

    def forward(self, x: Tensor, *, times: int) -> tuple[Tensor, Tensor]:
        y = foreign(self.linear(x)) * self.scale * times
        return y, y.detach().amax()


class Parallel(Model):
    """Between its kernels it sums over ranks."""

    def forward(self, x: Tensor) -> Tensor:
        for linear, kernel in zip(self.ins, self.kernels, strict=True):
            y, most = kernel(Row.apply(x, linear.weight), times=2)
            x = x + y / (1 + most)
        return x.square().mean()


def test_train_step_merges_microbatches_of_opaque_modules() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        init_fabric(Link(alpha_s=0.0, bytes_per_s=1e13), world_size=2)
    try:
        inputs = [randn(4, WIDTH, seed=seed) for seed in range(3)]
        model, expected = (Parallel(Foreign) for _ in range(2))
        model.load_state_dict(expected.state_dict())
        losses = []
        for x in inputs:
            losses.append(expected(x))
            losses[-1].backward()
        step = TrainStep(model, solver="heu", **ESTIMATE)
        with pytest.warns(RuntimeWarning, match="runs as one op"):
            found = step([(x,) for x in inputs])
        assert step.fallbacks == []
        assert "runs as one op" not in step.explain()
        assert step.explain().count("one op, by its own autograd: kernels.") == 3
        assert step.report is not None
        assert step.report.merged is not None
        assert all(torch.equal(one, other) for one, other in zip(losses, found, strict=True))
        for one, other in zip(expected.parameters(), model.parameters(), strict=True):
            assert one.grad is None if other.grad is None else torch.equal(one.grad, other.grad)
    finally:
        dist.destroy_process_group()


class Given(Kernel):
    def forward(self, x: Tensor, *, times: int) -> tuple[Tensor, Tensor]:
        return x, super().forward(x, times=times)[1]


class Number(Kernel):
    def forward(self, x: Tensor, *, times: int) -> Any:
        y, most = super().forward(x, times=times)
        return y, float(most)


@pytest.mark.parametrize(
    ("kernel", "message"), [(Given, "returns a tensor that it is given"), (Number, "a float")]
)
def test_what_noise_cannot_tell_of_is_refused(kernel: Any, message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        captured_quietly(model_of(kernel))


class Around(nn.Module):
    """A model of which a kernel is a small part; `use` says what it does with the results."""

    def __init__(self, kernel: nn.Module, use: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.first, self.kernel, self.use = nn.Linear(WIDTH, 4 * WIDTH), kernel, use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self.kernel(self.first(x)[:, :WIDTH])).square().mean()


class Two(nn.Module):
    """Its results depend on different parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return Numpy.apply(self.one(x)), Numpy.apply(self.other(x))


class Returns(nn.Linear):
    """Returns its bias, as a layer does that leaves the sum to others."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return foreign(x @ self.weight), self.bias


class Mode(nn.Module):
    """Draws in training alone."""

    def forward(self, x: Tensor) -> Tensor:
        return foreign(nn.functional.dropout(x, 0.3, self.training))


def captured_quietly(model: nn.Module) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return capture(model, randn(4, WIDTH))


def test_an_unused_result_gives_no_gradients_of_zeros() -> None:
    """Eager leaves them None, which is another thing to an optimizer."""
    with pytest.raises(CaptureError, match="only some of its results get gradients"):
        captured_quietly(Around(Two(), lambda results: results[0]))


def test_a_kernel_may_return_a_parameter() -> None:
    torch.manual_seed(0)
    model, x = Around(Returns(), sum), randn(4, WIDTH)
    twin = copy.deepcopy(model)
    step = TrainStep(model, **ESTIMATE)
    with pytest.warns(RuntimeWarning, match="as one op"):
        step([x])
    twin(x).backward()
    assert step.report is not None
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_a_kernel_that_draws_in_another_mode_alone_is_an_error_there() -> None:
    """In a graph that is not made anew, as TrainStep's is."""
    model, x = Around(Mode().eval(), lambda result: result), randn(4, WIDTH)
    planned = plan(captured_quietly(model), Options(**ESTIMATE))
    forward, _ = rewrite(planned.captured, planned.report.plan)
    model.kernel.train()
    with pytest.raises(OverlapcError, match="draws random numbers or changes a buffer, and"):
        forward([*model.parameters(), x])
