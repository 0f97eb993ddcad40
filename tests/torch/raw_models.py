"""Models that call raw collectives of `torch.distributed`, and a planned step of such a model."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from overlapc.passes.capture.front import capture
from overlapc.passes.emit.rewrite import rewrite
from overlapc.planning.options import Options
from overlapc.planning.road import plan

with warnings.catch_warnings():
    # torch 2.13 renames them; torch 2.11 knows only the names used here.
    warnings.simplefilter("ignore", FutureWarning)
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Column(torch.autograd.Function):
    """A matrix split by columns; sums the input's gradient while it computes the weight's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        grad_x = grad @ weight
        work = dist.all_reduce(grad_x, async_op=True)
        grad_weight = grad.t() @ x
        work.wait()
        return grad_x, grad_weight


class SequenceColumn(torch.autograd.Function):
    """The same on a part of the sequence: gathered before the product, its gradient scattered."""

    @staticmethod
    def gathered(x: Tensor) -> tuple[Tensor, Any]:
        whole = torch.empty(x.shape[0] * dist.get_world_size(), *x.shape[1:])
        return whole, gather(whole, x, async_op=True)

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        whole, work = SequenceColumn.gathered(x)
        work.wait()
        return whole @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        whole, work = SequenceColumn.gathered(x)
        grad_whole = grad @ weight
        work.wait()
        grad_x = torch.empty_like(x)
        work = scatter(grad_x, grad_whole, async_op=True)
        grad_weight = grad.t() @ whole
        work.wait()
        return grad_x, grad_weight


class Row(torch.autograd.Function):
    """A matrix split by rows, whose products are summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        y = x @ weight.t()
        dist.all_reduce(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x


class SequenceRow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        y = x @ weight.t()
        part = torch.empty(y.shape[0] // dist.get_world_size(), y.shape[1])
        scatter(part, y)
        return part

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        whole, work = SequenceColumn.gathered(grad)
        work.wait()
        return whole @ weight, whole.t() @ x


class TensorParallel(nn.Module):
    """Norm, column, GELU, row, residual, several times."""

    def __init__(self, sequence: bool = False, layers: int = 2, width: int = 16) -> None:
        super().__init__()
        self.column, self.row = (SequenceColumn, SequenceRow) if sequence else (Column, Row)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.ups = nn.ParameterList(torch.randn(2 * width, width) / 4 for _ in range(layers))
        self.downs = nn.ParameterList(torch.randn(width, 2 * width) / 4 for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for norm, up, down in zip(self.norms, self.ups, self.downs, strict=True):
            hidden = nn.functional.gelu(self.column.apply(norm(x), up))
            x = x + self.row.apply(hidden, down)
        return x.square().mean()


class Exchange(torch.autograd.Function):
    """Rows to the ranks of their experts, and their gradients back."""

    @staticmethod
    def exchanged(x: Tensor, arrives: Any, leaves: Any) -> Tensor:
        out = x.new_empty(sum(arrives) if arrives else x.shape[0], *x.shape[1:])
        work = dist.all_to_all_single(out, x, arrives, leaves, async_op=True)
        work.wait()
        return out

    @staticmethod
    def forward(ctx: Any, x: Tensor, arrives: Any, leaves: Any) -> Tensor:
        ctx.splits = arrives, leaves
        return Exchange.exchanged(x, arrives, leaves)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        arrives, leaves = ctx.splits
        return Exchange.exchanged(grad.contiguous(), leaves, arrives), None, None


class Experts(nn.Module):
    """An expert on each rank. Where `dropless`, how many rows go where is data."""

    def __init__(self, dropless: bool = False, width: int = 16) -> None:
        super().__init__()
        self.dropless = dropless
        self.router = nn.Linear(width, dist.get_world_size())
        self.expert = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x).softmax(-1)
        score, chosen = scores.max(-1)
        order = chosen.argsort(stable=True)
        leaves = arrives = None
        if self.dropless:
            counts = (chosen[:, None] == torch.arange(dist.get_world_size())).sum(0)
            others = torch.empty_like(counts)
            dist.all_to_all_single(others, counts)
            leaves, arrives = counts.tolist(), others.tolist()
        y = self.expert(Exchange.apply(x[order], arrives, leaves))
        back = Exchange.apply(y, leaves, arrives)
        out = x + torch.zeros_like(x).index_copy(0, order, back) * score[:, None]
        return out.square().mean()


def planned_step(
    model: nn.Module, args: Sequence[Tensor], solver: str = "overlap", budget: Any = None
) -> tuple[Tensor, list[Tensor | None]]:
    """The loss and the gradients of parameters, by a plan of the directly captured graph."""
    options = Options(memory_budget=budget, solver=solver, profile="estimate")
    planned = plan(capture(model, *args), options)
    forward, backward = rewrite(planned.captured, planned.report.plan)
    primals = [*model.parameters(), *model.buffers(), *args]
    with torch.no_grad():
        loss, *saved = forward([*primals])
        saved.sort(key=torch.is_tensor)  # sizes that are data come first, as in AOTAutograd
        gradients = backward([*saved, torch.ones_like(loss)])
    return loss, list(gradients[: len([*model.parameters()])])


def eager_step(model: nn.Module, args: Sequence[Tensor]) -> tuple[Tensor, list[Tensor | None]]:
    loss = model(*args)
    loss.backward()
    return loss.detach(), [parameter.grad for parameter in model.parameters()]
