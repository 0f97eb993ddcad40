"""What the search counts of fully sharded parameters is what PyTorch's FSDP asks for."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.multiprocess.spawn import run_ranks
from tests.sharded import ENDS, asked

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(120)]
LAYERS, WIDTH = 4, 16
KINDS = {"c10d::_allgather_base_": "gather", "c10d::_reduce_scatter_base_": "scatter"}
Log = list[tuple[str, int, str]]  # kind, elements, dtype


class Asked(TorchDispatchMode):
    """Keeps the collectives that are asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.log: Log = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = KINDS.get(func.name())
        if kind:
            whole = max((one for one in args if isinstance(one, torch.Tensor)), key=torch.numel)
            self.log.append((kind, whole.numel(), str(whole.dtype)))
        return func(*args, **(kwargs or {}))


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(64, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(LAYERS)
        )
        self.scores = nn.Linear(WIDTH, 64, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.scores(x)


def logged(rank: int, ranks: int, again: bool) -> list[Log]:
    """The collectives of two microbatches, of each forward and each backward."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    how: dict[str, Any] = {
        "mesh": init_device_mesh("cpu", (ranks,)),
        "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
    }
    model = Words()
    for layer in model.layers:
        fully_shard(layer, **how, reshard_after_forward=again)
    fully_shard(model, **how)
    found = []
    for _ in range(2):
        with Asked() as there:
            scores = model(torch.zeros(2, 8, dtype=torch.long))
        with Asked() as back:
            scores.float().sum().backward()
        found += [there.log, back.log]
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("again", [True, False])
def test_collectives_are_those_that_are_counted(again: bool) -> None:
    layer = 8 * WIDTH * WIDTH + 5 * WIDTH  # elements
    ends = 2 * 64 * WIDTH
    size = {"gather": "torch.bfloat16", "scatter": "torch.float32"}

    def collectives(log: list[tuple[str, int]]) -> Log:
        return [
            (kind, ends if which == ENDS else layer, size[kind])
            for kind, which in log
            if kind != "run"
        ]

    forward, backward = map(collectives, asked(LAYERS, again))
    for found in run_ranks(logged, 2, again, timeout_s=90):
        assert found == [forward, backward] * 2
