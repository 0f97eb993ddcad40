"""What the search captures of a GPT, kernel by kernel, against Megatron-LM v2.5 (its transformer.py
and layers.py, with fused bias and dropout), counted by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from overlapc.core.ir import Op
from overlapc.profiler.hardware import load_hardware
from overlapc.search.captures import UnitKey
from overlapc.search.layouts import Cluster, Layout
from overlapc.search.models.transformer import Transformer
from overlapc.search.units import Unit, make_unit

MODEL = Transformer("gpt", layers=1, width=256, heads=4, ffn=1024, vocab=512, seq=128)
WIDE = replace(MODEL, width=2048, ffn=8192, seq=1024)
CLUSTER = Cluster("a100-sxm-80", 2, 8, 1 << 40, 8, framework="megatron-2021")
A100 = load_hardware("a100-sxm-80")


def unit(microbatch: int, tp: int = 1, model: Transformer = MODEL) -> Unit:
    layout = Layout(tp, 1, 2 // tp, microbatch)
    return make_unit(UnitKey.of(model, CLUSTER, layout), bounded=False)


def kernels(unit: Unit, forward: bool) -> list[str]:
    """The names of the ops that run on the device."""
    ops: list[Op] = [op for op in unit.problem.trace.ops if op.is_forward == forward]
    runs = [op for op in ops if unit.problem.cost(op.name).compute_ns and op.role != "start"]
    return [op.signature.split(".")[1] if "." in op.signature else "added up" for op in runs]


@pytest.mark.parametrize("microbatch", [1, 2])
@pytest.mark.parametrize("tp", [1, 2])
def test_forward_kernels(microbatch: int, tp: int) -> None:
    """However many sequences: norm, product, bias, scores, softmax, dropout, mixed values, their
    copy, product, and dropout with the sum; then norm, product, GELU, product, dropout and sum."""
    attention = ["native_layer_norm", "mm", "add", "bmm", "_softmax", "native_dropout", "bmm"]
    rest = ["native_layer_norm", "addmm", "gelu", "addmm", "add"]
    assert kernels(unit(microbatch, tp), True) == [*attention, "clone", "addmm", "add", *rest]


def test_backward_kernels() -> None:
    found = kernels(unit(8, model=WIDE), False)
    assert found.count("sum") == 4  # a gradient for each of four biases
    assert found.count("cat") == 1
    assert "clone" not in found
    assert found.count("mm") == 8
    assert found.count("bmm") == 4
    assert found.count("added up") == 4 + 4 + 4  # weights, biases, and two norms' parameters


def test_what_is_dropped_is_not_written_before_the_sum() -> None:
    """One kernel reads what is dropped and what is added, and writes the sum and a mask."""
    problem = unit(8, model=WIDE).problem  # the device never waits for its host
    sums = [op for op in problem.trace.ops if op.is_forward and "aten.add." in op.signature]
    elements = 8 * 1024 * 2048
    for op in sums[1:]:  # the first adds a bias
        took = problem.cost(op.name).compute_ns
        assert took == pytest.approx(A100.launch_ns + A100.memory_ns(elements * 7), abs=2)
    dropped = [op for op in problem.trace.ops if "native_dropout.default" in op.signature]
    assert [problem.cost(op.name).compute_ns > 0 for op in dropped] == [True, False, False]


def test_gated_models_have_no_biases() -> None:
    gated = replace(MODEL, gated=True)
    assert "sum" not in kernels(unit(1, model=gated), False)
    assert "addmm" not in kernels(unit(1, model=gated), True)
