"""Activation memory against published arithmetic: Korthikanti et al. 2022.

A layer of theirs on one rank keeps sbh (34 + 5 a s / h) bytes in 16 bits: layer norms, unfused
attention and dropout as Megatron had them. On t tensor-parallel ranks it is
sbh (10 + 24 / t + 5 a s / (h t)), and with parts of the sequence on each, gathered again for the
backward, sbh (34 + 5 a s / h) / t. Selective recompute drops the attention's 5 a s / h; full
recompute keeps a layer's input, 2 sbh, or its part.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import overlapc
from overlapc.ir import Problem
from overlapc.planning import formulate
from overlapc.profiler.estimate import estimate
from overlapc.profiler.hardware import load_hardware
from overlapc.search.groups import fake_groups
from overlapc.search.modules import Ranks
from overlapc.simulate import saved_bytes
from overlapc.solvers import solve
from overlapc.solvers.choice import plan_on_demand

SHAPES = {"7B": (4096, 32), "23B": (6144, 48), "175B": (12288, 96)}
SEQ, BATCH, LAYERS = 2048, 1, 4


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


def problem_of(width: int, heads: int, t: int = 1, sequence: bool = False) -> Problem:
    with fake_groups(t, t, 1) as (group, _), FakeTensorMode():
        torch.set_default_dtype(torch.bfloat16)
        try:
            ranks = Ranks(group, sequence)
            layers = (Layer(width, heads, ranks) for _ in range(LAYERS))
            model = nn.Sequential(nn.Dropout(0.1), *layers)  # behind the embedding
            shape = (SEQ // t, BATCH) if sequence else (BATCH, SEQ)
            captured = overlapc.capture(model, torch.zeros(*shape, width, requires_grad=True))
        finally:
            torch.set_default_dtype(torch.float32)
        return formulate(captured.trace, estimate(captured, load_hardware("a100-sxm-80")))


@pytest.mark.parametrize("name", SHAPES)
def test_what_a_layer_keeps(name):
    width, heads = SHAPES[name]
    problem = problem_of(width, heads)
    attention = 5 * heads * SEQ / width
    check(problem, width, {"none": 34 + attention, "selective": 34.0, "full": 2.0})


@pytest.mark.parametrize("t", [2, 8])
@pytest.mark.parametrize("name", ["23B", "175B"])
def test_what_a_layer_keeps_on_tensor_parallel_ranks(name, t):
    width, heads = SHAPES[name]
    attention = 5 * heads * SEQ / width / t
    problem = problem_of(width, heads, t)
    whole = 10 + 24 / t
    check(problem, width, {"none": whole + attention, "selective": whole, "full": 2.0})
    problem = problem_of(width, heads, t, sequence=True)
    part = 34 / t
    check(problem, width, {"none": part + attention, "selective": part, "full": 2 / t}, t)


def check(problem: Problem, width: int, published: dict[str, float], share: int = 1) -> None:
    """What plans keep of each layer, but for what they could gather again."""
    trace = problem.trace
    gathers = [op for op in trace.ops if op.is_forward and "all_gather_into_tensor" in op.signature]
    parts = {trace.value[name].storage for op in gathers for name in op.inputs}
    gathered = {trace.value[name].storage for op in gathers for name in op.outputs}
    sbh = SEQ * BATCH * width
    for solver, each in published.items():
        plan = solve(problem, solver)
        kept = {trace.value[name].storage for name in plan.saved}
        if solver != "full":
            kept = (kept | parts) - gathered
        again = plan_on_demand(problem, kept, solver)
        size = saved_bytes(problem, again.saved) - sbh / share  # the mask behind the embedding
        assert size / sbh / LAYERS == pytest.approx(each, rel=0.02), solver
