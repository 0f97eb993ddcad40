"""What is fitted to times of kernels is what they were made with."""

from __future__ import annotations

import pytest

from overlapc.profiler.kernels import AttentionTime, ProductTime, fit, layers
from overlapc.profiler.shapes import Kernels

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
