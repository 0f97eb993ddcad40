"""Blocks that are optimized, and sharded afterwards, are planned between their gathers, bitwise,
with one warning for each. (tests/multiprocess/test_sharded.py has whole models.)"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.multiprocess.spawn import run_ranks

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(300), pytest.mark.slow]
OPTIONS = {"profile": "estimate", "timeout_s": 120}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(64, 16)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.scores = nn.Linear(16, 64, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.scores(x).logsumexp(-1).mean()


def sharded(model: nn.Module, blocks: Any, ranks: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (ranks,))
    for block in blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def trained(rank: int, ranks: int) -> tuple[bool, int, list[str]]:
    """Whether gradients are those of FSDP alone; graphs planned; warnings of overlapc's."""
    import overlapc

    tokens = torch.randint(0, 64, (4, 8), generator=torch.Generator().manual_seed(rank))
    torch.manual_seed(0)
    model = Words()
    alone = sharded(model, model.layers, ranks)
    alone(tokens).backward()
    torch.manual_seed(0)
    model = Words()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for i, block in enumerate(model.layers):
            model.layers[i] = overlapc.optimize(block, **OPTIONS)
        run: Any = sharded(model, model.layers, ranks)
        run(tokens).backward()
        planned = len(model.layers[0].graphs)
    pairs = zip(alone.parameters(), model.parameters(), strict=True)
    equal = all(torch.equal(a.grad.full_tensor(), b.grad.full_tensor()) for a, b in pairs)
    return equal, planned, [str(w.message) for w in caught if "overlapc" in str(w.message)]


def test_blocks_that_are_sharded_afterwards() -> None:
    for equal, planned, said in run_ranks(trained, 2, timeout_s=240):
        assert equal
        assert planned
        assert all("FSDP2 shards this model; " in each for each in said)
        assert len(said) == 2  # one for each twin
