"""Full recompute is that of every layer: what plans keep is what torch.utils.checkpoint keeps."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from examples.moe.model import MoEConfig, MoEGPT
from overlapc.api import capture
from overlapc.core.ir import Plan, Problem
from overlapc.core.simulate import saved_bytes, simulate
from overlapc.planning.problem import formulate
from overlapc.profiler.estimate import estimate
from overlapc.profiler.hardware import load_hardware
from overlapc.search.captures import UnitKey
from overlapc.search.groups import fake_groups
from overlapc.search.presets import find_model
from overlapc.search.units import make_unit
from overlapc.solvers import FIELD, solve
from overlapc.solvers.choose.blocks import layers

WIDTH, HEADS, SEQ, WORDS, LAYERS = 48, 4, 24, 40, 5


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, tables: tuple[Tensor, ...]) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        mask = None
        if tables:
            cos, sin, mask = tables
            q, k = q * cos + q.flip(-1) * sin, k * cos + k.flip(-1) * sin
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Sequential):
    def __init__(self, width: int = 4 * WIDTH) -> None:
        super().__init__(nn.Linear(WIDTH, width), nn.GELU(), nn.Linear(width, WIDTH))


class PreNorm(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.attention, self.mlp = Attention(), self.rest(number)

    def rest(self, number: int) -> nn.Module:
        return MLP()

    def forward(self, x: Tensor, *tables: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x), tables)
        return x + self.mlp(self.norms[1](x))


class Dropped(PreNorm):
    def forward(self, x: Tensor, *tables: Tensor) -> Tensor:
        x = x + F.dropout(self.attention(self.norms[0](x), tables), 0.1)
        return x + F.dropout(self.mlp(self.norms[1](x)), 0.1)


class PostNorm(PreNorm):
    def forward(self, x: Tensor, *tables: Tensor) -> Tensor:
        x = self.norms[0](x + self.attention(x, tables))
        return self.norms[1](x + self.mlp(x))


class Parallel(PreNorm):
    def forward(self, x: Tensor, *tables: Tensor) -> Tensor:
        y = self.norms[0](x)
        return x + self.attention(y, tables) + self.mlp(y)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(MLP(WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        shares = self.router(x).softmax(-1)
        first, second = (e(x) for e in self.experts)
        return first * shares[..., :1] + second * shares[..., 1:]


class EveryOther(PreNorm):
    def rest(self, number: int) -> nn.Module:
        return Experts() if number % 2 else MLP()


class AllButFirst(PreNorm):
    def rest(self, number: int) -> nn.Module:
        return Experts() if number else MLP()


class OnlyLast(PreNorm):
    def rest(self, number: int) -> nn.Module:
        return Experts() if number == LAYERS - 1 else MLP()


class NoResidual(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.mlp, self.norm = MLP(), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, *tables: Tensor) -> Tensor:
        return self.norm(self.mlp(x))


class WithLoss(PreNorm):
    """Hands on a loss of its own beside the tokens."""

    def forward(self, x: Tensor, *tables: Tensor) -> Tensor:
        *tables, loss = tables
        x = super().forward(x, *tables)
        return x, loss + x.square().mean()


def _plainly(block: nn.Module, *inputs: Tensor) -> Any:
    return block(*inputs)


class Stack(nn.Module):
    """Blocks that a graph's input enters, or an embedding, then a head behind them."""

    def __init__(self, block: type[nn.Module], count: int, ends: bool, tables: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block(i) for i in range(count))
        self.words = nn.Embedding(WORDS, WIDTH) if ends else None
        self.norm, self.scores = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)
        self.tables, self.run = tables, _plainly

    def forward(self, x: Tensor) -> Tensor:
        if self.words is not None:
            x = self.words(x)
        tables: tuple[Tensor, ...] = ()
        if self.tables:
            angles = torch.arange(SEQ)[:, None] / 10.0 ** torch.arange(WIDTH // HEADS)
            tables = angles.cos(), angles.sin(), torch.zeros(SEQ, SEQ).triu(1)
        loss = x.new_zeros(())
        for block in self.blocks:
            more = (*tables, loss) if isinstance(block, WithLoss) else tables
            x = self.run(block, x, *more)
            if isinstance(block, WithLoss):
                x, loss = x
        if self.words is None:
            return x * loss
        return (
            F.cross_entropy(self.scores(self.norm(x)).flatten(0, 1), torch.zeros(2 * SEQ).long())
            + loss
        )


def example(ends: bool) -> Tensor:
    torch.manual_seed(0)
    if ends:
        return torch.randint(WORDS, (2, SEQ))
    return torch.randn(2, SEQ, WIDTH, requires_grad=True)


def checkpoint_keeps(model: Stack, x: Tensor) -> int:
    """Bytes that eager PyTorch holds between forward and backward, each block checkpointed."""
    held: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        held.append(tensor)
        return tensor

    def checkpointed(block: nn.Module, *inputs: Tensor) -> Any:
        held.extend(inputs)
        return checkpoint(block, *inputs, use_reentrant=False)

    model.run = checkpointed
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        result = model(x)
    there = {t.untyped_storage().data_ptr() for t in (*model.parameters(), x, result)}
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in held}
    model.run = _plainly
    return sum(s.nbytes() for at, s in storages.items() if at not in there)


