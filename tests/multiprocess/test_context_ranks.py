"""Attention of divided sequences is that of whole ones: the search's own modules, on gloo ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import overlapc
from overlapc.search.frameworks.context import Context
from overlapc.search.models.modules import Blocks
from overlapc.search.models.transformer import Transformer
from tests.multiprocess.spawn import run_ranks

pytestmark = pytest.mark.multiprocess

GROUPED = Transformer(
    "grouped", layers=2, width=24, heads=6, ffn=32, vocab=32, seq=24, kv_heads=6, gated=True
)
FEW_KEYS = replace(GROUPED, heads=4, width=32, kv_heads=2)
LATENT = replace(GROUPED, kv_heads=0, head_width=4, kv_rank=8, rope_width=2, value_width=4)
EXACT = {"rtol": 1e-11, "atol": 1e-11}  # of float64: sums in another order


def blocks(model: Transformer, context: Context | None) -> nn.Module:
    torch.manual_seed(0)
    made = Blocks(model, 2, None, None, context=context).double()
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.3)
    return made


def piece_of(x: Tensor, rank: int, ranks: int) -> Tensor:
    """This rank's two pieces of the sequences."""
    pieces = x.chunk(2 * ranks, 1)
    return torch.cat([pieces[rank], pieces[2 * ranks - 1 - rank]], 1)


def on_rank(rank: int, ranks: int, model: Transformer, kind: str) -> list[float]:
    """How far results and gradients of divided sequences are from those of whole ones."""
    dist.init_process_group("gloo")
    whole = blocks(model, None)
    torch.manual_seed(5)
    x, weights = (torch.randn(2, model.seq, model.width, dtype=torch.float64) for _ in range(2))
    x.requires_grad_()
    expected = whole(x)
    (expected * weights).sum().backward()

    mine = blocks(model, Context(dist.group.WORLD, kind, rank))
    part = piece_of(x.detach(), rank, ranks).requires_grad_()
    found = mine(part)
    (found * piece_of(weights, rank, ranks)).sum().backward()
    pairs = [(found, piece_of(expected, rank, ranks)), (part.grad, piece_of(x.grad, rank, ranks))]
    for one, other in zip(mine.parameters(), whole.parameters(), strict=True):
        dist.all_reduce(one.grad)
        pairs.append((one.grad, other.grad))
    for one, other in pairs:
        torch.testing.assert_close(one, other, **EXACT)
    dist.destroy_process_group()
    return [float((one - other).abs().max()) for one, other in pairs]


@pytest.mark.parametrize(
    ("model", "kind", "ranks"),
    [
        (GROUPED, "p2p", 2),
        (GROUPED, "p2p", 3),
        (FEW_KEYS, "p2p", 2),
        (LATENT, "p2p", 2),
        (GROUPED, "a2a", 2),
        (GROUPED, "a2a", 3),
        (FEW_KEYS, "a2a", 2),
    ],
)
def test_divided_sequences_give_what_whole_ones_give(
    model: Transformer, kind: str, ranks: int
) -> None:
    run_ranks(on_rank, ranks, model, kind, timeout_s=240)


def planned(rank: int, ranks: int, kind: str) -> tuple[bool, list[str]]:
    """Whether a planned step is eager's on these ranks, bit by bit; and what it recomputes."""
    dist.init_process_group("gloo")
    context = Context(dist.group.WORLD, kind, rank)
    model, twin = (blocks(GROUPED, context) for _ in range(2))
    how = {"solver": "heu", "profile": "estimate", "hardware": "cpu-gloo"}
    step = overlapc.optimize(twin, memory_budget=0.8, **how)
    torch.manual_seed(rank)
    x = torch.randn(2, GROUPED.seq // ranks, GROUPED.width, dtype=torch.float64)
    for each in (model, step):
        each(x).square().mean().backward()
    pairs = zip(model.parameters(), twin.parameters(), strict=True)
    same = all(torch.equal(one.grad, other.grad) for one, other in pairs)
    (report,) = step.graphs
    dist.barrier()
    dist.destroy_process_group()
    return same, list(report.plan.recomputed)


@pytest.mark.parametrize("kind", ["p2p", "a2a"])
def test_a_planned_step_is_eagers_bit_by_bit(kind: str) -> None:
    for same, again in run_ranks(planned, 2, kind, timeout_s=280):
        assert same
        assert again
