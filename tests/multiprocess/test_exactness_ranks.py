"""On several ranks, too, gradients are those of eager on the same ranks, bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import overlapc
from examples.gpt.model import GPT, GPTConfig, parallelize_dtensor
from examples.moe.model import MoEConfig, MoEGPT
from overlapc.core.errors import Infeasible
from overlapc.search.models.modules import Blocks as SearchBlocks
from overlapc.search.models.transformer import Transformer
from tests.multiprocess.spawn import run_ranks
from tests.torch.exact import Batch, differences, train

pytestmark = pytest.mark.multiprocess

GPT_SMALL = {"vocab": 32, "layers": 2, "width": 32, "heads": 4, "max_seq": 16}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.1, self.training)


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 32)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(32)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.norm(x).logsumexp(-1)


def gpt(dropout: float = 0.1) -> nn.Module:
    return GPT(GPTConfig(dropout=dropout, **GPT_SMALL), dist.group.WORLD)


def gpt_dtensor() -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return parallelize_dtensor(GPT(GPTConfig(dropout=0.0, **GPT_SMALL)), mesh)


def sequence_parallel() -> nn.Module:
    """Norms and residuals on a slice of the sequence; gathers and scatters around the rest."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan: dict[str, Any] = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(use_local_output=True),
    }
    for i in range(2):
        plan[f"blocks.{i}"] = PrepareModuleInput(
            input_layouts=(Shard(1),), desired_input_layouts=(Shard(1),), use_local_output=False
        )
        plan[f"blocks.{i}.norm"] = SequenceParallel()
        plan[f"blocks.{i}.up"] = ColwiseParallel(input_layouts=Shard(1))
        plan[f"blocks.{i}.down"] = RowwiseParallel(output_layouts=Shard(1), use_local_output=False)
    return parallelize_module(Blocks(), mesh, plan)


class Sequences(nn.Module):
    """What the search captures, behind an embedding: each rank has a part of every sequence."""

    def __init__(self, shared: bool = True) -> None:
        super().__init__()
        model = Transformer("small", layers=2, width=32, heads=4, ffn=64, vocab=32, seq=16)
        self.shared = shared
        self.embed = nn.Embedding(32, 32)
        self.blocks = SearchBlocks(model, 2, dist.group.WORLD, None, shared)
        for block in self.blocks.blocks:
            for norm in (block.attn_norm, block.norm):
                nn.init.ones_(norm.scale)
                nn.init.zeros_(norm.shift)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        if self.shared:
            rows = tokens.shape[1] // dist.get_world_size()
            x = x.transpose(0, 1).narrow(0, rows * dist.get_rank(), rows)
        return self.blocks(x).logsumexp(-1)