def problem_of(model: nn.Module, x: Tensor) -> Problem:
    captured = capture(model, x)
    return formulate(captured.trace, estimate(captured, load_hardware("a100-sxm-80")))


def run_again(problem: Problem, plan: Plan, target: str = "gelu") -> int:
    return sum(f".{target}." in problem.trace.op[name].signature for name in plan.recomputed)


def gelus(problem: Problem) -> int:
    return sum(op.is_forward and ".gelu." in op.signature for op in problem.trace.ops)


BLOCKS = [
    PreNorm,
    Dropped,
    PostNorm,
    Parallel,
    EveryOther,
    AllButFirst,
    OnlyLast,
    NoResidual,
    WithLoss,
]


@pytest.mark.parametrize(
    ("ends", "tables"),
    [
        pytest.param(False, False, id="input"),
        pytest.param(True, True, id="embedding, tables"),
        pytest.param(False, True, id="input, tables", marks=pytest.mark.slow),
        pytest.param(True, False, id="embedding", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("block", BLOCKS)
def test_full_keeps_what_checkpoint_keeps(block, ends, tables):
    model, x = Stack(block, LAYERS, ends, tables and block is not NoResidual), example(ends)
    problem = problem_of(model, x)
    plan = FIELD["full"](problem)
    assert len(layers(problem.trace)) == LAYERS
    assert run_again(problem, plan) == gelus(problem)
    assert saved_bytes(problem, plan.saved) == pytest.approx(checkpoint_keeps(model, x), rel=0.01)


@pytest.mark.parametrize("ends", [False, True], ids=["input", "embedding"])
@pytest.mark.parametrize("count", [2, 3])
def test_two_layers_are_enough_to_know_them(count, ends):
    model, x = Stack(PreNorm, count, ends, tables=False), example(ends)
    problem = problem_of(model, x)
    plan = FIELD["full"](problem)
    assert run_again(problem, plan) == count
    assert saved_bytes(problem, plan.saved) == pytest.approx(checkpoint_keeps(model, x), rel=0.01)


def within_ever_less(problem: Problem, solver: str) -> list[Plan]:
    """The baseline's plans, each in just less than the one before takes."""
    plans: list[Plan] = []
    while (plan := FIELD[solver](problem)).saved not in [other.saved for other in plans]:
        plans.append(plan)
        problem = replace(problem, budget_bytes=simulate(problem, plan).peak_bytes - 1)
    return plans


@pytest.mark.parametrize("ends", [False, True], ids=["input", "embedding"])
@pytest.mark.parametrize("block", [PreNorm, EveryOther])
def test_megatrons_block_recomputes_the_first_layers(block, ends):
    problem = problem_of(Stack(block, LAYERS, ends, tables=False), example(ends))
    spans = layers(problem.trace)
    counts = []
    for plan in within_ever_less(problem, "block"):
        where = {problem.trace.ops.index(problem.trace.op[name]) for name in plan.recomputed}
        again = [bool(where.intersection(span)) for span in spans]
        assert again == sorted(again, reverse=True)
        counts.append(sum(again))
    assert counts[0] == 0
    assert counts == sorted(counts)
    assert counts[-1] == LAYERS


@pytest.mark.parametrize("ends", [False, True], ids=["input", "embedding"])
@pytest.mark.parametrize("block", [PreNorm, EveryOther])
def test_megatrons_uniform_keeps_the_inputs_of_groups_of_layers(block, ends):
    problem = problem_of(Stack(block, LAYERS, ends, tables=False), example(ends))
    problem = replace(problem, in_flight=20, budget_bytes=None)  # what is kept decides
    full = saved_bytes(problem, FIELD["full"](problem).saved)
    width = 2 * SEQ * WIDTH * 4
    plans = within_ever_less(problem, "uniform")
    fewer = [(full - saved_bytes(problem, plan.saved)) // width for plan in plans]
    assert fewer == [LAYERS - -(-LAYERS // group) for group in (1, 2, 4)]
    assert all(run_again(problem, plan) == gelus(problem) for plan in plans)


@pytest.mark.parametrize("name", ["gpt-7b", "llama-7b", "deepseek-like", "lancet-s", "own"])
@pytest.mark.parametrize("tensor", [1, 2])
def test_every_layer_of_a_search_is_recomputed(name, tensor):
    model = find_model("examples.gpt.model:for_search" if name == "own" else name)
    sequence = model.shares_sequence(tensor)
    experts = 8 if model.experts else 1
    unit = make_unit(UnitKey(model, "h100-sxm", 16, tensor, experts, 1, sequence))
    plan = FIELD["full"](unit.problem)
    assert len(layers(unit.problem.trace)) == unit.blocks
    act = "silu" if model.gated else "gelu"
    assert run_again(unit.problem, plan, act) == unit.blocks
    # The first layer's input is the graph's own, which is counted by those who hand it over.
    assert saved_bytes(unit.problem, plan.saved) == (unit.blocks - 1) * unit.boundary_bytes


@pytest.mark.parametrize("ends", [False, True], ids=["input", "embedding"])
def test_heu_plans_blocks_of_the_first_to_the_last(ends):
    problem = problem_of(Stack(PreNorm, LAYERS, ends, tables=False), example(ends))
    small, most = (simulate(problem, FIELD[name](problem)).peak_bytes for name in ("full", "none"))
    limited = replace(problem, budget_bytes=(small + most) // 2)
    heu = simulate(limited, solve(limited, "heu"))
    assert heu.peak_bytes <= limited.budget_bytes
    assert heu.step_ns < simulate(problem, FIELD["full"](problem)).step_ns


def test_experts_of_data_dependent_sizes_are_layers():
    config = MoEConfig(layers=3, width=32, heads=4, experts=4, top_k=2, expert_width=64)
    with fake_groups(2, 2, 1) as (group, *_):
        tokens = torch.zeros(2, 16, dtype=torch.long)
        captured = capture(MoEGPT(config, group), tokens, tokens)
    spans = layers(captured.trace)
    assert len(spans) == config.layers
    assert len({len(span) for span in spans}) == 1


@pytest.mark.parametrize("block", [PreNorm, OnlyLast])
def test_one_layer_is_no_repetition_whatever_repeats_in_it(block, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "LAYERS", 1)
    problem = problem_of(Stack(block, 1, True, tables=False), example(True))
    assert len(layers(problem.trace)) == 1
    assert run_again(problem, FIELD["full"](problem)) == gelus(problem)
