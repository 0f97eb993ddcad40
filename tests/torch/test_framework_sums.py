"""What frameworks make of tensor-parallel ranks' sums, and of the loss, held against their sources
by counting."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from overlapc.core.simulate import simulate
from overlapc.search.captures import UnitKey
from overlapc.search.frameworks.known import find_framework
from overlapc.search.layouts import Cluster, Layout
from overlapc.search.models.transformer import Transformer
from overlapc.search.units import Unit, make_unit
from overlapc.solvers import solve

GPT = Transformer("gpt", layers=4, width=1024, heads=8, ffn=4096, vocab=4096, seq=512)
LLAMA = replace(GPT, gated=True)


@cache
def unit(model: Transformer, framework: str, sequence: bool = False) -> Unit:
    cluster = Cluster("a100-sxm-80", 2, 8, 1 << 40, 8, framework=framework)
    layout = Layout(2, 1, 1, 4, sequence=sequence)
    return make_unit(UnitKey.of(model, cluster, layout), bounded=False, most=2)


def starts(of: Unit, forward: bool) -> list[str]:
    ops = (op for op in of.problem.trace.ops if op.is_forward == forward and op.role == "start")
    return [op.signature.split(".")[1] for op in ops]


def exposed(of: Unit, solver: str) -> float:
    """The part of the time of collectives that nothing hides."""
    ran = simulate(of.problem, solve(of.problem, solver))
    took = sum(span.end_ns - span.start_ns for span in ran.spans if span.lane != "compute")
    return sum(each.exposed_ns for each in ran.exposures) / took


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_gradients_are_summed_under_products_where_the_framework_does_so(recompute: str) -> None:
    """Megatron-LM began to in September 2021; Scaling's all-reduces are waited for."""
    for name, hides in (("megatron-2021", False), ("megatron-2022", True)):
        solver = find_framework(name).plan(recompute)
        assert (exposed(unit(GPT, name), solver) < 0.99) == hides
    assert exposed(unit(LLAMA, "scaling"), find_framework("scaling").plan(recompute)) > 0.99


def test_layers_run_again_to_their_end_all_the_same() -> None:
    assert find_framework("scaling").plan("full") == "whole"
    problem = unit(LLAMA, "scaling").problem
    whole, stopped, theirs = (
        set(solve(problem, name).recomputed) for name in ("whole", "full", "megatron-full")
    )
    assert stopped < whole == theirs


def test_a_gate_of_its_own_has_its_own_sum_unless_sequences_are_shared() -> None:
    """Scaling's gate and what it gates are two column-parallel products, each with a copy of its
    input to the ranks, whose backward is an all-reduce."""
    alone, shared = unit(LLAMA, "scaling"), unit(LLAMA, "scaling", sequence=True)
    assert starts(alone, True) == ["all_reduce"] * 4  # of two layers
    assert starts(alone, False) == ["all_reduce"] * 6
    fused = unit(LLAMA, "megatron")
    assert starts(fused, False) == ["all_reduce"] * 4
    assert starts(shared, True) == ["all_gather_into_tensor", "reduce_scatter_tensor"] * 4
    assert starts(shared, False) == ["all_gather_into_tensor", "reduce_scatter_tensor"] * 4


def test_a_fused_loss_writes_the_gradient_over_the_scores() -> None:
    """Of Transformer Engine's loss the scores in half precision are all that is there."""
    scores = 2 * 4 * GPT.seq * GPT.vocab // 2  # bytes of a rank's part of the words
    by_ops, fused = (unit(LLAMA, name) for name in ("megatron", "megatron-fused-loss"))
    # Beside them what the norm gave, and the gradient of the scores' matrix.
    beside = 2 * 4 * GPT.seq * GPT.width + 2 * GPT.vocab * GPT.width // 2
    assert scores + beside <= fused.head_ran.peak_bytes < 1.01 * (scores + beside)
    # Op by op the softmax is kept in float32, which is two times as large as the scores.
    assert by_ops.head_ran.peak_bytes > fused.head_ran.peak_bytes + 2 * scores
    assert by_ops.head_ran.step_ns > fused.head_ran.step_ns
