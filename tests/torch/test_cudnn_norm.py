"""cuDNN's batch norm is traced as eager runs it: its own kernel, which changes the statistics once.

There is no cuDNN here: kernels for CPUs, made of PyTorch's own, stand in for its two ops.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import overlapc
from tests.torch.exact import DYNAMO_WARNINGS, Batch, differences, randn, train

pytestmark = DYNAMO_WARNINGS


def forward(
    x: Tensor, weight: Tensor, bias: Any, mean: Any, var: Any, training: bool, factor: Any, eps: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    made = torch.ops.aten.native_batch_norm(x, weight, bias, mean, var, training, factor, eps)
    return *made, torch.empty(0, dtype=torch.uint8)


def backward(
    x: Tensor, grad: Tensor, weight: Tensor, mean: Any, var: Any, saved: Any, inverse: Any,
    eps: Any, _: Tensor,
) -> Any:  # fmt: skip
    return torch.ops.aten.native_batch_norm_backward(
        grad, x, weight, None, None, saved, inverse, True, eps, [True, True, True]
    )


@pytest.fixture(autouse=True)
def kernels() -> Iterator[None]:
    library = torch.library.Library("aten", "IMPL")
    library.impl("cudnn_batch_norm", forward, "CPU")
    library.impl("cudnn_batch_norm_backward", backward, "CPU")
    yield
    library._destroy()


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm2d(4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            made = torch.cudnn_batch_norm(
                conv(x), norm.weight, norm.bias, norm.running_mean, norm.running_var,
                self.training, 0.1, 1e-5,
            )[0]  # fmt: skip
            x = x + torch.relu(made)
        return x


def make() -> Normed:
    torch.manual_seed(0)
    return Normed()


@pytest.mark.parametrize("solver", ["none", "full", "heu"])
def test_it_is_its_own_kernel_and_changes_statistics_once(solver: str) -> None:
    batches = [Batch((randn(3, 4, 6, 6, seed=i),)) for i in range(3)]
    model = overlapc.optimize(make(), solver=solver, profile="measure", memory_budget=None)
    assert differences(train(make(), batches), train(model, batches)) == []
    assert model.fallbacks == []
    (report,) = model.graphs
    normed = [op for op in report.problem.trace.ops if "cudnn_batch_norm" in op.signature]
    assert len(normed) == 6
    assert not any("native_batch_norm" in op.signature for op in report.problem.trace.ops)


def test_while_it_evaluates_it_changes_nothing() -> None:
    model = overlapc.optimize(make().eval(), profile="estimate")
    batches = [Batch((randn(3, 4, 6, 6, requires_grad=True),))]
    plain = make().eval()
    with torch.no_grad():
        assert torch.equal(plain(*batches[0].args), model(*batches[0].args))
