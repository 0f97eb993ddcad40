"""A model's blocks and ends as modules of one rank of a tensor- and expert-parallel layout. They
are captured on fake tensors, so weights are never initialised."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from overlapc.nn.layers import (
    AllToAll,
    CopyToRanks,
    GatherRows,
    ScatterRows,
    SumOverRanks,
    all_reduce,
    gather,
)
from overlapc.search.frameworks.context import Context
from overlapc.search.models.transformer import Model, Transformer

_DROPPED = 0.1  # dropout's probability, on which its cost does not depend


class Ranks:
    """The ranks of a process group, or one rank without a group. With `sequence` each rank has its
    part of every sequence, which is then the first dimension, wherever the whole is not needed."""

    def __init__(self, group: ProcessGroup | None, sequence: bool = False) -> None:
        self.name = group.group_name if group else None
        self.count = group.size() if group else 1
        self.sequence = sequence

    def enter(self, x: Tensor) -> Tensor:
        if self.name is None:
            return x
        if self.sequence:
            return GatherRows.apply(x, self.count, self.name)
        return CopyToRanks.apply(x, self.name)

    def leave(self, x: Tensor) -> Tensor:
        if self.name is None:
            return x
        if self.sequence:
            return ScatterRows.apply(x, self.count, self.name)
        return SumOverRanks.apply(x, self.name)


class Norm(nn.Module):
    """LayerNorm, or RMSNorm for gated models."""

    def __init__(self, model: Model, width: int = 0) -> None:
        super().__init__()
        width = width or model.width
        self.scale = nn.Parameter(torch.empty(width))
        self.shift = None if model.gated else nn.Parameter(torch.empty(width))
        self.unfused = "norm" in getattr(model, "unfused", "")

    def forward(self, x: Tensor) -> Tensor:
        if self.shift is None and self.unfused:
            exact = x.float()
            exact = exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + 1e-5)
            return exact.to(x.dtype) * self.scale
        # One kernel. A GPU's RMSNorm kernel moves as many bytes; on a CPU PyTorch has none to
        # capture.
        return F.layer_norm(x, x.shape[-1:], self.scale, self.shift)


class Attention(nn.Module):
    """Attention whose heads are divided over the ranks."""

    def __init__(self, model: Transformer, ranks: Ranks, context: Context) -> None:
        super().__init__()
        self.ranks, self.context, self.head_width = ranks, context, model.head
        self.heads = model.heads // ranks.count
        self.kv_heads = max(1, (model.kv_heads or model.heads) // ranks.count)
        self.unfused, self.drop = model.unfused, _DROPPED if model.dropout else 0.0
        rows = (self.heads + 2 * self.kv_heads) * self.head_width
        self.qkv = _linear(model.width, rows)
        self.bias = nn.Parameter(torch.empty(rows)) if _has_biases(model) else None
        self.out = _linear(self.heads * self.head_width, model.width, _has_biases(model))
        self.turns = model.gated  # rotary embeddings turn queries and keys
        self.norms = nn.ModuleList(Norm(model, model.head) for _ in range(2 * model.head_norms))

    def forward(self, x: Tensor) -> Tensor:
        sizes = [n * self.head_width for n in (self.heads, self.kv_heads, self.kv_heads)]
        mixed = self.qkv(self.ranks.enter(x))
        if "attention" in self.unfused:
            mixed = mixed if self.bias is None else mixed + self.bias
            return self.ranks.leave(self.out(self.by_products(mixed)))
        parts = mixed.split(sizes, -1)
        q, k, v = (p.unflatten(-1, (-1, self.head_width)) for p in parts)
        if self.norms:
            q, k = (norm(t) for norm, t in zip(self.norms, (q, k), strict=True))
        if self.turns:
            q, k = self.turned(q), self.turned(k)
        mixed = self.context.attend(q, k, v, self.ranks.sequence)
        return self.ranks.leave(self.out(mixed))

    def by_products(self, mixed: Tensor) -> Tensor:
        """Attention as two batched matrix products with a softmax between them. The sequence is the
        first dimension, and the queries, the key and the value of a head stand together, so that
        heads are batches without a copy (Megatron-LM v2.5, megatron/model/transformer.py)."""
        each = self.heads // self.kv_heads * self.head_width
        parts = mixed.unflatten(-1, (self.kv_heads, -1))
        parts = parts.split([each, self.head_width, self.head_width], -1)
        q, k, v = (p.reshape(*p.shape[:2], -1, self.head_width) for p in parts)
        if self.turns:
            q, k = self.turned(q), self.turned(k)
        if self.heads != self.kv_heads:
            k, v = (t.repeat_interleave(self.heads // self.kv_heads, 2) for t in (k, v))
        q, k, v = (t.flatten(1, 2).transpose(0, 1) for t in (q, k, v))
        scores = torch.bmm(q, k.transpose(1, 2))  # scaled by the product itself
        if "softmax" in self.unfused:
            # Each sequence has a mask of its own, which is there until the backward.
            sizes = mixed.shape[1], 1, *scores.shape[1:]
            past = torch.ones(sizes, dtype=torch.bool, device=scores.device).tril()
            exact = scores.float().unflatten(0, (mixed.shape[1], -1))
            scores = exact.masked_fill(past.logical_not(), -1e4).flatten(0, 1)
        weights = _dropped(torch.softmax(scores, -1).to(v.dtype), self.drop)
        mixed = torch.bmm(weights, v).transpose(0, 1)
        return mixed.reshape(mixed.shape[0], -1, self.heads * self.head_width)

    def turned(self, x: Tensor) -> Tensor:
        """Turn with the position: in one kernel, or op by op, of which nothing is kept either."""
        if "rotary" not in self.unfused:
            return _turned(x)
        cos, sin = (torch.ones(x.shape[-1], dtype=x.dtype, device=x.device) for _ in range(2))
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat([-second, first], -1) * sin


class LatentAttention(Attention):
    """Attention whose queries, and whose keys and values, are made by two thin matrices one after
    the other (DeepSeek's). Each rank has the first of the two whole; the heads of the second are
    divided."""

    def __init__(self, model: Transformer, ranks: Ranks, context: Context) -> None:
        nn.Module.__init__(self)
        self.ranks, self.context, self.model = ranks, context, model
        self.heads = heads = model.heads // ranks.count
        self.q_thin = _linear(model.width, model.q_rank) if model.q_rank else nn.Identity()
        self.q_norm = Norm(model, model.q_rank) if model.q_rank else nn.Identity()
        self.q = _linear(model.q_rank or model.width, heads * model.head)
        self.kv_thin = _linear(model.width, model.kv_rank + model.rope_width)
        self.kv_norm = Norm(model, model.kv_rank)
        self.kv = _linear(model.kv_rank, heads * (model.head_width + model.value_width))
        self.out = _linear(heads * model.value_width, model.width)

    def forward(self, x: Tensor) -> Tensor:
        model, x = self.model, self.ranks.enter(x)
        q = self.q(self.q_norm(self.q_thin(x))).unflatten(-1, (self.heads, model.head))
        thin, turned = self.kv_thin(x).split([model.kv_rank, model.rope_width], -1)
        kv = self.kv(self.kv_norm(thin)).unflatten(-1, (self.heads, -1))
        keys, values = kv.split([model.head_width, model.value_width], -1)
        turned = _turned(turned).unsqueeze(-2).expand(*keys.shape[:-1], model.rope_width)
        keys = torch.cat([keys, turned], -1)
        mixed = self.context.attend(_turned(q), keys, values, self.ranks.sequence)
        return self.ranks.leave(self.out(mixed))


class MLP(nn.Module):
    def __init__(self, model: Transformer, ranks: Ranks, inner: int) -> None:
        super().__init__()
        inner //= ranks.count
        self.ranks, self.model = ranks, model
        biased, apart = _has_biases(model), model.gated and "gate" in model.unfused.split()
        self.gate = _linear(model.width, inner) if apart else None
        self.up = _linear(model.width, inner * (1 + (model.gated and not apart)), biased)
        self.down = _linear(inner, model.width, biased)

    def forward(self, x: Tensor) -> Tensor:
        given = self.ranks.enter(x)
        if self.gate is None:
            return self.ranks.leave(self.down(_act(self.up(given), self.model)))
        # Without shared sequences the gradients of both products' inputs are summed apart.
        again = given if self.ranks.sequence else self.ranks.enter(x)
        return self.ranks.leave(self.down(F.silu(self.gate(given)) * self.up(again)))


class Experts(nn.Module):
    """A mixture of experts of fixed, equal capacity; the experts are divided over the ranks. Each
    expert's matrices are divided over the `sharing` ranks, which gather what comes to all of them,
    and sum what they make of it."""

    def __init__(self, model: Transformer, ranks: Ranks, sharing: Ranks) -> None:
        super().__init__()
        self.model, self.ranks, self.sharing = model, ranks, sharing
        self.held = model.experts // ranks.count
        inner = model.expert_width // sharing.count
        self.router = _linear(model.width, model.experts)
        self.up = nn.Parameter(torch.empty(self.held, model.width, inner * (1 + model.gated)))
        self.down = nn.Parameter(torch.empty(self.held, inner, model.width))

    def forward(self, x: Tensor) -> Tensor:
        model, held = self.model, self.held
        tokens = x.flatten(0, 1)
        rows = max(1, tokens.shape[0] * model.top_k // model.experts)
        weights, chosen = F.softmax(self.router(tokens), dim=-1).topk(model.top_k, dim=-1)
        order = torch.argsort(chosen.flatten(), stable=True)[: model.experts * rows]
        rows = order.shape[0] // model.experts
        order = order[: rows * model.experts]
        there = self.sharing.enter(self.travel(tokens[order // model.top_k], held * rows))
        parts = there.view(-1, held, rows, model.width).transpose(0, 1).flatten(1, 2)
        done = torch.bmm(_act(torch.bmm(parts, self.up), model), self.down)
        flat = done.view(held, -1, rows, model.width).transpose(0, 1).reshape(-1, model.width)
        flat = self.sharing.leave(flat)
        scaled = self.travel(flat, held * rows) * weights.flatten()[order][:, None]
        return torch.zeros_like(tokens).index_add(0, order // model.top_k, scaled).view_as(x)

    def travel(self, rows: Tensor, each: int) -> Tensor:
        if self.ranks.name is None:
            return rows
        even = [each] * self.ranks.count
        return AllToAll.apply(rows, even, even, self.ranks.name)


class Block(nn.Module):
    def __init__(
        self,
        model: Transformer,
        tensor: Ranks,
        expert: Ranks,
        has_experts: bool,
        context: Context | None = None,
        shares_experts: bool = False,
    ) -> None:
        super().__init__()
        sharing = tensor if shares_experts else Ranks(None)
        attention = LatentAttention if model.kv_rank else Attention
        self.attn_norm, self.attn = Norm(model), attention(model, tensor, context or Context(None))
        self.norm = Norm(model)
        self.kind = "moe" if has_experts else "mlp"  # by these names Megatron recomputes them
        rest = Experts(model, expert, sharing) if has_experts else MLP(model, tensor, model.ffn)
        self.add_module(self.kind, rest)
        shared = has_experts and model.shared_width
        self.shared = MLP(model, tensor, model.shared_width) if shared else None
        self.post = nn.ModuleList(Norm(model) for _ in range(2 * model.post_norms))
        self.drop = _DROPPED if model.dropout else 0.0

    def forward(self, x: Tensor) -> Tensor:
        first, last = self.post or (nn.Identity(), nn.Identity())
        x = x + _dropped(first(self.attn(self.attn_norm(x))), self.drop)
        given = self.norm(x)
        made = self.get_submodule(self.kind)(given)
        made = made if self.shared is None else made + self.shared(given)
        return x + _dropped(last(made), self.drop)


class Blocks(nn.Module):
    """The first blocks of the model; the last of each period has the experts."""

    def __init__(
        self,
        model: Transformer,
        count: int,
        tensor: ProcessGroup | None,
        expert: ProcessGroup | None,
        sequence: bool = False,
        context: Context | None = None,
        shares_experts: bool = False,
    ) -> None:
        super().__init__()
        period, ranks, held = model.period, Ranks(tensor, sequence), Ranks(expert)
        self.blocks = nn.ModuleList(
            Block(
                model,
                ranks,
                held,
                bool(model.experts) and i % period == period - 1,
                context,
                shares_experts,
            )
            for i in range(count)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Head(nn.Module):
    """The last norm, a rank's part of the vocabulary's scores, and the loss."""

    def __init__(self, model: Model, tensor: ProcessGroup | None, sequence: bool = False) -> None:
        super().__init__()
        self.norm, self.tensor = Norm(model), Ranks(tensor, sequence)
        self.unfused = getattr(model, "unfused", "")
        self.scores = _linear(model.width, model.vocab // self.tensor.count)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.scores(self.tensor.enter(self.norm(x))).flatten(0, 1)
        wanted = torch.zeros(scores.shape[0], dtype=torch.long, device=scores.device)
        if "scores" in self.unfused:
            return self.of_all_words(scores, wanted)
        if "replaced" in self.unfused:
            return LossInPlace.apply(scores, wanted, self.tensor.name)
        if "loss" in self.unfused:
            return LossByOps.apply(scores.float(), wanted, self.tensor.name).mean()
        return F.cross_entropy(scores.float(), wanted)

    def of_all_words(self, scores: Tensor, wanted: Tensor) -> Tensor:
        """The loss where every rank gathers the scores of all words, and how many are right."""
        if self.tensor.name is not None:
            scores = GatherColumns.apply(scores, self.tensor.count, self.tensor.name)
        exact = scores.float()
        right = (exact.argmax(-1) == wanted).float().mean()
        return F.cross_entropy(exact, wanted) + 0.0 * right


class GatherColumns(torch.autograd.Function):
    """Every rank gets the columns of all; of a gradient that all ranks have alike it takes its own,
    which are the first ones of the first rank: modules are captured as its."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: int, group: str) -> Tensor:
        ctx.columns = x.shape[-1]
        parts = gather(x, ranks, group).unflatten(0, (ranks, -1))
        return parts.movedim(0, -2).flatten(-2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad[..., : ctx.columns].contiguous(), None, None


class LossInPlace(torch.autograd.Function):
    """Stand for Transformer Engine's fused cross entropy: one kernel reads the scores, a second one
    writes their gradient in their place, and the backward scales it there. Ops here have results of
    their own; `units.in_place` puts them where they would be."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, wanted: Tensor, group: str | None) -> Tensor:
        found = scores.amax(-1, keepdim=True)
        found = found if group is None else all_reduce(found, group)
        ctx.save_for_backward(scores * found)
        return found.float().mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (weights,) = ctx.saved_tensors
        return weights * grad, None, None


class LossByOps(torch.autograd.Function):
    """Cross entropy of scores that are divided over ranks, op by op, as Megatron runs it without a
    fused kernel: the softmax is kept, and becomes the gradient in place."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, wanted: Tensor, group: str | None) -> Tensor:
        most = scores.max(-1, keepdim=True).values
        # moves as many bytes as a maximum
        most = most if group is None else all_reduce(most, group)
        scores = scores - most
        found = scores.gather(1, wanted[:, None])
        weights = scores.exp()
        total = weights.sum(-1, keepdim=True)
        if group is not None:
            found, total = all_reduce(found, group), all_reduce(total, group)
        weights = weights / total
        ctx.save_for_backward(weights, wanted)
        return (total.log() - found).flatten()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        weights, wanted = ctx.saved_tensors
        given = torch.full_like(wanted[:, None], -1, dtype=weights.dtype)
        return weights.scatter_add(1, wanted[:, None], given) * grad[:, None], None, None


def _linear(takes: int, gives: int, bias: bool = False) -> nn.Linear:
    return nn.Linear(takes, gives, bias=bias)


def _has_biases(model: Transformer) -> bool:
    """Do biases take kernels of their own? What comes behind most of them adds them, too, but each
    has a gradient that is a sum over all words."""
    return "bias" in model.unfused.split() and not model.gated


def _dropped(x: Tensor, part: float) -> Tensor:
    return F.dropout(x, part) if part else x


def _turned(x: Tensor) -> Tensor:
    """Stand for a rotary embedding's kernel: it moves the same bytes, and nothing is kept."""
    return x.neg()


def _act(x: Tensor, model: Transformer) -> Tensor:
    if not model.gated:
        return F.gelu(x)
    if model.fused_gate:
        return F.glu(x)  # stands for SwiGLU's kernels: they move the same bytes, and keep the same
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up
