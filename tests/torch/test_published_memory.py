"""Activation memory against published arithmetic: Korthikanti et al. 2022.

A layer of theirs on one rank keeps sbh (34 + 5 a s / h) bytes in 16 bits: layer norms, unfused
attention and dropout as Megatron had them. On t tensor-parallel ranks it is
sbh (10 + 24 / t + 5 a s / (h t)), and with parts of the sequence on each, gathered again for the
backward, sbh (34 + 5 a s / h) / t. Selective recompute drops the attention's 5 a s / h; full
recompute keeps a layer's input, 2 sbh, or its part. Outside of layers, a mask behind the embedding,
1 sbh, and what the last norm, the scores and the loss read, sbh (2 + 2 + 4 v / (h t)); with parts
of the sequence each of them is a part.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from overlapc.api import capture
from overlapc.core.ir import Problem
from overlapc.core.simulate import saved_bytes
from overlapc.planning.problem import formulate
from overlapc.profiler.estimate import estimate
from overlapc.profiler.hardware import load_hardware
from overlapc.search.captures import UnitKey
from overlapc.search.groups import fake_groups
from overlapc.search.layouts import Cluster, Layout, microbatches, stage_layers
from overlapc.search.models.modules import Ranks
from overlapc.search.models.transformer import Transformer
from overlapc.search.place import Place, planned
from overlapc.search.units import make_unit
from overlapc.solvers import solve
from overlapc.solvers.pipeline.schedules import make_schedule

# width, heads, sequences of a microbatch
PAPER = {
    "22B": (6144, 64, 4),
    "175B": (12288, 96, 1),
    "530B": (20480, 128, 1),
    "1T": (25600, 160, 1),
}
SOME = [n if n in ("22B", "1T") else pytest.param(n, marks=pytest.mark.slow) for n in PAPER]
SEQ, WORDS, LAYERS = 2048, 51200, 4


class Layer(nn.Module):
    def __init__(self, width: int, heads: int, ranks: Ranks) -> None:
        super().__init__()
        self.ranks, self.heads, t = ranks, heads // ranks.count, ranks.count
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.proj = nn.Linear(width, 3 * width // t), nn.Linear(width // t, width)
        self.up, self.down = nn.Linear(width, 4 * width // t), nn.Linear(4 * width // t, width)

    def forward(self, x: Tensor) -> Tensor:
        enter, leave = self.ranks.enter, self.ranks.leave
        q, k, v = self.qkv(enter(self.norms[0](x))).chunk(3, -1)
        first, second, _ = q.shape  # a sequence and a batch, or the other way round
        q, k, v = (t.view(first, second, self.heads, -1).transpose(1, 2) for t in (q, k, v))
        if self.ranks.sequence:
            q, k, v = (t.transpose(0, 2) for t in (q, k, v))
        weights = F.dropout(torch.softmax(q @ k.transpose(-1, -2), -1), 0.1)
        mixed = weights @ v
        if self.ranks.sequence:
            mixed = mixed.transpose(0, 2)
        mixed = mixed.transpose(1, 2).reshape(first, second, -1)
        x = x + F.dropout(leave(self.proj(mixed)), 0.1)
        return x + F.dropout(leave(self.down(F.gelu(self.up(enter(self.norms[1](x)))))), 0.1)


class Model(nn.Module):
    """With dropout behind the embedding; the last norm, the scores and the loss behind layers."""

    def __init__(self, width: int, heads: int, ranks: Ranks) -> None:
        super().__init__()
        self.ranks = ranks
        self.layers = nn.Sequential(*(Layer(width, heads, ranks) for _ in range(LAYERS)))
        self.norm, self.scores = nn.LayerNorm(width), nn.Linear(width, WORDS // ranks.count)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.layers(F.dropout(x, 0.1)))
        scores = self.scores(self.ranks.enter(x)).float().flatten(0, 1)
        return F.cross_entropy(scores, torch.zeros(scores.shape[0], dtype=torch.long))


def problem_of(width: int, heads: int, batch: int, t: int, sequence: bool) -> Problem:
    with fake_groups(t, t, 1) as (group, *_), FakeTensorMode():
        torch.set_default_dtype(torch.bfloat16)
        try:
            model = Model(width, heads, Ranks(group, sequence))
            shape = (SEQ // t, batch) if sequence else (batch, SEQ)
            captured = capture(model, torch.zeros(*shape, width, requires_grad=True))
        finally:
            torch.set_default_dtype(torch.float32)
        problem = formulate(captured.trace, estimate(captured, load_hardware("a100-sxm-80")))
    return replace(problem, budget_bytes=None)


def check(problem: Problem, sbh: int, layer: dict[str, float], others: float) -> None:
    """`layer` is by solver what one keeps, `others` what lies outside of layers, in bytes / sbh."""
    for solver, each in layer.items():
        size = saved_bytes(problem, solve(problem, solver).saved)
        assert size / sbh == pytest.approx(LAYERS * each + others, rel=0.02), solver


@pytest.mark.parametrize("name", PAPER)
def test_one_rank(name):
    width, heads, batch = PAPER[name]
    attention = 5 * heads * SEQ / width
    rows = {
        "none": 34 + attention,
        "selective": 34,
        "full": 2,
        "uniform": 2,
        "block": 34 + attention,
    }
    others = 1 + 4 * (1 + WORDS / width)
    check(problem_of(width, heads, batch, 1, False), SEQ * batch * width, rows, others)


@pytest.mark.parametrize("t", [2, 8])
@pytest.mark.parametrize("name", SOME)
def test_tensor_parallel_ranks(name, t):
    width, heads, batch = PAPER[name]
    whole, attention = 10 + 24 / t, 5 * heads * SEQ / width / t
    rows = {"none": whole + attention, "selective": whole, "full": 2, "uniform": 2}
    rows |= {"megatron": whole + attention, "block": whole + attention}
    others = 1 + 4 * (1 + WORDS / width / t)
    check(problem_of(width, heads, batch, t, False), SEQ * batch * width, rows, others)


@pytest.mark.parametrize("t", [2, 8])
@pytest.mark.parametrize("name", SOME)
def test_sequence_parallel_ranks(name, t):
    """Megatron keeps parts of sequences and gathers them again; this code run eagerly does not."""
    width, heads, batch = PAPER[name]
    part, attention = 34 / t, 5 * heads * SEQ / width / t
    rows = {"megatron": part + attention, "block": part + attention}
    rows |= {"selective": part, "uniform": 2 / t}
    others = 1 / t + 4 / t * (1 + WORDS / width)
    problem, sbh = problem_of(width, heads, batch, t, True), SEQ * batch * width
    check(problem, sbh, rows, others)
    gathered = 2 - 2 / t  # instead of a part, before each column-parallel matrix
    check(problem, sbh, {"none": part + attention + 2 * gathered}, others + gathered)
    check(problem, sbh, {"full": 2 / t}, others + gathered)


# layers, stages, schedule, GPUs, sequences a step
RUNS = {
    "22B": (48, 1, "1f1b", 8, 4),
    "175B": (96, 8, "interleaved", 64, 64),
    "530B": (105, 35, "1f1b", 280, 280),
    "1T": (128, 64, "1f1b", 512, 512),
}


@pytest.mark.parametrize("name", RUNS)
def test_published_runs_fit_where_they_ran(name):
    """On GPUs of 80 GB, eight tensor-parallel ranks: with full recompute, and with selective where
    ranks share sequences. Such fused attention keeps less than theirs, and there are no masks."""
    (width, heads, batch), (count, stages, schedule, gpus, sequences) = PAPER[name], RUNS[name]
    model = Transformer(name, count, width, heads, 4 * width, WORDS, SEQ)
    cluster = Cluster("a100-sxm-80", gpus, 8, 80 * 10**9, sequences)
    for sequence, solver in ((False, "full"), (True, "selective"), (True, "megatron")):
        layout = Layout(8, stages, 1, batch, schedule, sequence)
        unit = make_unit(UnitKey.of(model, cluster, layout))
        rows = make_schedule(schedule, stages, min(microbatches(cluster, layout), 2 * stages))
        split = stage_layers(model, layout.stages)
        for rank in {0, stages // 2, stages - 1}:
            place = Place.of(model, cluster, layout, unit, rows, rank, split)
            assert planned(place, unit, solver, 0.0).peak_bytes <= cluster.memory_bytes
