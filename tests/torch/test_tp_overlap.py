"""Tensor-parallel traffic beside products: what is left of it, counted by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from overlapc.core.errors import OptionError
from overlapc.profiler.hardware import load_hardware
from overlapc.profiler.shapes import filled
from overlapc.search.captures import UnitKey
from overlapc.search.frameworks.known import FRAMEWORKS, ONLY, OPTIONS, find_framework
from overlapc.search.layouts import Cluster, Layout
from overlapc.search.models.transformer import Transformer
from overlapc.search.units import make_unit

MODEL = Transformer("wide", layers=2, width=8192, heads=64, ffn=32768, vocab=32000, seq=4096)
CLUSTER = Cluster("h100-sxm", 8, 8, 1 << 40, 8, framework="megatron-overlap")
LAYOUT = Layout(8, 1, 1, 1, sequence=True)
COUNT = 132


def of(framework: str):  # type: ignore[no-untyped-def]
    cluster = replace(CLUSTER, framework=framework)
    return make_unit(UnitKey.of(MODEL, cluster, LAYOUT), bounded=False, most=1).problem


def test_products_hide_what_ranks_gather_and_scatter() -> None:
    alone, beside = of("megatron-overlap"), of("megatron-overlap+tp-overlap")
    machine = load_hardware("h100-sxm")
    assert machine.kernels is not None
    assert machine.kernels.multiprocessors == COUNT
    before, after = alone.profile.costs, beside.profile.costs
    starts = [op for op in alone.trace.ops if op.role == "start"]
    changed = [op for op in starts if before[op.name] != after[op.name]]
    kinds = {(op.is_forward, op.signature.split(".")[1].split("_into")[0]) for op in changed}
    assert {kind for forward, kind in kinds if forward} == {"all_gather", "reduce_scatter_tensor"}
    assert {kind for forward, kind in kinds if not forward} == {"all_gather"}
    # The first product of the MLP takes 4,096 rows to 4,096 columns, in four parts of 1,024.
    wide = [op for op in alone.trace.ops if "[4096,8192]" in op.signature and op.is_forward]
    product = next(op for op in wide if op.signature.endswith("bfloat16[4096,4096]"))
    slower = after[product.name].compute_ns / before[product.name].compute_ns
    expected = filled(4096, 4096, 1, COUNT) / filled(1024, 4096, 1, COUNT)
    assert slower == pytest.approx(max(1.0, expected), rel=0.01)
    for op in changed:
        assert after[op.name].comm_ns >= before[op.name].comm_ns // 4 - 1
    took = [sum(c.compute_ns + c.comm_ns for c in each.values()) for each in (before, after)]
    assert took[1] < took[0]


def test_options_of_frameworks() -> None:
    found = find_framework("megatron-overlap+bf16-gradients+dropout")
    assert found.name == "megatron-overlap+bf16-gradients+dropout"
    assert (found.gradient_bytes, found.dropout) == (2, True)
    assert find_framework("megatron") is FRAMEWORKS["megatron"]
    for option in OPTIONS:
        before = [FRAMEWORKS[first] for first in ONLY.get(option, FRAMEWORKS)]
        behind = [replace(find_framework(f"{one.name}+{option}"), name=one.name) for one in before]
        assert before != behind  # it changes more than the name
    with pytest.raises(OptionError, match=r"one of .*tp-overlap"):
        find_framework("megatron+tp")


def test_a_host_that_waits_for_each_kernel() -> None:
    free, blocked = of("megatron-overlap"), of("megatron-overlap+blocking")
    kernels = [n for n, cost in free.profile.costs.items() if cost.compute_ns > 0]
    more = [blocked.profile.costs[n].compute_ns - free.profile.costs[n].compute_ns for n in kernels]
    assert max(more) == find_framework("megatron").host_ns
