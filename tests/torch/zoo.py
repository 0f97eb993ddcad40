"""Small models, one for each thing that a training graph may hold. Each fits a second of work."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from examples.gpt.model import GPT, GPTConfig
from overlapc.emulate import Link, init_fabric
from overlapc.nn.layers import CopyToRanks, SumOverRanks
from tests.torch.exact import Batch, randn
from tests.torch.names import gather_single, scatter_single

WIDTH, ROWS = 16, 24


class MLP(nn.Module):
    """A residual stack: the body of most kinds below."""

    def __init__(self, layers: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(WIDTH),
                nn.Linear(WIDTH, 3 * WIDTH),
                nn.GELU(),
                nn.Dropout(dropout),
                nn.Linear(3 * WIDTH, WIDTH),
            )
            for _ in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


class Wrapped(nn.Module):
    """A body and a function around it: what most kinds differ in."""

    def __init__(self, call: Callable[..., Any], layers: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.body = MLP(layers, dropout)
        self.call = call

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(self.body, *args, **kwargs)


class TensorParallel(nn.Module):
    """One rank's part of an MLP; the collectives are functional ones, or Megatron's f and g."""

    def __init__(self, functions: bool) -> None:
        super().__init__()
        self.group, self.functions = dist.group.WORLD.group_name, functions
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))

    def leave(self, partial_sum: Tensor) -> Tensor:
        if self.functions:
            return SumOverRanks.apply(partial_sum, self.group)
        # torch's own, with their own autograd
        return gather_single(scatter_single(partial_sum, "sum", 0, self.group), 0, self.group)

    def forward(self, x: Tensor) -> Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            h = self.norm(x)
            if self.functions:
                h = CopyToRanks.apply(h, self.group)
            x = x + F.dropout(self.leave(down(F.gelu(up(h)))), 0.2)
        return x


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, WIDTH)
        self.body = MLP()
        self.head = nn.Linear(WIDTH, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.body(self.embed(tokens))), tokens)


class Convolutions(nn.Module):
    """Batch norm changes its buffers in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            *(
                nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
                for _ in range(2)
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class Counting(nn.Module):
    """A buffer that is read, then changed: recomputing must not read what it was changed to."""

    def __init__(self) -> None:
        super().__init__()
        self.body = MLP(1)
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(x + self.scale)
        x = self.body(torch.sigmoid(x * 2 + self.scale.cos()))
        self.scale.mul_(1.5)
        return x.tanh() * 3


class InPlaceOnInput(nn.Module):
    """Changes a tensor the caller passed in."""

    def __init__(self) -> None:
        super().__init__()
        self.body = MLP(1)

    def forward(self, x: Tensor, state: Tensor) -> Tensor:
        out = self.body(torch.relu(x + state).exp().sigmoid())
        state.add_(1.0)
        return out.tanh() + state


def nested(body: nn.Module, x: Tensor, *, scale: float, extra: dict[str, Tensor]) -> Any:
    hidden = body(x * scale + extra["shift"])
    return {"main": hidden, "pair": (hidden.sum(-1), None, 3), "kept": [extra["shift"], "name"]}


@dataclass
class Answer:
    hidden: Tensor
    note: str


def dataclass_out(body: nn.Module, x: Tensor) -> Answer:
    return Answer(body(x), "note")


def in_place(body: nn.Module, x: Tensor) -> Tensor:
    x = body(x.clone().add_(1.0))
    x = F.relu_(x * 2)
    x = x * 1.5
    x[:, ::2] *= 0.5
    x.mul_(2).add_(x.detach().mean())
    return (torch.sigmoid(body(x)) * 2).mul_(3)


def aliases(body: nn.Module, x: Tensor) -> Any:
    """AOTAutograd adds up the gradients that reach an input by three roads in an order of its
    own; by two there is but one order."""
    hidden = body(x * 2)
    return hidden, hidden.view(-1), hidden.t(), hidden[1:], x.view(-1)


def twice(body: nn.Module, x: Tensor) -> Any:
    hidden = body(x)
    return hidden, hidden, (hidden * hidden).sum(), x * hidden


def checkpointed(body: nn.Module, x: Tensor) -> Tensor:
    for layer in body.layers:
        x = x + checkpoint(layer, x, use_reentrant=False)
    return x.tanh()


def mixed_checkpoints(body: nn.Module, x: Tensor) -> Tensor:
    x = checkpoint(body, x, use_reentrant=False)
    return body(F.dropout(x, 0.1)).tanh()


def breaks(body: nn.Module, x: Tensor) -> Tensor:
    x = body(x).tanh()
    torch._dynamo.graph_break()
    return body(x).sigmoid() * 2


def randoms(body: nn.Module, x: Tensor) -> Tensor:
    x = x + torch.randn_like(x) * 0.1
    x = body(F.dropout(x, 0.2)) * torch.bernoulli(torch.full_like(x, 0.7))
    return torch.where(torch.rand_like(x) < 0.5, F.rrelu(x, training=True), x.sin())


def drawn_early(body: nn.Module, x: Tensor) -> Tensor:
    """Random numbers are drawn in the order of the program, not of their use, used or not."""
    one = F.dropout(x, 0.5)
    F.dropout(x, 0.5)
    two = F.dropout(x.sin(), 0.5)
    return body(two.exp()) + body(one.cos() * 2).tanh()


def attention(body: nn.Module, x: Tensor) -> Tensor:
    q, k, v = x.view(2, 3, 4, -1).chunk(3, dim=1)
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    scores = torch.softmax(q @ k.transpose(-1, -2), -1) @ v
    return body(torch.cat([mixed, scores, q], 1).reshape(-1, WIDTH))


def autocast(body: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast(x.device.type, torch.bfloat16):
        return body(x)


def frozen() -> nn.Module:
    body = MLP(3)
    for parameter in body.layers[0].parameters():
        parameter.requires_grad_(False)
    body.layers[2][1].bias.requires_grad_(False)
    return body


def unused() -> nn.Module:
    body = Wrapped(lambda b, x: b(x).tanh())
    body.spare = nn.Linear(3, 3)
    return body


def conditional(body: nn.Module, x: Tensor) -> Tensor:
    """Random numbers are drawn inside a branch: it may not run a second time."""

    def left(x: Tensor) -> Tensor:
        return F.dropout(x.sin(), 0.5) * 2

    def right(x: Tensor) -> Tensor:
        return F.dropout(x.cos(), 0.3) + 1

    chosen = torch.cond(x.sum() > 0, left, right, (body(x),))
    return F.dropout(body(chosen.exp()), 0.1).tanh()


def several_things(body: nn.Module, x: Tensor) -> Tensor:
    """Indexing, scans, sorting, convolution, linear algebra."""
    top, where = body(x).topk(5, dim=1)
    picked = x.gather(1, where).cumsum(1) * top
    conv = F.conv1d(picked[:, None], picked.new_ones(2, 1, 3), padding=1).amax(1)
    spread = torch.zeros_like(x).index_add(1, where[0], conv.sigmoid())
    mixed = torch.einsum("ij,kj->ik", spread.tanh(), x).logsumexp(0)
    return F.pad(mixed, (1, 2)).masked_fill(F.pad(mixed, (1, 2)) > 4, 0.5).square().roll(3)


class Parametrized(nn.Module):
    """A weight made from two parameters, and one normalised by a buffer that each call changes."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.other = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.other(F.gelu(self.one(x))).tanh()


class Encoder(nn.Module):
    """torch's own transformer layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.view(2, -1, WIDTH))


def on_fabric() -> contextlib.ExitStack:
    """This process becomes one of four ranks."""
    init_fabric(Link(alpha_s=0.0, bytes_per_s=1e13), world_size=4, rank=1)
    stack = contextlib.ExitStack()
    stack.callback(dist.destroy_process_group)
    return stack


def tokens(*size: int, seed: int = 0, below: int = 20) -> Tensor:
    return torch.randint(0, below, size, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Kind:
    """`make` builds the model (seeded by the test); `graphs` is how many it is compiled to."""

    make: Callable[[], nn.Module]
    batches: Callable[[], list[Batch]]
    world: Callable[[], Any] = contextlib.nullcontext
    dynamic: bool | None = None
    graphs: int = 1


def rows(requires_grad: bool = False, *counts: int) -> list[Batch]:
    return [
        Batch((randn(count, WIDTH, seed=i, requires_grad=requires_grad),))
        for i, count in enumerate(counts or (ROWS, ROWS))
    ]


x_only = partial(rows, False)
x_grad = partial(rows, True)


def gpt(**options: Any) -> Callable[[], nn.Module]:
    sizes = {"vocab": 20, "layers": 2, "width": WIDTH, "heads": 4, "max_seq": 8}
    config = GPTConfig(**sizes | options)
    return lambda: GPT(config, dist.group.WORLD if dist.is_initialized() else None)


def gpt_batches() -> list[Batch]:
    return [Batch((tokens(2, 8, seed=i), tokens(2, 8, seed=i + 9))) for i in range(2)]


def with_state() -> list[Batch]:
    return [Batch((randn(ROWS, WIDTH, requires_grad=True), randn(ROWS, WIDTH, seed=3)))] * 2


def nested_inputs() -> list[Batch]:
    return [
        Batch(
            (randn(ROWS, WIDTH, requires_grad=True),),
            {"scale": 0.5, "extra": {"shift": randn(WIDTH, seed=i, requires_grad=True)}},
        )
        for i in range(2)
    ]


KINDS: dict[str, Kind] = {
    "plain": Kind(MLP, x_grad),
    "dropout": Kind(partial(MLP, 2, 0.3), x_grad),
    "randoms": Kind(partial(Wrapped, randoms), x_grad),
    "drawn early": Kind(partial(Wrapped, drawn_early), x_grad),
    "functional collectives": Kind(partial(TensorParallel, False), x_grad, on_fabric),
    "f and g": Kind(partial(TensorParallel, True), x_grad, on_fabric),
    "gpt": Kind(gpt(dropout=0.1), gpt_batches),
    "gpt on a fabric": Kind(gpt(dropout=0.1, tie_embeddings=True), gpt_batches, on_fabric),
    "attention": Kind(partial(Wrapped, attention), x_grad),
    "tied": Kind(Tied, lambda: [Batch((tokens(ROWS, seed=i),)) for i in range(2)]),
    "batch norm": Kind(
        Convolutions, lambda: [Batch((randn(3, 4, 6, 6, seed=i),)) for i in range(3)]
    ),
    "buffer changed after reading": Kind(Counting, x_grad),
    "input changed in place": Kind(InPlaceOnInput, with_state),
    "frozen": Kind(frozen, x_only),
    "frozen, input gradient": Kind(frozen, x_grad),
    "unused parameter": Kind(unused, x_only),
    "bf16 autocast inside": Kind(partial(Wrapped, autocast), x_grad),
    "bf16 weights": Kind(
        lambda: MLP().bfloat16(), lambda: [Batch((randn(ROWS, WIDTH).bfloat16().requires_grad_(),))]
    ),
    "nested in and out": Kind(partial(Wrapped, nested), nested_inputs),
    "dataclass out": Kind(partial(Wrapped, dataclass_out), x_grad),
    "in-place": Kind(partial(Wrapped, in_place), x_grad),
    "outputs alias": Kind(partial(Wrapped, aliases), x_grad),
    "outputs used twice": Kind(partial(Wrapped, twice), x_grad),
    "checkpoint": Kind(partial(Wrapped, checkpointed, 2, 0.2), x_grad),
    "checkpoint beside plain": Kind(partial(Wrapped, mixed_checkpoints, 1, 0.2), x_grad),
    "graph breaks": Kind(partial(Wrapped, breaks), x_grad, graphs=2),
    "several things": Kind(partial(Wrapped, several_things), x_grad),
    "parametrized": Kind(Parametrized, x_grad),
    "transformer layer": Kind(Encoder, x_grad),
    "branches": Kind(partial(Wrapped, conditional), x_grad),
    "several batch sizes": Kind(
        partial(MLP, 2, 0.1), lambda: rows(True, 24, 8, 8, 13, 24), graphs=2
    ),
    "dynamic batch sizes": Kind(partial(MLP, 2, 0.1), lambda: rows(True, 24, 8, 31), dynamic=True),
}
