"""A graph that changes between steps: a rank that traces it for long is waited for."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch._dynamo.convert_frame as convert_frame
import torch.distributed as dist
from torch import nn

import overlapc
from tests.multiprocess.spawn import run_ranks

LONGER_S = 6.0


class Summed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Any) -> Any:
        summed = torch.distributed._functional_collectives.all_reduce(
            self.first(x), "sum", dist.group.WORLD
        )
        return self.second(summed).sum()


def unfrozen(rank: int, ranks: int, kind: str) -> int:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Summed()
    model.first.requires_grad_(False)
    options: dict[str, Any] = {"profile": "estimate"}
    step = overlapc.TrainStep(model, **options) if kind == "TrainStep" else None
    twin = overlapc.optimize(model, **options) if kind == "optimize" else None
    real, late = convert_frame.transform_code_object, []

    def traced(*args: Any, **kwargs: Any) -> Any:
        if late:
            until = time.monotonic() + late.pop()
            while time.monotonic() < until:
                time.sleep(0.05)
        return real(*args, **kwargs)

    convert_frame.transform_code_object = traced  # type: ignore[assignment]
    for number in range(2):
        x = torch.ones(2, 8) * (rank + 1)
        if number:
            model.first.requires_grad_(True)
            late += [LONGER_S] * rank
        if step is not None:
            step([x, x])
        else:
            twin(x).backward()
    dist.barrier()
    return len(late)


@pytest.mark.multiprocess
@pytest.mark.parametrize("kind", ["TrainStep", "optimize"])
def test_a_rank_that_traces_anew_is_waited_for(kind: str) -> None:
    assert run_ranks(unfrozen, 2, kind) == [0, 0]
