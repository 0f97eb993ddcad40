"""What is fitted to times of kernels is what they were made with."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlapc.profiler.kernels import AttentionTime, ProductTime, fit, layers
from overlapc.profiler.shapes import Kernels, filled, splits

PEAK, MULTIPROCESSORS = 700e12, 132
TRUE = Kernels(
    MULTIPROCESSORS,
    128,
    {"tn": 0.95, "nn": 0.9, "nt": 0.8, "attention_forward": 0.7, "attention_backward": 0.6},
    {"attention_forward_fill": 0.7, "attention_backward_fill": 2.0},
)


def product(m: int, n: int, k: int, layout: str, slower: float = 1.0) -> ProductTime:
    ns = 2 * m * n * k / (PEAK * TRUE.matmul_part(m, n, k, layout)) * 1e9
    return ProductTime(m, n, k, layout, slower * ns)


def attention(heads: int, seq: int, backward: bool) -> AttentionTime:
    kind = "attention_backward" if backward else "attention_forward"
    flops = 2 * heads * seq**2 * 128 * (2.5 if backward else 1)
    rate = PEAK * TRUE.attention_part(heads, seq, seq, kind, True)
    return AttentionTime(heads, seq, backward, flops / rate * 1e9)


PRODUCTS = [product(*shape) for shape in layers()]
ATTENTION = [
    attention(heads, seq, backward)
    for heads, seq in ((8, 2048), (64, 2048), (4, 4096), (32, 8192), (128, 1024))
    for backward in (False, True)
]


def test_the_figures_are_found_again() -> None:
    assert fit(PRODUCTS, ATTENTION, PEAK, MULTIPROCESSORS) == TRUE


def test_a_few_odd_times_change_little() -> None:
    shapes = list(layers())
    odd = [product(*shape, slower=3 if i % 7 == 0 else 1) for i, shape in enumerate(shapes)]
    found = fit(odd, ATTENTION, PEAK, MULTIPROCESSORS)
    assert found.ramp == TRUE.ramp
    assert found.parts == pytest.approx(dict(TRUE.parts), rel=0.02)


def test_no_part_is_above_the_peak() -> None:
    found = fit(PRODUCTS, ATTENTION, PEAK / 2, MULTIPROCESSORS)
    assert all(part <= 1 for part in found.parts.values())


LOSES = replace(TRUE, aligned=((2, 0.4), (4, 0.6), (8, 0.7), (16, 1)), writing=2.0)


@pytest.mark.parametrize(
    ("m", "n", "k", "layout", "width", "part"),
    [
        (999, 1024, 512, "tn", 2, 1.0),  # no row is m long
        (1024, 1024, 516, "tn", 2, 0.7),
        (1024, 1022, 512, "tn", 2, 0.6),
        (1024, 1024, 511, "nn", 2, 0.4),
        (1024, 1021, 512, "nn", 2, 0.4),
        (1024, 1024, 511, "nt", 2, 1.0),  # neither is k
        (1021, 1024, 512, "nt", 2, 0.4),
        (1024, 1022, 512, "nn", 4, 0.7),
        (1024, 1022, 512, "nn", 8, 1.0),
        (1024, 1024, 513, "tn", 1, 0.4),
        (1024, 127, 511, "nn", 2, 0.4),  # narrow ones lose as much
        (127, 1024, 511, "nt", 2, 0.4),
        (1024, 1024, 1, "nn", 2, 1.0),
    ],
)
def test_rows_that_are_not_aligned_cost_a_product_a_part_of_its_rate(
    m: int, n: int, k: int, layout: str, width: int, part: float
) -> None:
    of_all = TRUE.matmul_part(m, n, k, layout)
    assert LOSES.matmul_part(m, n, k, layout, 1, width) == pytest.approx(part * of_all)


@pytest.mark.parametrize("width", [64, 128, 512])
def test_sums_of_few_results_are_cut(width: int) -> None:
    """A small weight's gradient over 64 times the tokens takes far less than 64 times as long (57
    times if its sum were not cut)."""
    short, long = (
        tokens / TRUE.matmul_part(width, width, tokens, "nt") for tokens in (1024, 65536)
    )
    assert long < 40 * short
    pieces = max(splits(width, width, 1, MULTIPROCESSORS))
    tiles = (-(-width // 128)) ** 2
    assert MULTIPROCESSORS / 2 < pieces * tiles <= MULTIPROCESSORS
    assert filled(width, width, 1, MULTIPROCESSORS) < 0.4
    assert TRUE.matmul_part(width, width, 65536, "nt") > 0.5 * TRUE.parts["nt"]


@given(*(st.integers(1, 20_000) for _ in range(3)), st.integers(1, 64))
def test_a_product_reaches_no_more_than_its_layout(m: int, n: int, k: int, batch: int) -> None:
    assert TRUE.matmul_part(m, n, k, "tn", batch) <= TRUE.parts["tn"]
    if m * n * batch > 128 * 128 * MULTIPROCESSORS:
        assert list(splits(m, n, batch, MULTIPROCESSORS)) == [1]


def test_what_a_product_writes_hides_in_part() -> None:
    assert TRUE.product_ns(300, 400) == 400
    assert LOSES.product_ns(300, 400) == pytest.approx(500)
    assert LOSES.product_ns(300, 0) == 300
    assert LOSES.product_ns(0, 400) == 400
    assert LOSES.product_ns(4e9, 1) == pytest.approx(4e9)
