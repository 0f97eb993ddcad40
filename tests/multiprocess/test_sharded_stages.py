"""Stages of a pipeline that FSDP2 shards: bitwise the loop that reduces each microbatch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from overlapc.core.errors import OptionError
from tests.multiprocess.sharded import POLICIES, VOCAB, Block
from tests.multiprocess.spawn import run_ranks

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.timeout(900)]

WIDTH, MICROBATCHES, STEPS = 16, 4, 2


class Part(nn.Module):
    """One of two stages, of two blocks."""

    def __init__(self, last: bool, checkpoints: bool) -> None:
        super().__init__()
        self.checkpoints = checkpoints
        self.embed = None if last else nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH, False) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False) if last else None

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.embed is None else self.embed(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        return x if self.head is None else self.head(x)


def loss_of(scores: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(scores.float()[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def staged(rank: int, _ranks: int, schedule: str, policy: str, checkpoints: bool) -> Any:
    """Two stages over two shards: what differs from plain loops, and what is refused."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    import overlapc

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stages", "shards"))
    stage, shard = mesh.get_coordinate() or (0, 0)
    options = {"mesh": mesh["shards"], "mp_policy": MixedPrecisionPolicy(**POLICIES[policy])}

    def made(last: bool) -> Any:
        torch.manual_seed(3)
        part = Part(last, checkpoints)
        for block in part.blocks:
            fully_shard(block, **options)
        return fully_shard(part, **options)

    front, back, mine = made(False), made(True), made(stage == 1)
    parts = (front, back, mine)
    optimizers = [torch.optim.AdamW(part.parameters(), lr=1e-2, foreach=False) for part in parts]
    asked: dict[str, Any] = {"profile": "estimate", "solver": "heu", "timeout_s": 120}
    asked |= {"microbatches": MICROBATCHES, "group": mesh.get_group("stages")}
    asked |= {"loss": loss_of} if stage else {}
    with pytest.raises(OptionError, match=r"data_parallel=: found FSDP2's shards in stage"):
        overlapc.Pipeline({stage: mine}, schedule, data_parallel=mesh.get_group("shards"), **asked)
    pipeline = overlapc.Pipeline({stage: mine}, schedule, slices="auto", **asked)
    wrong: list[str] = []
    for step in range(STEPS):
        draws = torch.Generator().manual_seed(100 * step + shard)
        batches = [torch.randint(VOCAB, (2, 32), generator=draws) for _ in range(MICROBATCHES)]
        losses = []
        for tokens in batches:
            losses.append(loss_of(back(front(tokens)), tokens))
            losses[-1].backward()
        got = pipeline(() if stage else batches, batches if stage else ())
        if not all(torch.equal(a, b) for a, b in zip(losses if stage else [], got, strict=True)):
            wrong.append(f"losses of step {step}")
        expected = (front, back)[stage].parameters()
        for (name, p), other in zip(mine.named_parameters(), expected, strict=True):
            if not torch.equal(p.grad.to_local(), other.grad.to_local()):
                wrong.append(f"gradient of {name} in step {step}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return wrong, pipeline.explain()


@pytest.mark.parametrize(
    ("schedule", "policy", "checkpoints"),
    [
        ("1f1b", "bf16", False),
        ("zero-bubble", "", True),
        ("merged", "bf16", False),
    ],
)
def test_sharded_stages(schedule: str, policy: str, checkpoints: bool) -> None:
    for wrong, text in run_ranks(staged, 4, schedule, policy, checkpoints, timeout_s=600):
        assert wrong == []
        assert "all_gather_into_tensor" in text
        assert "cell_contents" not in text
        assert "2 slices: slices=2: found a model that FSDP2 shards" in text
