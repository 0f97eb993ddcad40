"""Context parallelism in the search, counted by hand: what is gathered, what is divided."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from overlapc.errors import OptionError
from overlapc.profiler.hardware import load_hardware
from overlapc.search.captures import UnitKey
from overlapc.search.evaluate import evaluate
from overlapc.search.layouts import Cluster, Fixed, Layout, layouts, static_bytes
from overlapc.search.megatron import megatron_arguments
from overlapc.search.models import Transformer
from overlapc.search.replicas import Update
from overlapc.search.search import search
from overlapc.search.units import Unit, make_unit

GROUPED = Transformer(
    "grouped", layers=2, width=256, heads=4, ffn=512, vocab=512, seq=256, kv_heads=2, gated=True
)
LATENT = replace(
    GROUPED, name="latent", kv_heads=0, head_width=32, kv_rank=64, rope_width=16, value_width=24
)
CLUSTER = Cluster("a100-sxm-80", 4, 8, 1 << 40, 8)


@cache
def unit(model: Transformer, layout: Layout) -> Unit:
    return make_unit(UnitKey.of(model, CLUSTER, layout), bounded=False)


# Of a token: keys and values of 2 heads of 64; of 4 heads keys of 32 + 16, values of 24.
@pytest.mark.parametrize(("model", "each"), [(GROUPED, 2 * (64 + 64)), (LATENT, 4 * (48 + 24))])
@pytest.mark.parametrize("sequence", [False, True])
def test_a_block_gathers_keys_and_values_once(
    model: Transformer, each: int, sequence: bool
) -> None:
    tp = 2 if sequence else 1
    layout = Layout(tp, 1, 4 // tp // 2, 2, sequence=sequence, cp=2, cp_comm_type="all_gather")
    problem = unit(model, layout).problem
    plain = unit(model, Layout(tp, 1, 4 // tp, 2, sequence=sequence)).problem
    size = 2 * 256 * each * 2 // tp  # sequences, tokens, elements, bytes
    machine = load_hardware(CLUSTER.hardware)
    near = 2 if CLUSTER.gpus_per_node >= 4 else 1
    for kind in ("all_gather", "reduce_scatter"):
        expected = machine.collective_ns(kind, size, 2, near)

        def took(starts: object, kind: str = kind) -> list[int]:
            return [
                starts.cost(op.name).comm_ns  # type: ignore[attr-defined]
                for op in starts.trace.ops  # type: ignore[attr-defined]
                if op.role == "start" and kind in op.signature
            ]

        mine = took(problem)
        assert len(mine) - len(took(plain)) == model.layers
        assert mine.count(expected) >= model.layers


def test_everything_else_is_divided() -> None:
    one, two = (unit(GROUPED, Layout(1, 1, 4 // cp, 2, cp=cp)) for cp in (1, 2))
    assert one.boundary_bytes == 2 * two.boundary_bytes
    large = replace(GROUPED, width=4096, heads=32, kv_heads=8, ffn=14336, seq=8192, layers=1)
    whole, part = (unit(large, Layout(1, 1, 4 // cp, 1, cp=cp)) for cp in (1, 2))
    took = [sum(cost.compute_ns for cost in each.problem.costs) for each in (whole, part)]
    assert took[1] / took[0] == pytest.approx(0.5, rel=0.1)  # but sums of weight gradients


def test_weights_are_those_of_all_replicas() -> None:
    """Context-parallel ranks have the same weights: they sum gradients and share the optimizer."""
    by_data, by_context = Layout(1, 1, 4, 2), Layout(1, 1, 2, 2, cp=2)
    assert static_bytes(GROUPED, by_context) == static_bytes(GROUPED, by_data)
    parameters = GROUPED.parameters()
    assert static_bytes(GROUPED, by_context) == [parameters * 6 + parameters * 12 // 4]
    assert Update.of(GROUPED, CLUSTER, by_context) == Update.of(GROUPED, CLUSTER, by_data)


def test_layouts_have_it_only_when_asked() -> None:
    assert {layout.cp for layout in layouts(GROUPED, CLUSTER)} == {1}
    found = list(layouts(GROUPED, CLUSTER, Fixed(cp=2)))
    assert found
    for layout in found:
        assert layout.tp * layout.cp * layout.pp * layout.dp == 4
        assert layout.cp == 2
        assert str(layout).startswith(f"tp={layout.tp}{'+sp' * layout.sequence} cp=2 ")
    for model, cluster, cp in (
        (GROUPED, CLUSTER, 3),
        (replace(GROUPED, seq=250), CLUSTER, 2),
        (GROUPED, replace(CLUSTER, framework="megatron-2021"), 2),
    ):
        with pytest.raises(OptionError, match=f"cp={cp} on 4 GPUs"):
            list(layouts(model, cluster, Fixed(cp=cp)))


def test_a_step_of_long_sequences_needs_less_memory() -> None:
    cluster = replace(CLUSTER, global_batch=4)
    steps = [
        evaluate(GROUPED, cluster, layout, unit(GROUPED, layout)).found
        for layout in (Layout(1, 1, 4, 1), Layout(1, 1, 2, 1, cp=2))
    ]
    assert steps[1].peak_bytes < steps[0].peak_bytes
    assert steps[1].microbatches == 2 * steps[0].microbatches
    assert steps[1].exposed_ns["tp"] > 0
    best = search(GROUPED, cluster, Fixed(cp=2), workers=1).best
    assert best is not None
    assert best.layout.cp == 2


def test_megatron_is_told() -> None:
    said = list(megatron_arguments(Layout(2, 1, 2, 1, cp=4), (8,), 8))
    assert "--context-parallel-size 4" in said
    assert "--cp-comm-type all_gather" in said
    assert "--global-batch-size 16" in said
