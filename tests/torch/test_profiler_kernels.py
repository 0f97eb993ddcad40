"""What `overlapc profile` times on a GPU runs; here it does on a CPU, with small sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from overlapc.profiler import kernels


def timed(run: Callable[[], Any]) -> float:
    run()
    return 1000.0


def test_products_are_of_all_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_LAYERS", ((8, 4, 16),))
    found = kernels.time_products(timed, "cpu")
    assert [(t.m, t.n, t.k, t.layout) for t in found] == [
        (8, 16, 4, "tn"),
        (8, 4, 16, "nn"),
        (16, 4, 8, "nt"),
    ]
    assert found[0].rate() == 2 * 8 * 16 * 4 / 1e-6


def test_attention_is_timed_in_both_directions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_ATTENTION", ((2, 16),))
    found = kernels.time_attention(timed, "cpu")
    assert [(t.heads, t.seq, t.backward) for t in found] == [(2, 16, False), (2, 16, True)]
    assert found[1].rate() == 2.5 * found[0].rate()


def test_streams_have_the_names_that_files_have(monkeypatch: pytest.MonkeyPatch) -> None:
    from overlapc.profiler.hardware import load_hardware

    monkeypatch.setattr(kernels, "_STREAMED", (8, 16))
    monkeypatch.setattr(kernels, "_SCORES", (4, 32))
    found = kernels.time_streams(timed, "cpu")
    assert found.keys() == load_hardware("h100-sxm").streams.keys()
    assert found["norm"] == 2 * 8 * 16 * 2 / 1e-6
