"""A mixture-of-experts GPT on bytes, expert parallel and dropless.

`model(tokens, targets)` is the loss.

Every rank reads its own batch. Attention, router and embeddings are whole on each rank; the
experts are divided among the ranks. A block's router picks `top_k` experts a token; an all-to-all
carries each chosen token to the rank of its expert and a second one carries the result back.
No token is dropped, so how many rows travel is known only at run time: the splits are data, and
`torch.compile` needs `torch._dynamo.config.capture_scalar_outputs = True` to keep one graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from overlapc.nn.layers import AllToAll, exchange


@dataclass(frozen=True, slots=True)
class MoEConfig:
    vocab: int = 256
    layers: int = 2
    width: int = 256
    heads: int = 4
    experts: int = 4
    top_k: int = 2
    expert_width: int = 512
    max_seq: int = 1024
    dropout: float = 0.0
    seed: int = 0


def checked_sizes(counts: Tensor) -> list[int]:
    """The counts as Python numbers, which the compiler may assume to be sizes."""
    sizes = counts.tolist()
    for size in sizes:
        torch._check(size >= 0)
    return sizes


class Experts(nn.Module):
    """The experts this rank holds; rows arrive grouped by expert, `counts[e]` rows each."""

    def __init__(self, config: MoEConfig, first: int, held: int) -> None:
        super().__init__()
        shape_up = (config.experts, config.width, config.expert_width)
        shape_down = (config.experts, config.expert_width, config.width)
        mine = slice(first, first + held)
        self.up = nn.Parameter(torch.randn(shape_up)[mine] * config.width**-0.5)
        self.down = nn.Parameter(torch.randn(shape_down)[mine] * config.expert_width**-0.5)

    def forward(self, rows: Tensor, counts: list[int]) -> Tensor:
        outputs = [
            F.gelu(part @ self.up[e]) @ self.down[e]
            for e, part in enumerate(torch.split(rows, counts))
        ]
        return torch.cat(outputs)


class MoE(nn.Module):
    def __init__(self, config: MoEConfig, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group, self.ranks = group.group_name, group.size()
        self.top_k, self.held = config.top_k, config.experts // group.size()
        self.router = nn.Linear(config.width, config.experts, bias=False)
        self.experts = Experts(config, first=group.rank() * self.held, held=self.held)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weights, chosen = F.softmax(self.router(tokens), dim=-1).topk(self.top_k, dim=-1)

        # Rows for the wire, grouped by expert and hence by the rank which holds it.
        order = torch.argsort(chosen.flatten(), stable=True)
        experts = torch.arange(self.ranks * self.held, device=x.device)
        sent = (chosen.flatten()[:, None] == experts).sum(0)
        received = exchange(sent, [self.held] * self.ranks, [self.held] * self.ranks, self.group)
        received = received.view(self.ranks, self.held)
        send = checked_sizes(sent.view(self.ranks, self.held).sum(1))
        receive = checked_sizes(received.sum(1))
        rows = AllToAll.apply(tokens[order // self.top_k], receive, send, self.group)

        # They arrive grouped by (rank, expert); the experts want (expert, rank).
        labels = torch.arange(self.held, device=x.device).repeat(self.ranks)
        label = torch.repeat_interleave(labels, received.flatten(), output_size=rows.shape[0])
        by_expert = torch.argsort(label, stable=True)
        counts = checked_sizes(received.sum(0))
        done = self.experts(rows[by_expert], counts)
        back = torch.empty_like(done).index_copy(0, by_expert, done)

        rows = AllToAll.apply(back, send, receive, self.group)
        by_token = torch.empty_like(rows).index_copy(0, order, rows)
        by_token = by_token.view(-1, self.top_k, tokens.shape[1])
        return (by_token * weights[..., None]).sum(1).view_as(x)


class Attention(nn.Module):
    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.proj = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, width = x.shape
        qkv = self.qkv(x).view(batch, seq, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(mixed.transpose(1, 2).reshape(batch, seq, width))


class Block(nn.Module):
    def __init__(self, config: MoEConfig, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.attn_norm, self.attn = nn.LayerNorm(config.width), Attention(config)
        self.moe_norm, self.moe = nn.LayerNorm(config.width), MoE(config, group)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attn(self.attn_norm(x)))
        return x + self.dropout(self.moe(self.moe_norm(x)))


class MoEGPT(nn.Module):
    def __init__(self, config: MoEConfig, group: dist.ProcessGroup) -> None:
        super().__init__()
        if config.experts % group.size():
            raise ValueError(
                f"{config.experts} experts cannot be divided among {group.size()} ranks; "
                "choose a multiple of the ranks"
            )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            self.embed = nn.Embedding(config.vocab, config.width)
            self.position = nn.Embedding(config.max_seq, config.width)
            nn.init.normal_(self.embed.weight, std=0.02)
            nn.init.normal_(self.position.weight, std=0.02)
            self.blocks = nn.ModuleList(Block(config, group) for _ in range(config.layers))
            self.norm = nn.LayerNorm(config.width)
            self.head = nn.Linear(config.width, config.vocab, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embed(tokens) + self.position(positions)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def average_gradients(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Make the gradients those of the mean loss over all ranks' batches.

    Expert weights have already collected the tokens of every rank. Parameters that each rank has
    whole are summed here, outside the model, as data parallelism does it.
    """
    whole = []
    for name, parameter in model.named_parameters():
        parameter.grad.div_(group.size())
        if ".experts." not in name:
            whole.append(parameter.grad)
    flat = torch.cat([grad.flatten() for grad in whole])
    dist.all_reduce(flat, group=group)
    for grad, summed in zip(whole, flat.split([g.numel() for g in whole]), strict=True):
        grad.copy_(summed.view_as(grad))
