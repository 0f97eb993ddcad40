"""FP8 in the search: products of layers at its rate, with what makes their operands FP8, counted by
hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from overlapc.core.errors import OptionError
from overlapc.profiler.hardware import load_hardware
from overlapc.profiler.work import AttentionWork, OpWork, Product, work_ns
from overlapc.search.captures import UnitKey
from overlapc.search.evaluate import Found, first_bound
from overlapc.search.frameworks.fp8 import fp8_ns, runs_in_fp8
from overlapc.search.layouts import Cluster, Layout
from overlapc.search.megatron import megatron_arguments
from overlapc.search.models.transformer import Transformer
from overlapc.search.search import search
from overlapc.search.units import make_unit
from overlapc.solvers import solve
from overlapc.validation.interval import interval

M, N, K = 8192, 4096, 2048
SIZE = 2 * (M * K + K * N + M * N)
WORK = OpWork("matmul", 2.0 * M * N * K, "bfloat16", SIZE, K, Product(M, N, K, "tn"))
H100 = load_hardware("h100-sxm")
MODEL = Transformer(
    "wide", layers=2, width=4096, heads=32, ffn=16384, vocab=32000, seq=4096, experts=8, top_k=2,
    expert_width=4096, moe_every=2, gated=True,
)  # fmt: skip
CLUSTER = Cluster("h100-sxm", 8, 8, 1 << 40, 8)


@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize(("letter", "elements"), [("F", M * K), ("I", M * K), ("W", 0)])
def test_a_product_by_hand(letter: str, elements: int, delayed: bool) -> None:
    rate = H100.memory_bytes_per_s * H100.memory_efficiency
    assert H100.kernels is not None
    part = H100.kernels.matmul_part(M, N, K, "tn")
    multiplied = 2.0 * M * N * K / (1979e12 * H100.float8 * part) * 1e9
    moved = (SIZE - M * K - K * N) / rate * 1e9
    expected = H100.launch_ns + max(multiplied, moved)
    each, kernels = (4, 1) if delayed else (6, 2)
    expected += elements * each / rate * 1e9 + kernels * H100.launch_ns * (elements > 0)
    assert fp8_ns(H100, WORK, letter, delayed) == pytest.approx(expected, abs=2)
    if letter == "W":
        assert fp8_ns(H100, WORK, letter) < 0.6 * work_ns(H100, WORK)


def test_what_runs_in_fp8() -> None:
    assert runs_in_fp8(WORK, 0)
    assert runs_in_fp8(WORK, 8)
    assert not runs_in_fp8(WORK, N)  # a router of so many experts
    assert not runs_in_fp8(replace(WORK, product=Product(M, N, 2044, "tn")), 0)
    assert not runs_in_fp8(replace(WORK, dtype="float32"), 0)
    mixed = replace(
        WORK, kind="attention", product=None, attention=AttentionWork(8, 64, True, False)
    )
    assert not runs_in_fp8(mixed, 0)


def test_layers_are_faster_and_ends_are_as_before() -> None:
    key = UnitKey.of(MODEL, CLUSTER, Layout(1, 1, 8, 1))
    halves, eighths = (make_unit(each, bounded=False) for each in (key, replace(key, fp8=True)))
    assert eighths.head == halves.head
    took = [sum(cost.compute_ns for cost in unit.problem.costs) for unit in (halves, eighths)]
    assert 0.5 * took[0] < took[1] < 0.9 * took[0]
    ops = halves.problem.trace.ops
    changed = {
        op.signature.split(" ")[0].split(".")[1]
        for op in ops
        if halves.problem.cost(op.name) != eighths.problem.cost(op.name)
    }
    assert changed == {"mm", "bmm"}
    routers = [op.name for op in ops if "mm" in op.signature and ",8]" in op.signature]
    assert routers
    assert all(halves.problem.cost(n) == eighths.problem.cost(n) for n in routers)


def test_what_is_printed_and_what_is_refused() -> None:
    said = list(megatron_arguments(Layout(1, 1, 8, 1), (2,), 1, fp8=True))
    assert "--fp8-format hybrid" in said
    cluster, layout = replace(CLUSTER, fp8=True), Layout(1, 1, 8, 1)
    assert first_bound(MODEL, cluster, layout) < first_bound(MODEL, CLUSTER, layout)
    assert "kernels" in interval(Found(layout, "heu", 1000), cluster).guessed
    for change, named in (
        ({"hardware": "a100-sxm-80"}, "names no peak_flops.float8"),
        ({"framework": "megatron-2021"}, "fused attention"),
    ):
        with pytest.raises(OptionError, match=named):
            search(MODEL, replace(cluster, **change), workers=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("sequence", [False, True])
def test_what_is_kept_by_hand(sequence: bool) -> None:
    """Of a dense block: what its products need again is half as large, beside attention's result,
    of which there are both."""
    dense = replace(MODEL, experts=0, top_k=0, expert_width=0, moe_every=1)
    tp, tokens = (2, 4096) if sequence else (1, 4096)
    layout = Layout(tp, 1, 8 // tp, 1, sequence=sequence)

    def kept(fp8: bool) -> int:
        cluster = replace(CLUSTER, fp8=fp8, framework="megatron")
        problem = make_unit(UnitKey.of(dense, cluster, layout), bounded=False, most=1).problem
        plan = solve(replace(problem, budget_bytes=None), "megatron-none")
        values = [problem.trace.value[name] for name in plan.saved]
        return sum({v.storage: v.bytes for v in values if v.producer}.values())

    norms = 2 * tokens * dense.width // tp  # of which each rank has its part of the sequence
    inner, mixed = tokens * dense.ffn // tp, tokens * dense.width // tp
    assert kept(False) - kept(True) == norms + inner - mixed


def test_a_fused_gate_keeps_what_it_reads() -> None:
    """Megatron's SwiGLU is one kernel, forward and backward."""
    dense = replace(MODEL, experts=0, top_k=0, expert_width=0, moe_every=1)

    def ran(framework: str) -> tuple[list[str], int, int]:
        cluster = replace(CLUSTER, framework=framework)
        key = UnitKey.of(dense, cluster, Layout(1, 1, 8, 1))
        problem = make_unit(key, bounded=False, most=1).problem
        plan = solve(replace(problem, budget_bytes=None), "none")
        values = [problem.trace.value[name] for name in plan.saved]
        gates = [op for op in problem.trace.ops if "glu" in op.signature or "silu" in op.signature]
        took = sum(problem.cost(op.name).compute_ns for op in gates)
        return (
            [op.signature.split(".")[1] for op in gates],
            sum({v.storage: v.bytes for v in values if v.producer}.values()),
            took,
        )

    (ours, more, _), (fused, kept, took) = ran("overlapc"), ran("megatron")
    assert ours == ["silu", "silu_backward"]
    assert fused == ["glu", "glu_backward"]
    inner = 4096 * dense.ffn * 2
    assert more - kept == inner  # the gate's own result
    assert took == pytest.approx(2 * H100.launch_ns + H100.memory_ns((3 + 5) * inner), abs=2)
