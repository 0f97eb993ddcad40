"""A pre-norm GPT on bytes, tensor parallel in Megatron's way. `model(tokens, targets)` is the loss.

Each block has two collectives forward (after attention and after the MLP) and two backward
(the gradients that enter them). They are *functional* collectives inside autograd Functions
(`overlapc.nn.layers`), so that `torch.compile` captures the whole step, both directions, as one
graph.

Weights are drawn in full from one seed and then cut, so every number of ranks trains the same
model. `GPT(config)` without a group is the whole model on one rank; `parallelize_dtensor` turns
that one into PyTorch's own DTensor tensor parallelism.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from overlapc.nn.layers import CopyToRanks, SumOverRanks
from overlapc.search.models.own import Repeats


@dataclass(frozen=True, slots=True)
class GPTConfig:
    vocab: int = 256
    layers: int = 4
    width: int = 256
    heads: int = 4
    max_seq: int = 1024
    dropout: float = 0.0
    tie_embeddings: bool = False
    seed: int = 0


class Shard:
    """This rank's part of the tensor-parallel weights; the whole of them without a group."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group_name = group.group_name if group else None
        self.rank = group.rank() if group else 0
        self.ranks = group.size() if group else 1

    def linear(self, full: nn.Linear, dim: int) -> nn.Linear:
        """`full` cut along its output (dim 0: column parallel) or input (dim 1: row parallel)."""
        piece = full.weight.detach().chunk(self.ranks, dim)[self.rank].clone()
        linear = nn.Linear(piece.shape[1], piece.shape[0], bias=False, device="meta")
        linear.weight = nn.Parameter(piece)
        return linear

    def enter(self, x: Tensor) -> Tensor:
        return x if self.group_name is None else CopyToRanks.apply(x, self.group_name)

    def leave(self, partial: Tensor) -> Tensor:
        return partial if self.group_name is None else SumOverRanks.apply(partial, self.group_name)


class Attention(nn.Module):
    def __init__(self, config: GPTConfig, shard: Shard) -> None:
        super().__init__()
        self.shard, self.head_width = shard, config.width // config.heads
        # Rows are ordered (head, q/k/v, channel), so that a cut of the rows is a cut of the heads.
        self.qkv = shard.linear(nn.Linear(config.width, 3 * config.width, bias=False), dim=0)
        self.proj = shard.linear(nn.Linear(config.width, config.width, bias=False), dim=1)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, _ = x.shape
        qkv = self.qkv(self.shard.enter(x)).view(batch, seq, -1, 3, self.head_width)
        q, k, v = qkv.permute(3, 0, 2, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.shard.leave(self.proj(mixed.transpose(1, 2).reshape(batch, seq, -1)))


class MLP(nn.Module):
    def __init__(self, config: GPTConfig, shard: Shard) -> None:
        super().__init__()
        self.shard = shard
        self.up = shard.linear(nn.Linear(config.width, 4 * config.width, bias=False), dim=0)
        self.down = shard.linear(nn.Linear(4 * config.width, config.width, bias=False), dim=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.shard.leave(self.down(F.gelu(self.up(self.shard.enter(x)))))


class Block(nn.Module):
    def __init__(self, config: GPTConfig, shard: Shard) -> None:
        super().__init__()
        self.attn_norm, self.attn = nn.LayerNorm(config.width), Attention(config, shard)
        self.mlp_norm, self.mlp = nn.LayerNorm(config.width), MLP(config, shard)
        # Dropout acts on what all ranks hold alike: ranks must draw the same numbers.
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attn(self.attn_norm(x)))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class GPT(nn.Module):
    def __init__(self, config: GPTConfig, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            shard = Shard(group)
            self.embed = nn.Embedding(config.vocab, config.width)
            self.position = nn.Embedding(config.max_seq, config.width)
            nn.init.normal_(self.embed.weight, std=0.02)
            nn.init.normal_(self.position.weight, std=0.02)
            self.blocks = nn.ModuleList(Block(config, shard) for _ in range(config.layers))
            self.norm = nn.LayerNorm(config.width)
            self.head = nn.Linear(config.width, config.vocab, bias=False)
        if config.tie_embeddings:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embed(tokens) + self.position(positions)
        for block in self.blocks:
            x = block(x)
        return cross_entropy(self.head(self.norm(x)), targets)


def tiny() -> tuple[GPT, tuple[Tensor, Tensor]]:
    """A small model and a batch, for `overlapc verify examples.gpt.model:tiny`; tensor parallel
    under torchrun."""
    config = GPTConfig(layers=2, width=128, max_seq=64, dropout=0.1)
    tokens = torch.randint(0, 256, (2, 4, 64), generator=torch.Generator().manual_seed(0))
    group = dist.group.WORLD if dist.is_initialized() else None
    return GPT(config, group), (tokens[0], tokens[1])


def for_search(tensor: dist.ProcessGroup | None, expert: dist.ProcessGroup | None) -> Repeats:
    """This GPT with the shape of 7B, for `overlapc search examples.gpt.model:for_search`."""
    config = GPTConfig(vocab=51200, layers=32, width=4096, heads=32, max_seq=2048)
    block = Block(config, Shard(tensor))
    return Repeats(
        block, config.layers, config.width, config.max_seq, config.vocab, heads=config.heads
    )


class Embed(nn.Module):
    """The embedding before the blocks, for `Repeats(first=...)`."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.words = nn.Embedding(config.vocab, config.width)
        self.places = nn.Embedding(config.max_seq, config.width)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.words(tokens) + self.places(torch.arange(tokens.shape[1]))


class Scores(nn.Module):
    """The norm and the scores behind the blocks, for `Repeats(last=...)`."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.width)
        self.words = nn.Linear(config.width, config.vocab, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.words(self.norm(x))


def with_ends(config: GPTConfig, tensor: dist.ProcessGroup | None) -> Repeats:
    """A GPT with its embedding, scores and loss, so that a search plans its winner whole."""
    return Repeats(
        Block(config, Shard(tensor)),
        config.layers,
        config.width,
        config.max_seq,
        config.vocab,
        config.heads,
        first=Embed(config),
        last=Scores(config),
        loss=cross_entropy,
    )


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """The loss behind the last stage."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def parallelize_dtensor(model: GPT, mesh: DeviceMesh) -> GPT:
    """The same cuts and collectives, stated to DTensor instead of written by hand."""
    plan = {
        "blocks.*.attn.qkv": ColwiseParallel(),
        "blocks.*.attn.proj": RowwiseParallel(),
        "blocks.*.mlp.up": ColwiseParallel(),
        "blocks.*.mlp.down": RowwiseParallel(),
    }
    return parallelize_module(model, mesh, plan)
