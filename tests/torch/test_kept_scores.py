"""How long attention op by op keeps its scores: as long as its callers have names for them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from overlapc.core.simulate import simulate
from overlapc.search.captures import UnitKey
from overlapc.search.layouts import Cluster, Layout
from overlapc.search.models.transformer import Transformer
from overlapc.search.units import make_unit
from overlapc.solvers import solve

MODEL = Transformer("scores", 1, 128, 16, 256, 256, 512, gated=True)
CLUSTER = Cluster("a100-sxm-80", 1, 8, 1 << 40, 8)


def most_bytes(framework: str, microbatch: int) -> float:
    """The most memory of a layer's forward of which nothing is kept, for each score."""
    cluster = replace(CLUSTER, framework=framework)
    key = UnitKey.of(MODEL, cluster, Layout(1, 1, 1, microbatch))
    problem = make_unit(key, bounded=False, most=1).problem
    plan = solve(problem, "whole")
    ran = simulate(problem, plan)
    forward = {op.name for op in problem.trace.ops if op.is_forward}
    sizes = zip(plan.order, ran.memory, strict=True)
    return max(size for name, size in sizes if name in forward) / (
        microbatch * MODEL.heads * MODEL.seq**2
    )


@pytest.mark.parametrize("microbatch", [1, 2])
@pytest.mark.parametrize(
    ("framework", "kept"),
    [
        # half-precision scores, masked ones and their softmax in float32, and that in half; a mask
        ("scaling-torch", 2 + 4 + 4 + 2 + 1 / 16),
        ("scaling-fused-softmax", 2 + 2),  # scores and their softmax
        ("megatron-2021", 2 + 2 + 2 + 1),  # the dropped one, and its mask
        ("scaling", 0.0),
    ],
)
def test_bytes_of_a_score(framework: str, kept: float, microbatch: int) -> None:
    """A layer's other tensors are small beside 512 scores for each word and head."""
    assert most_bytes(framework, microbatch) == pytest.approx(kept, abs=0.45)
