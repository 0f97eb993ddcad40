"""The profile cache and link models: what is written is read back, damage never gets in."""

from __future__ import annotations

import contextlib
import json
import random
import warnings
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlapc.core.errors import FileError, InvalidProblem
from overlapc.core.ir import Slowdown
from overlapc.profiler.cache import Cache, default_path
from overlapc.profiler.link_model import Collective, Curve, LinkModel


def test_cache_keeps_figures_over_processes(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "figures.json"
    cache = Cache(path)
    assert cache.get("cpu", "mm") is None
    cache.put("cpu", "mm", (12, 0))
    assert cache.get("cpu", "mm") == (12, 0)
    other = Cache(path)  # opened before the first one saves
    other.put("cpu", "add", (3, 4))
    cache.save()
    other.save()
    third = Cache(path)
    assert (third.get("cpu", "mm"), third.get("cpu", "add")) == ((12, 0), (3, 4))
    assert third.get("gpu", "mm") is None
    assert [p.name for p in path.parent.iterdir()] == ["figures.json"]


def test_default_cache_is_where_the_environment_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OVERLAPC_CACHE", str(tmp_path))
    assert default_path() == tmp_path / "profile.json"
    monkeypatch.delenv("OVERLAPC_CACHE")
    assert default_path() == Path.home() / ".cache" / "overlapc" / "profile.json"


def test_damaged_default_cache_warns_once_and_is_rebuilt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OVERLAPC_CACHE", str(tmp_path))
    (tmp_path / "profile.json").write_text("{")
    with pytest.warns(RuntimeWarning, match="damaged.*measuring again") as caught:
        cache = Cache()
    assert len(caught) == 1
    cache.put("cpu", "mm", (1,))
    cache.save()
    assert Cache().get("cpu", "mm") == (1,)


def test_default_cache_that_cannot_be_written_only_warns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OVERLAPC_CACHE", str(tmp_path / "file" / "folder"))
    cache = Cache()
    cache.put("cpu", "mm", (1,))
    with pytest.warns(RuntimeWarning, match="going on without saving"):
        cache.save()
    assert cache.get("cpu", "mm") == (1,)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", "1", "{}", '{"overlapc": "plan"}', "[" * 100_000, "\x00"],
)
def test_named_cache_that_is_no_cache_is_left_alone(tmp_path: Path, text: str) -> None:
    path = tmp_path / "named"
    path.write_text(text)
    with pytest.raises(FileError, match="named"):
        Cache(path)
    assert path.read_text() == text


def test_cache_of_another_version(tmp_path: Path) -> None:
    path = tmp_path / "named"
    cache = Cache(path)
    cache.put("cpu", "mm", (1,))
    cache.save()
    data = json.loads(path.read_text())
    path.write_text(json.dumps(data | {"version": 2}))
    with pytest.raises(FileError, match="version 2"):
        Cache(path)


def test_any_flipped_bit_or_cut_is_noticed_or_harmless(tmp_path: Path) -> None:
    path = tmp_path / "named"
    cache = Cache(path)
    for n in range(20):
        cache.put(f"cpu {n % 3}", f"op {n}", (n, 1000 * n))
    cache.save()
    good = path.read_bytes()
    original = Cache(path)._entries
    rng = random.Random(0)
    for _ in range(500):
        damaged = bytearray(good)
        if rng.random() < 0.3:
            del damaged[rng.randrange(len(damaged)) :]
        else:
            damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        with contextlib.suppress(FileError):
            assert Cache(path)._entries == original  # a flipped blank, say


# --------------------------------------------------------------------------- link models


def curve(*points: tuple[int, int], ranks: int = 2) -> Curve:
    return Curve("g", "all_reduce", "float32", ranks, points, "measured")


def test_times_between_and_beyond_the_measured_sizes() -> None:
    line = curve((1000, 2000), (3000, 4000), (5000, 10_000))
    sizes = (0, 1, 500, 1000, 2000, 3000, 4000, 5000, 6000)
    assert [line.time_ns(s) for s in sizes] == [
        0, 1001, 1500, 2000, 3000, 4000, 7000, 10_000, 13_000,
    ]  # fmt: skip
    assert curve((1000, 2000)).time_ns(500) == 1000
    assert curve((1000, 100), (2000, 1000)).time_ns(10) == 1  # no negative latency
    assert curve((1000, 900), (2000, 500)).time_ns(4000) == 500  # noise does not end in zero
    assert curve(ranks=1).time_ns(1 << 30) == 0


@given(
    st.lists(
        st.tuples(st.integers(1, 10**9), st.integers(0, 10**10)),
        min_size=1,
        max_size=6,
        unique_by=lambda point: point[0],
    ),
    st.integers(0, 2 * 10**9),
)
def test_times_are_never_negative_and_exact_where_measured(
    points: list[tuple[int, int]], size: int
) -> None:
    line = curve(*sorted(points))
    assert line.time_ns(size) >= 0
    assert all(line.time_ns(at) == ns for at, ns in points)


MODEL = LinkModel(
    (curve((8, 5), (64, 6)), Curve("h", "p2p", "", 4, (), "cached")),
    Slowdown(1100, 1200),
    {"backend": "gloo"},
)


def test_link_model_reads_back() -> None:
    assert LinkModel.from_text(MODEL.to_text()) == MODEL
    assert MODEL.time_ns(Collective("g", "all_reduce", "float32", 64)) == 6


def test_link_model_says_what_it_lacks() -> None:
    with pytest.raises(
        InvalidProblem, match=r"no figure for broadcast.*all_reduce float32 on group g"
    ):
        MODEL.time_ns(Collective("g", "broadcast", "", 64))


def test_damaged_link_model_is_a_file_error() -> None:
    good = MODEL.to_text()
    rng = random.Random(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(500):
            text = list(good)
            if rng.random() < 0.3:
                del text[rng.randrange(len(text)) :]
            else:
                text[rng.randrange(len(text))] = chr(rng.randrange(32, 127))
            with contextlib.suppress(FileError):
                assert LinkModel.from_text("".join(text)) == MODEL
    for text in ("", "[]", "null", '{"overlapc": "links", "version": 9}', "[" * 100_000):
        with pytest.raises(FileError):
            LinkModel.from_text(text)
