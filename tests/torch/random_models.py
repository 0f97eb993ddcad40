"""Random small models: a list of steps, each an op on tensors made before, is the whole model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from overlapc.nn.layers import CopyToRanks, GatherRows, ScatterRows, SumOverRanks
from tests.torch.names import gather_single, scatter_single

ROWS, WIDTH = 8, 16


@dataclass(frozen=True)
class Step:
    """`op` reads what steps `a` and `b` made (counted modulo what there is); `n` is its choice."""

    op: str
    a: int
    b: int
    n: int


@dataclass(frozen=True)
class Recipe:
    steps: tuple[Step, ...]
    outputs: tuple[int, ...]
    frozen: tuple[int, ...] = ()  # weights that need no gradient
    input_grad: bool = True
    ranks: int = 1


class RandomModel(nn.Module):
    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe
        torch.manual_seed(0)
        self.weights = nn.ParameterList(torch.randn(WIDTH, WIDTH) * 0.2 for _ in range(3))
        self.biases = nn.ParameterList(torch.randn(WIDTH) * 0.2 for _ in range(3))
        self.register_buffer("seen", torch.zeros(WIDTH))
        for index in recipe.frozen:
            self.weights[index % 3].requires_grad_(False)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        made = [x]
        for step in self.recipe.steps:
            a, b = made[step.a % len(made)], made[step.b % len(made)]
            made.append(OPS[step.op](self, a, b, step.n))
        # Not the input itself: AOTAutograd adds up what reaches it outside and inside the graph
        # in an order of its own.
        return tuple(made[max(1, len(made) - 1 - place)] for place in self.recipe.outputs)

    def weight(self, n: int) -> Tensor:
        return self.weights[n % 3]


def transposed(m: RandomModel, a: Tensor, b: Tensor, n: int) -> Tensor:
    return a.view(ROWS, 4, 4).transpose(1, 2).reshape(ROWS, WIDTH)


def permuted(m: RandomModel, a: Tensor, b: Tensor, n: int) -> Tensor:
    return torch.cat([a.chunk(2, n % 2)[1], b.chunk(2, n % 2)[0]], n % 2)


def in_place(m: RandomModel, a: Tensor, b: Tensor, n: int) -> Tensor:
    made = a * 1.5
    made.add_(b).relu_() if n % 2 else made.mul_(0.5)
    return made


def in_place_on_view(m: RandomModel, a: Tensor, b: Tensor, n: int) -> Tensor:
    made = a.clone()
    made[:, ::2].mul_(0.5)
    made[n % ROWS] = b[0]
    return made


def changes_buffer(m: RandomModel, a: Tensor, b: Tensor, n: int) -> Tensor:
    made = torch.sigmoid(a + m.seen)
    with torch.no_grad():
        m.seen.mul_(0.5).add_(b.mean(0))
    return made.tanh()


def attention(m: RandomModel, a: Tensor, b: Tensor, n: int) -> Tensor:
    q, k, v = (t.view(1, ROWS, 2, 8).transpose(1, 2) for t in (a, b, torch.roll(a, 1, 0)))
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=bool(n % 2))
    return mixed.transpose(1, 2).reshape(ROWS, WIDTH)


def half(m: RandomModel, a: Tensor, b: Tensor, n: int) -> Tensor:
    return F.linear(a.bfloat16(), m.weight(n).bfloat16()).float()


def recomputed_by_user(m: RandomModel, a: Tensor, b: Tensor, n: int) -> Tensor:
    def inner(x: Tensor) -> Tensor:
        return F.dropout(F.gelu(F.linear(x, m.weight(n))), 0.2)

    return checkpoint(inner, a, use_reentrant=False)


def parallel(m: RandomModel, a: Tensor, b: Tensor, n: int) -> Tensor:
    if m.recipe.ranks == 1:
        return F.linear(F.gelu(F.linear(a, m.weight(n))), m.weight(n + 1))
    group = dist.group.WORLD.group_name
    inside = F.gelu(F.linear(CopyToRanks.apply(a, group), m.weight(n)))
    return SumOverRanks.apply(F.linear(inside, m.weight(n + 1)), group) / m.recipe.ranks


def gathered(m: RandomModel, a: Tensor, b: Tensor, n: int) -> Tensor:
    if m.recipe.ranks == 1:
        return a + b
    group = dist.group.WORLD.group_name
    if n % 2:
        mine = ScatterRows.apply(a, m.recipe.ranks, group)
        return GatherRows.apply(mine.tanh(), m.recipe.ranks, group)
    return gather_single(scatter_single(a, "sum", 0, group).tanh(), 0, group)


def indexed(m: RandomModel, a: Tensor, b: Tensor, n: int) -> Tensor:
    order = torch.arange(ROWS).flip(0) if n % 2 else torch.tensor([0, 0, 1, 2, 3, 5, 5, 7])
    return a[order] + b.index_select(0, order).narrow(1, n % WIDTH, 1)


OPS: dict[str, Callable[[RandomModel, Tensor, Tensor, int], Tensor]] = {
    "linear": lambda m, a, b, n: F.linear(a, m.weight(n), m.biases[n % 3]),
    "product": lambda m, a, b, n: (a @ b.t() / 16).tanh() @ m.weight(n)[:ROWS],
    "gelu": lambda m, a, b, n: F.gelu(a),
    "relu": lambda m, a, b, n: F.relu(a) - 0.1,
    "tanh": lambda m, a, b, n: torch.tanh(a),
    "exp": lambda m, a, b, n: torch.exp(-a.square()),
    "add": lambda m, a, b, n: a + b,
    "times": lambda m, a, b, n: torch.tanh(a) * b,
    "softmax": lambda m, a, b, n: torch.softmax(a, n % 2),
    "layer_norm": lambda m, a, b, n: F.layer_norm(a, [WIDTH], m.weight(n)[0], m.biases[n % 3]),
    "dropout": lambda m, a, b, n: F.dropout(a, 0.1 + 0.1 * (n % 3)),
    "noise": lambda m, a, b, n: a + torch.rand_like(b) * 0.1,
    "transposed": transposed,
    "permuted": permuted,
    "expanded": lambda m, a, b, n: a[n % ROWS].expand(ROWS, WIDTH) * 0.5,
    "reduced": lambda m, a, b, n: a - a.sum(n % 2, keepdim=True) * 0.1,
    "where": lambda m, a, b, n: torch.where(a > b, a, b * 0.5),
    "indexed": indexed,
    "scanned": lambda m, a, b, n: a.cumsum(1) * 0.2,
    "sorted": lambda m, a, b, n: a.sort(1).values,
    "in_place": in_place,
    "in_place_on_view": in_place_on_view,
    "changes_buffer": changes_buffer,
    "attention": attention,
    "half": half,
    "recomputed_by_user": recomputed_by_user,
    "parallel": parallel,
    "gathered": gathered,
}


def recipes(max_steps: int = 12, ranks: tuple[int, ...] = (4, 1, 4)) -> st.SearchStrategy[Recipe]:
    # Steps mostly read what was made last: else most of what is drawn would be dead code.
    recent = st.sampled_from([-1, -1, -1, -2, -2, -3, 0, 1])
    ops = [*sorted(OPS), "parallel", "parallel", "gathered", "dropout"]
    step = st.builds(Step, st.sampled_from(ops), recent, recent, st.integers(0, 8))
    return st.builds(
        Recipe,
        steps=st.lists(step, min_size=3, max_size=max_steps).map(tuple),
        outputs=st.lists(st.sampled_from([0, 0, 0, 1, 2, 4]), min_size=1, max_size=3).map(tuple),
        frozen=st.sampled_from([(), (), (), (0,), (0, 1)]),
        input_grad=st.sampled_from([True, True, False]),
        ranks=st.sampled_from(ranks),
    )
