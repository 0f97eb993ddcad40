"""First and last stages of a pipeline whose layers the user decides."""

from __future__ import annotations

from dataclasses import replace

import pytest

from overlapc.core.errors import OptionError
from overlapc.search.evaluate import Found
from overlapc.search.layouts import Cluster, Fixed, Layout, layouts, stage_layers
from overlapc.search.models.transformer import Transformer
from overlapc.search.search import search
from overlapc.search.weights import rank_parameters

MODEL = Transformer("small", layers=8, width=256, heads=4, ffn=1024, vocab=512, seq=256)
EXPERTS = replace(MODEL, experts=4, top_k=2, expert_width=512, moe_every=2)
CLUSTER = Cluster("a100-sxm-80", 4, 8, 1 << 40, 8)


@pytest.mark.parametrize(
    ("stages", "ends", "layers"),
    [
        (4, (1, 0), [1, 2, 3, 2]),
        (4, (0, 1), [2, 3, 2, 1]),
        (4, (1, 3), [1, 2, 2, 3]),
        (2, (3, 0), [3, 5]),
        (2, (3, 5), [3, 5]),
        (4, (0, 0), [2, 2, 2, 2]),
    ],
)
def test_layers_by_hand(stages: int, ends: tuple[int, int], layers: list[int]) -> None:
    assert stage_layers(MODEL, stages, ends) == layers


@pytest.mark.parametrize(("stages", "ends"), [(2, (3, 4)), (4, (4, 3)), (4, (9, 0)), (3, (7, 0))])
def test_what_does_not_divide_is_an_error(stages: int, ends: tuple[int, int]) -> None:
    with pytest.raises(OptionError, match=f"over {stages} stages with"):
        stage_layers(MODEL, stages, ends)


def test_blocks_that_belong_together_stay_together() -> None:
    assert stage_layers(EXPERTS, 3, (2, 0)) == [2, 4, 2]
    with pytest.raises(OptionError, match="multiples of 2"):
        stage_layers(EXPERTS, 2, (3, 0))


def test_parameters_are_those_of_the_layers() -> None:
    layout = Layout(1, 4, 1, 1, first_layers=1, last_layers=1)
    even = rank_parameters(MODEL, replace(layout, first_layers=0, last_layers=0))
    uneven = rank_parameters(MODEL, layout)
    each = (even[1][0]) // 2  # of a layer: two in the middle
    assert [dense for dense, _ in uneven] == [
        even[0][0] - each,
        3 * each,
        3 * each,
        even[3][0] - each,
    ]


def test_layouts_have_them_when_asked() -> None:
    asked = Fixed(first_layers=1, last_layers=3)
    found = list(layouts(MODEL, CLUSTER, asked))
    assert {layout.ends for layout in found} == {(1, 3)}
    assert {layout.schedule for layout in found} == {"1f1b", "zero-bubble"}
    assert {layout.pp for layout in found} == {4}  # two stages would leave layers over
    assert str(asked) == "--first-layers 1 --last-layers 3"
    assert not any(any(layout.ends) for layout in layouts(MODEL, CLUSTER))


def test_a_search_keeps_them() -> None:
    asked = Fixed(pp=4, first_layers=1, schedule="1f1b", microbatch=1)
    best = search(MODEL, CLUSTER, asked, workers=1).best
    assert best is not None
    assert best.layers == (1, 2, 3, 2)
    assert "ends=1,0" in str(best.layout)
    assert Found.parse(best.as_json()) == best


@pytest.mark.slow
def test_a_search_with_experts_keeps_them() -> None:
    fixed = Fixed(tp=2, pp=2, first_layers=2, microbatch=1)
    whole = search(EXPERTS, CLUSTER, fixed, workers=1).best
    assert whole is not None
    assert whole.layers == (2, 6)
