"""Models whose first layers have no experts: the search costs them as what they are."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from overlapc.search.captures import UnitKey
from overlapc.search.evaluate import evaluate, lower_bound
from overlapc.search.layouts import Cluster, Fixed, Layout, layouts
from overlapc.search.models.transformer import Transformer
from overlapc.search.place import Place
from overlapc.search.search import search
from overlapc.search.units import Unit, make_unit

MODEL = Transformer(
    "first", layers=6, width=256, heads=4, ffn=2048, vocab=512, seq=128, gated=True, experts=4,
    top_k=2, expert_width=320, shared_width=320, dense_first=2,
)  # fmt: skip
CLUSTER = Cluster("a100-sxm-80", 2, 8, 1 << 36, 4)
ONE, TWO = Layout(1, 1, 2, 2), Layout(1, 2, 1, 2)
THREE = Layout(1, 3, 1, 2), replace(CLUSTER, gpus=3)


@cache
def unit(layout: Layout, cluster: Cluster = CLUSTER, model: Transformer = MODEL) -> Unit:
    return make_unit(UnitKey.of(model, cluster, layout))


def place(rank: int, layers: tuple[int, ...]) -> Place:
    layout, cluster = THREE
    of = unit(layout, cluster), layout.rows(4), rank, layers
    return Place.of(MODEL, cluster, layout, *of)


def test_a_unit_has_both_kinds_of_blocks() -> None:
    found = unit(ONE)
    assert found.first is not None
    assert found.first.blocks == 2
    assert found.blocks == 4
    assert not found.first.problem.trace.lanes
    assert found.problem.trace.lanes
    assert found.first.first is None
    for without in (replace(MODEL, dense_first=0), MODEL.of_first):
        assert without is not None
        assert without.of_first is None


@pytest.mark.parametrize(
    ("layers", "dense"),
    [((2, 2, 2), [2, 0, 0]), ((1, 2, 3), [1, 1, 0]), ((4, 1, 1), [2, 0, 0])],
)
def test_first_layers_are_where_they_are(layers: tuple[int, ...], dense: list[int]) -> None:
    assert [sum(place(rank, layers).dense) for rank in range(3)] == dense
    found = place(0, layers)
    parts = found.parts(unit(*THREE))
    assert sum(part.layers for part, _ in parts) == layers[0]
    assert len(parts) == 1 + (dense[0] < layers[0])
    assert [of is unit(*THREE).first for _, of in parts] == [True, False][: len(parts)]
    # each of three microbatches in flight
    assert (found.in_flight, found.dense_in_flight) == (3 * (layers[0] - dense[0]), 3 * dense[0])


def step(layers: int, dense_first: int, ends: bool = True) -> tuple[int, int]:
    """(time, peak) of a microbatch that keeps all, on one rank, without the update."""
    model = replace(MODEL, layers=layers, dense_first=dense_first)
    if layers == dense_first:
        model = model.of_first or model
    alone = Cluster("a100-sxm-80", 1, 8, 1 << 36, 2)
    layout = Layout(1, 1, 1, 2)
    of = make_unit(UnitKey.of(model, alone, layout), bounded=False, most=2)
    outcome = evaluate(model, alone, layout, of, "megatron-none", bounded=False)
    (stage,) = outcome.stages
    return stage.microbatch_ns, stage.report.peak_bytes


def test_times_add_up() -> None:
    """Two dense layers and four with experts take as much more than two and two as two more layers
    of a model in which all have experts."""
    mixed, fewer = step(6, 2)[0], step(4, 2)[0]
    assert mixed - fewer == pytest.approx(step(6, 0)[0] - step(4, 0)[0], abs=4)
    dense = step(2, 2)[0], step(4, 4)[0]
    assert step(6, 4)[0] - fewer == pytest.approx(dense[1] - dense[0], abs=4)


@pytest.mark.parametrize("layout", [ONE, TWO])
@pytest.mark.parametrize("solver", ["heu", "megatron-none", "megatron-full"])
def test_no_step_is_below_its_bound(layout: Layout, solver: str) -> None:
    of = unit(layout).planned_by(solver)
    found = evaluate(MODEL, CLUSTER, layout, unit(layout), solver).found
    assert found.fits
    assert lower_bound(MODEL, CLUSTER, layout, of) <= found.step_ns


@pytest.mark.parametrize("layout", [ONE, TWO])
@pytest.mark.parametrize("solver", ["heu", "megatron-none", "megatron-full"])
def test_the_memory_that_is_named_is_enough(layout: Layout, solver: str) -> None:
    """Both kinds of blocks share a rank's memory, down to the least."""
    roomy = evaluate(MODEL, CLUSTER, layout, unit(layout), solver).found
    none = replace(CLUSTER, memory_bytes=1 << 20)
    size, refused = 0, evaluate(MODEL, none, layout, unit(layout), solver).found
    while not refused.fits:
        assert refused.smallest_bytes > size
        size = refused.smallest_bytes
        tight = replace(CLUSTER, memory_bytes=size)
        refused = evaluate(MODEL, tight, layout, unit(layout), solver).found
    assert max(refused.peak_bytes) <= size <= max(roomy.peak_bytes)
    for share in (0.3, 0.6, 0.9):
        some = size + round(share * (max(roomy.peak_bytes) - size))
        found = evaluate(MODEL, replace(CLUSTER, memory_bytes=some), layout, unit(layout), solver)
        assert found.found.fits
        assert max(found.found.peak_bytes) <= some


@pytest.mark.slow
def test_pruning_loses_nothing() -> None:
    fixed = Fixed(microbatch=1)
    every = search(MODEL, CLUSTER, fixed, prune=False, workers=1)
    found = search(MODEL, CLUSTER, fixed, workers=1)
    assert found.best is not None
    assert every.best is not None
    assert found.best.step_ns == every.best.step_ns
    assert len(every.tried) == len(list(layouts(MODEL, CLUSTER, fixed)))