def gathered_head() -> nn.Module:
    """A head whose logits every rank gathers: in the backward each goes on with its own part."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {"norm": ColwiseParallel(output_layouts=Replicate())}
    model = Blocks()
    model.norm = nn.Linear(32, 48)  # type: ignore[assignment]
    return parallelize_module(model, mesh, plan)


def moe(layers: int = 2) -> nn.Module:
    config = MoEConfig(
        vocab=32,
        layers=layers,
        width=32,
        heads=4,
        experts=4,
        expert_width=32,
        max_seq=16,
        dropout=0.1,
    )
    return MoEGPT(config, dist.group.WORLD)


def tokens(seed: int) -> Tensor:
    return torch.randint(0, 32, (2, 16), generator=torch.Generator().manual_seed(seed))


def same_batches() -> list[Batch]:
    return [Batch((tokens(i), tokens(i + 5))) for i in range(3)]


def own_batches() -> list[Batch]:
    """Every rank its own, so that what goes where differs from step to step and rank to rank."""
    rank = dist.get_rank()
    return [Batch((tokens(10 * i + rank), tokens(i + 100 * rank))) for i in range(3)]


def only_tokens() -> list[Batch]:
    return [Batch((tokens(i),)) for i in range(3)]


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], list[Batch]]]] = {
    "gpt": (gpt, same_batches),
    "gpt_dtensor": (gpt_dtensor, same_batches),
    "sequence_parallel": (sequence_parallel, only_tokens),
    "shared sequences": (Sequences, only_tokens),
    "gathered head": (gathered_head, only_tokens),
    "moe": (moe, own_batches),
    "moe, one layer": (lambda: moe(1), own_batches),
}
_ALIKE = ("moe", "gathered head", "shared sequences")  # others of their kind are quick
TWO_RANKS = [
    pytest.param(name, marks=pytest.mark.slow) if name in _ALIKE else name for name in MODELS
]


def on_rank(
    rank: int, ranks: int, name: str, configs: list[tuple[Any, str, str]]
) -> list[dict[str, Any]]:
    """For each (budget, solver, profile): what differs from eager, and what was planned."""
    dist.init_process_group("gloo")
    make, batches = MODELS[name]

    def model() -> nn.Module:
        torch.manual_seed(1)
        return make()

    expected = train(model(), batches(), seed=7)
    found = []
    for config in configs:
        budget, solver, profile = config
        for _ in range(4):
            twin: Any = overlapc.optimize(
                model(), memory_budget=budget, solver=solver, profile=profile
            )
            try:
                differs = differences(expected, train(twin, batches(), seed=7))
                break
            except Infeasible as infeasible:
                budget = infeasible.smallest_bytes
                torch._dynamo.reset()
        else:
            raise AssertionError(f"{config}: the smallest budget {budget} does not work")
        found.append(
            {
                "config": config,
                "differences": differs,
                "unchanged": twin.fallbacks,
                "recomputed": [len(r.plan.recomputed) for r in twin.graphs],
                "collectives": [len(r.timeline.exposures) for r in twin.graphs],
                "digests": [r.plan.digest for r in twin.graphs],
                "orders": [r.plan.order for r in twin.graphs],
            }
        )
        torch._dynamo.reset()
    dist.barrier()
    dist.destroy_process_group()
    return found


QUICK = [(None, "overlap", "measure"), (1, "overlap", "estimate")]
FULL = [
    (None, "torch", "estimate"),
    (0.7, "overlap", "measure"),
    (0.4, "overlap", "estimate"),
    (1, "overlap", "measure"),
    (1, "full", "estimate"),
    (1, "selective", "estimate"),
    (None, "none", "measure"),
]


def check_ranks(
    ranks: int, name: str, configs: list[tuple[Any, str, str]], timeout_s: float = 280
) -> None:
    everyone = run_ranks(on_rank, ranks, name, configs, timeout_s=timeout_s)
    for found in everyone:
        for case, first in zip(found, everyone[0], strict=True):
            assert case["differences"] == [], case["config"]
            assert case["unchanged"] == []
            assert len(case["recomputed"]) == 1
            assert case["collectives"][0] > 0
            assert case["orders"] == first["orders"]
            assert case["digests"] == first["digests"]
            budget, solver, _ = case["config"]
            if budget == 1 and solver == "overlap":
                assert case["recomputed"][0] > 0


@pytest.mark.parametrize("name", TWO_RANKS)
def test_two_ranks(name: str) -> None:
    check_ranks(2, name, QUICK if name == "gpt" else QUICK[1:])


def sequences_on_rank(rank: int, ranks: int) -> None:
    """Shared or whole, the blocks' results and gradients are the same but for rounding."""
    dist.init_process_group("gloo")
    torch.manual_seed(rank)
    whole, shared = Sequences(shared=False), Sequences()
    dist.broadcast(whole.embed.weight.data, 0)
    shared.load_state_dict(whole.state_dict())
    full, mine = whole(tokens(3)), shared(tokens(3))
    torch.testing.assert_close(mine, full.transpose(0, 1).chunk(ranks)[rank])
    full.sum().backward()
    mine.sum().backward()
    for (name, ours), theirs in zip(shared.named_parameters(), whole.parameters(), strict=True):
        if "norm" in name or "embed" in name:  # of this rank's part of the sequence
            dist.all_reduce(ours.grad)
        torch.testing.assert_close(ours.grad, theirs.grad, msg=name)
    dist.barrier()
    dist.destroy_process_group()


def test_ranks_that_share_sequences_do_what_others_do() -> None:
    run_ranks(sequences_on_rank, 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt", "moe"])
def test_four_ranks(name: str) -> None:
    check_ranks(4, name, QUICK[1:])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", [name for name in MODELS if name != "moe, one layer"])
def test_two_ranks_every_solver(name: str) -> None:
    check_ranks(2, name, FULL, timeout_s=800)
