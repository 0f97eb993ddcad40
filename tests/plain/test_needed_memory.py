"""What a run needs besides its tensors, and what is said of it near the whole of a GPU."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from overlapc.profiler.hardware import known_hardware, load_hardware
from overlapc.report.answer import Answer
from overlapc.report.scoreboard import Score
from overlapc.report.verdict import _room
from overlapc.search.evaluate import Found
from overlapc.search.layouts import Cluster, Layout
from overlapc.search.memory import (
    COMMUNICATOR_BYTES,
    answer,
    needed_bytes,
    run_bytes,
    tensor_bytes,
    usable_bytes,
)
from overlapc.search.presets import find_model
from overlapc.search.search import Result
from overlapc.validation.public import Predicted, load_table
from tests.plain.test_public import TABLES

GB = 10**9
ALONE = Layout(1, 1, 1, 1)


@given(st.integers(0, 100 * GB), st.integers(0, 100 * GB))
def test_more_tensors_need_more_and_never_less_than_themselves(static: int, dynamic: int) -> None:
    peak = static + dynamic
    needed = needed_bytes(ALONE, static, peak)
    assert needed > peak
    assert needed <= needed_bytes(ALONE, static, peak + 1)
    assert needed_bytes(ALONE, static, peak) >= needed_bytes(ALONE, peak, peak)  # less is freed


def test_every_kind_of_group_has_buffers_of_its_own() -> None:
    layouts = ALONE, Layout(2, 1, 1, 1), Layout(2, 2, 1, 1), Layout(2, 2, 2, 1)
    needed = [needed_bytes(layout, GB, 2 * GB) for layout in layouts]
    assert [b - a for a, b in pairwise(needed)] == [COMMUNICATOR_BYTES] * 3


def test_near_the_edge_nothing_is_certain() -> None:
    machine = load_hardware("a100-sxm-80")
    assert machine.total_bytes > machine.memory_bytes
    said = [answer(machine, GB * size) for size in range(60, 110)]
    assert said == sorted(said, key=("fits", "risky", "does not fit").index)
    assert answer(machine, usable_bytes(machine)) == "fits"
    assert answer(machine, usable_bytes(machine) + 1) == "risky"
    assert answer(machine, machine.total_bytes) == "risky"
    assert answer(machine, machine.total_bytes + 1) == "does not fit"
    for name in known_hardware():
        other = load_hardware(name)
        assert other.memory_bytes <= other.total_bytes <= 1.1 * other.memory_bytes


def test_a_winner_without_room_is_shown_beside_one_that_has_room() -> None:
    model, machine = find_model("gpt-1.3b"), load_hardware("a100-sxm-80")
    cluster = Cluster("a100-sxm-80", 8, 8, 80 * GB, 64)

    def found(microbatch: int, step_ns: int, peak: int) -> Found:
        layout = Layout(1, 1, 8, microbatch)
        return Found(layout, "heu", step_ns, peak_bytes=(peak,), layers=(24,))

    full, half, little = found(4, 1_000_000, 78 * GB), found(2, 1_020_000, 40 * GB), found(1, 2, 3)
    small = replace(little, step_ns=1_500_000)
    said = _room(model, cluster, Result(full, tried=[full, small, half]), full, machine)
    assert "leaves room: tp=1 pp=1 dp=8 microbatch=2, 1.020 ms (2.0% more), 47" in said[0]
    assert _room(model, cluster, Result(half, tried=[half]), half, machine) == []
    (alone,) = _room(model, cluster, Result(full, tried=[full]), full, machine)
    assert "a smaller --memory asks for one" in alone
    told = Answer.of(model, cluster, machine, Result(full, tried=[full]))
    assert told is not None
    assert re.search(r"needs 78.0 of 80.0 GB, does not fit: 9\d.\d with what CUDA", told.memory)


@given(
    st.integers(0, 100 * GB), st.integers(0, 90 * GB), st.sampled_from([ALONE, Layout(2, 2, 2, 1)])
)
def test_what_a_run_may_take_is_what_its_tensors_may_and_all_beside_them(
    static: int, usable: int, layout: Layout
) -> None:
    """One definition: what is planned within `tensor_bytes` takes at most `memory_bytes`."""
    cluster = Cluster("a100-sxm-80", 8, 8, usable, 64, of_run=True)
    most = tensor_bytes(cluster, layout, static)
    if most >= static:
        assert run_bytes(cluster, layout, static, most) <= usable
        assert run_bytes(cluster, layout, static, most + 1) > usable
    else:
        assert run_bytes(cluster, layout, static, static) > usable
    alone = replace(cluster, of_run=False)
    assert tensor_bytes(alone, layout, static) == usable
    assert run_bytes(alone, layout, static, usable) == usable


def test_what_is_risky_is_neither_right_nor_wrong() -> None:
    table = next(load_table(path) for path in TABLES if path.stem == "layouts-13b")
    fits = next(row for row in table.rows if row.fits)
    fails = next(row for row in table.rows if not row.fits)
    found = [
        Predicted(fits, 1, needed_bytes=40 * GB),
        Predicted(fits, 1, needed_bytes=120 * GB),
        Predicted(fails, needed_bytes=84 * GB),
        Predicted(fails, needed_bytes=120 * GB),
    ]
    score = Score.of(found)
    assert score.fits_right == (2, 3)
    assert score.risky == 1
