"""Modules at which Dynamo or AOTAutograd stops are ops; so are launches of kernels in Triton."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.triton_kernel_wrap import (
    kernel_side_table,
    triton_kernel_wrapper_mutation,
)

from overlapc import TrainStep
from overlapc.core.errors import CaptureError
from overlapc.passes.capture.front import capture
from overlapc.passes.emit.rewrite import rewrite
from overlapc.planning.options import Options
from overlapc.planning.road import plan
from tests.torch.exact import randn
from tests.torch.test_opaque import ESTIMATE, WIDTH, Kernel, eager, model_of


@torch.library.custom_op("overlapc_tests::of_no_known_shape", mutates_args=())
def of_no_known_shape(x: Tensor) -> Tensor:
    return x.sigmoid()


@torch.library.custom_op("overlapc_tests::of_a_fake_alone", mutates_args=())
def of_a_fake_alone(x: Tensor) -> Tensor:
    return x.sigmoid()


@of_a_fake_alone.register_fake
def _(x: Tensor) -> Tensor:
    """Raises behind Dynamo, as cuDNN's LSTM does."""
    if any("_aot_autograd" in frame.filename for frame in traceback.extract_stack()):
        raise RuntimeError("the devices must match")
    return torch.empty_like(x)


def _keep(ctx: Any, inputs: Any, output: Tensor) -> None:
    ctx.save_for_backward(output)


for op in (of_no_known_shape, of_a_fake_alone):
    op.register_autograd(lambda ctx, g: g * ctx.saved_tensors[0], setup_context=_keep)


class Disabled(Kernel):
    """As modules of libraries of kernels are."""

    @torch.compiler.disable
    def forward(self, x: Tensor, *, times: int) -> tuple[Tensor, Tensor]:
        return super().forward(nn.functional.dropout(x, 0.3), times=times)


class NoShape(Kernel):
    def forward(self, x: Tensor, *, times: int) -> tuple[Tensor, Tensor]:
        y = of_no_known_shape(self.linear(x)) * times
        return y, y.detach().amax()


class FakeAlone(Kernel):
    def forward(self, x: Tensor, *, times: int) -> tuple[Tensor, Tensor]:
        y = of_a_fake_alone(self.linear(x)) * times
        return y, y.detach().amax()


@pytest.mark.parametrize("kernel", [Disabled, NoShape, FakeAlone])
def test_train_step_takes_as_one_op_what_no_trace_enters(kernel: Any) -> None:
    inputs = [randn(4, WIDTH, seed=seed) for seed in range(3)]
    expected, model = model_of(kernel), model_of(kernel)
    torch.manual_seed(3)
    for x in inputs:
        expected(x).backward()
    step = TrainStep(model, solver="heu", **ESTIMATE)
    torch.manual_seed(3)
    with pytest.warns(
        RuntimeWarning, match=rf"runs as one op, .*, kernels\.\d \({kernel.__name__}"
    ):
        step([(x,) for x in inputs])
    assert step.fallbacks == []
    assert step.explain().count(f"({kernel.__name__})") == 3
    for one, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


class Outer(Disabled):
    """Its own forward is traced, and calls one that is not."""

    def forward(self, x: Tensor, *, times: int) -> tuple[Tensor, Tensor]:
        y, most = super().forward(x, times=times)
        return 2 * y, most


class Idle(Outer):
    """Has a module that never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.never = Disabled()


def in_turn(kinds: Sequence[type[nn.Module]]) -> Callable[[], nn.Module]:
    turn = iter(kinds)
    return lambda: next(turn)()


def test_who_is_disabled_is_told_apart() -> None:
    kinds = [Disabled, Outer, Idle]
    inputs = [randn(4, WIDTH, seed=seed) for seed in range(3)]
    expected, model = (model_of(in_turn(kinds)) for _ in range(2))
    torch.manual_seed(3)
    for x in inputs:
        expected(x).backward()
    step = TrainStep(model, solver="heu", **ESTIMATE)
    torch.manual_seed(3)
    with pytest.warns(RuntimeWarning, match="runs as one op"):
        step([(x,) for x in inputs])
    assert step.fallbacks == []
    for k, kind in enumerate(kinds):
        assert step.explain().count(f"kernels.{k} ({kind.__name__})") == 1
    assert "never" not in step.explain()
    for one, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert one.grad is other.grad is None or torch.equal(one.grad, other.grad)


class Launched:
    """A kernel of Triton's, to PyTorch: it writes into what it is given."""

    arg_names = ("x", "out", "double")
    configs = None

    def __getitem__(self, grid: Any) -> Any:
        return lambda x, out, double: (out.copy_(x.tanh()), double.copy_(x * 2))


