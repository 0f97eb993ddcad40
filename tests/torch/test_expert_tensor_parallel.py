"""Experts whose matrices tensor-parallel ranks share, in the search, counted by hand."""

from __future__ import annotations

from functools import cache

import pytest

from overlapc.core.errors import OptionError
from overlapc.profiler.hardware import load_hardware
from overlapc.search.captures import UnitKey
from overlapc.search.layouts import Cluster, Fixed, Layout, expert_replicas, layouts
from overlapc.search.megatron import megatron_arguments
from overlapc.search.models.transformer import Transformer
from overlapc.search.search import search
from overlapc.search.units import Unit, make_unit
from overlapc.search.weights import stage_parameters

MODEL = Transformer(
    "experts", layers=2, width=256, heads=4, ffn=512, vocab=512, seq=128, gated=True, experts=4,
    top_k=2, expert_width=320,
)  # fmt: skip
CLUSTER = Cluster("a100-sxm-80", 4, 8, 1 << 40, 8)
SIZE = 3 * 256 * 320  # parameters of an expert


def layout(sequence: bool, shares: bool) -> Layout:
    return Layout(2, 1, 2, 2, sequence=sequence, shares_experts=shares, ep=2)


@cache
def unit(sequence: bool, shares: bool) -> Unit:
    return make_unit(UnitKey.of(MODEL, CLUSTER, layout(sequence, shares)), bounded=False)


def took(unit: Unit, kind: str) -> list[int]:
    """Of all collectives of a kind."""
    problem = unit.problem
    starts = [op for op in problem.trace.ops if op.role == "start" and kind in op.signature]
    return sorted(problem.cost(op.name).comm_ns for op in starts)


def test_a_rank_has_a_part_of_each_expert() -> None:
    whole, part = (stage_parameters(MODEL, layout(True, shares)) for shares in (False, True))
    assert [experts for _, experts in whole] == [2 * 2 * SIZE]  # layers, experts of a rank
    assert [experts for _, experts in part] == [2 * 2 * SIZE // 2]
    assert [dense for dense, _ in whole] == [dense for dense, _ in part]
    assert expert_replicas(MODEL, layout(True, False)) == 2
    assert expert_replicas(MODEL, layout(True, True)) == 1


def test_what_comes_to_the_experts_is_gathered() -> None:
    """Of 2 sequences of 128 tokens each rank has half, and sends each token to two experts."""
    rows = 2 * 128 // 2 * 2
    size = 2 * rows * 256 * 2  # ranks, rows, width, bytes
    machine = load_hardware(CLUSTER.hardware)
    for kind in ("all_gather", "reduce_scatter"):
        expected = machine.collective_ns(kind, size, 2, 2)
        more, before = took(unit(True, True), kind), took(unit(True, False), kind)
        assert len(more) == len(before) + 2 * MODEL.layers  # in the forward and in the backward
        assert more.count(expected) - before.count(expected) == 2 * MODEL.layers
    assert took(unit(True, True), "all_to_all") == took(unit(True, False), "all_to_all")


def test_whole_sequences_are_summed() -> None:
    more, before = took(unit(False, True), "all_reduce"), took(unit(False, False), "all_reduce")
    assert len(more) == len(before) + 2 * MODEL.layers


def test_megatron_is_told() -> None:
    assert "--expert-tensor-parallel-size 1" in megatron_arguments(
        layout(True, False), (2,), 1, 2, experts=True
    )
    assert "--expert-tensor-parallel-size 2" in megatron_arguments(
        layout(True, True), (2,), 1, 2, experts=True
    )
    assert not any("expert" in said for said in megatron_arguments(layout(True, False), (2,), 1))


def test_it_is_searched_when_asked() -> None:
    assert not any(found.shares_experts for found in layouts(MODEL, CLUSTER))
    asked = Fixed(tp=2, pp=1, microbatch=1, shares_experts=True)
    best = search(MODEL, CLUSTER, asked, workers=1).best
    assert best is not None
    assert "tp=2+sp+etp" in str(best.layout)
    dense = Transformer("dense", 2, 256, 4, 512, 512, 128)
    with pytest.raises(OptionError, match="--expert-tensor-parallel"):
        search(dense, CLUSTER, asked, workers=1)
