"""What a training loop of practice is here: a function that trains two steps through a `Door`, and
gives the tensors that it ends with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import overlapc

WIDTH = 8
_OPTIONS: dict[str, Any] = {"profile": "estimate", "solver": "heu"}


@dataclass
class Door:
    """Where a loop gets its model: planned, or as it is. `planned` are those that overlapc has."""

    is_planned: bool
    folder: Path
    planned: list[Any] = field(default_factory=list)

    def optimize(self, model: Any, **options: Any) -> Any:
        if not self.is_planned:
            return model
        self.planned.append(overlapc.optimize(model, **_OPTIONS, **options))
        return self.planned[-1]

    def step(self, model: nn.Module, loss: Any = None) -> Callable[[list[Any]], list[Tensor]]:
        """A step of several microbatches: `TrainStep`, or plain accumulation."""
        if self.is_planned:
            self.planned.append(overlapc.TrainStep(model, loss, **_OPTIONS))
            return self.planned[-1]  # type: ignore[no-any-return]

        def accumulate(microbatches: list[Any]) -> list[Tensor]:
            losses = []
            for each in microbatches:
                given = dict(each) if isinstance(each, Mapping) else {}
                args = () if given else each
                found = model(*args, **given) if loss is None else loss(model, *args, **given)
                found = found if isinstance(found, Tensor) else found.loss
                found.backward()
                losses.append(found.detach())
            return losses

        return accumulate


State = dict[str, Any]
LOOPS: dict[str, Loop] = {}


@dataclass(frozen=True)
class Loop:
    run: Callable[[Door], State]
    needs: tuple[str, ...] = ()  # packages


def loop(*needs: str) -> Callable[[Callable[[Door], State]], Callable[[Door], State]]:
    """Add a function to the loops; its name, with spaces, is the loop's."""

    def added(run: Callable[[Door], State]) -> Callable[[Door], State]:
        LOOPS[run.__name__.replace("_", " ")] = Loop(run, needs)
        return run

    return added


def state_of(model: nn.Module, *losses: Any) -> State:
    """A loop's end: the model's tensors, and losses."""
    found: State = {f"loss {i}": torch.as_tensor(loss).detach() for i, loss in enumerate(losses)}
    return found | {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


class Net(nn.Module):
    """Two layers with dropout between."""

    def __init__(self, out: int = 4, width: int = WIDTH) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(width, 4 * width), nn.LayerNorm(4 * width)
        self.down = nn.Linear(4 * width, out)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.dropout(F.gelu(self.norm(self.up(x))), 0.1, self.training))


def batches(
    count: int = 2, rows: int = 6, classes: int = 4, width: int = WIDTH
) -> list[tuple[Tensor, Tensor]]:
    made = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(rows, width, generator=made),
            torch.randint(0, classes, (rows,), generator=made),
        )
        for _ in range(count)
    ]


def sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, **options)