class Tanh(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        out, double = torch.empty_like(x), torch.empty_like(x)
        triton_kernel_wrapper_mutation(
            kernel_idx=kernel_side_table.add_kernel(_LAUNCHED),
            constant_args_idx=kernel_side_table.add_constant_args({}),
            grid=[(1, 1, 1)],
            tma_descriptor_metadata={},
            kwargs={"x": x, "out": out, "double": double},
        )
        ctx.save_for_backward(out)
        return out, double

    @staticmethod
    def backward(ctx: Any, given: Tensor, doubled: Tensor) -> Tensor:
        (out,) = ctx.saved_tensors
        return given * (1 - out**2) + 2 * doubled


_LAUNCHED = Launched()


class ByTriton(Kernel):
    def forward(self, x: Tensor, *, times: int) -> tuple[Tensor, Tensor]:
        y, double = Tanh.apply(self.linear(x))
        return y * times + double, y.detach().amax()


@pytest.mark.parametrize("solver", ["none", "full", "heu"])
@pytest.mark.filterwarnings("ignore:.*")
def test_a_kernel_of_triton_is_an_op_of_several_results(solver: str) -> None:
    x = randn(4, WIDTH)
    expected = eager(model_of(ByTriton), x)
    model = model_of(ByTriton)
    options = Options(memory_budget="1MB" if solver == "full" else 1.0, solver=solver, **ESTIMATE)
    planned = plan(capture(model, x), options)
    ops = [op for op in planned.captured.trace.ops if op.name.startswith("launched")]
    # Without Triton here PyTorch believes that the kernel writes into `x`, too.
    assert [len(op.outputs) for op in ops] == [2] * 3
    assert not any("empty_like" in op.name for op in planned.captured.trace.ops)
    assert all(op.recomputable for op in ops)
    forward, backward = rewrite(planned.captured, planned.report.plan)
    torch.manual_seed(7)
    with torch.no_grad():
        loss, *saved = forward([*model.parameters(), *model.buffers(), x])
        found = backward([*saved, torch.ones_like(loss)])
    for one, other in zip(expected, [loss, *found[: len(expected) - 1]], strict=True):
        assert torch.equal(one, other)


class Changes(Launched):
    """Writes into one argument and reads both."""

    arg_names = ("x", "out")

    def __getitem__(self, grid: Any) -> Any:
        return lambda x, out: out.copy_(x * 2).add_(x)


def changed_by(kernel: Any, **given: Tensor) -> None:
    triton_kernel_wrapper_mutation(
        kernel_idx=kernel_side_table.add_kernel(kernel),
        constant_args_idx=kernel_side_table.add_constant_args({}),
        grid=[(1, 1, 1)],
        tma_descriptor_metadata={},
        kwargs=given,
    )


_CHANGES = Changes()


class ChangesPart(torch.autograd.Function):
    """Gives the kernel two parts of one tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, first: slice, second: slice) -> Tensor:
        y = x.clone()
        changed_by(_CHANGES, x=y[first], out=y[second])
        return y

    @staticmethod
    def backward(ctx: Any, given: Tensor) -> tuple[Tensor, None, None]:
        return given * 3, None, None


class ChangesAll(ChangesPart):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *_: slice) -> Tensor:
        y = x.clone()
        changed_by(_CHANGES, x=y, out=y)
        return y


class ChangesMore(Changes):
    pass


_CHANGES_MORE = ChangesMore()


class Twice(ChangesPart):
    @staticmethod
    def forward(ctx: Any, x: Tensor, first: slice, second: slice) -> Tensor:
        y = x.clone()
        for kernel in (_CHANGES, _CHANGES_MORE):
            changed_by(kernel, x=y[first], out=y[second])
        return y


class Parts(nn.Module):
    def __init__(self, how: Any, *parts: slice) -> None:
        super().__init__()
        self.linear, self.how, self.parts = nn.Linear(WIDTH, WIDTH), how, parts

    def forward(self, x: Tensor) -> Tensor:
        return self.how.apply(self.linear(x), *self.parts).square().mean()


@pytest.mark.filterwarnings("ignore:.*")
@pytest.mark.parametrize(
    ("how", "parts"),
    [(ChangesAll, (slice(0), slice(0))), (ChangesPart, (slice(0, 2), slice(2, 4)))],
)
def test_a_kernel_may_get_one_tensor_twice_or_parts_of_one(how: Any, parts: Any) -> None:
    model, x = Parts(how, *parts), randn(4, WIDTH)
    planned = plan(capture(model, x), Options(solver="none", **ESTIMATE))
    forward, _ = rewrite(planned.captured, planned.report.plan)
    with torch.no_grad():
        assert torch.equal(forward([*model.parameters(), x])[0], model(x))


@pytest.mark.filterwarnings("ignore:.*")
def test_launches_of_two_kernels_are_two_kinds_of_op() -> None:
    """Their costs are measured, and cached, apart."""
    model = nn.Sequential(Parts(Twice, slice(0, 2), slice(2, 4)))
    trace = capture(model, randn(4, WIDTH)).trace
    launches = [op.signature for op in trace.ops if "Changes" in op.signature]
    assert [len(launches), len(set(launches))] == [2, 2]
    assert sum(f"{__name__}.ChangesMore " in signature for signature in launches) == 1


@pytest.mark.filterwarnings("ignore:.*")
def test_a_kernel_that_reads_what_it_writes_under_another_name_is_refused() -> None:
    model = Parts(ChangesPart, slice(0, 3), slice(1, 4))
    with pytest.raises(CaptureError, match="under two names"):
        capture(model, randn(4, WIDTH))
