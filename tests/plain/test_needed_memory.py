"""What a run needs besides its tensors, and what is said of it near the whole of a GPU."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from overlapc.profiler.hardware import known_hardware, load_hardware
from overlapc.report.scoreboard import Score
from overlapc.search.layouts import Layout
from overlapc.search.memory import COMMUNICATOR_BYTES, answer, needed_bytes
from overlapc.search.public import Predicted, load_table
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
    assert answer(machine, machine.total_bytes) == "risky"
    for name in known_hardware():
        other = load_hardware(name)
        assert other.memory_bytes <= other.total_bytes <= 1.1 * other.memory_bytes


def test_what_is_risky_is_neither_right_nor_wrong() -> None:
    table = next(load_table(path) for path in TABLES if path.stem == "layouts-13b")
    fits = next(row for row in table.rows if row.fits)
    fails = next(row for row in table.rows if not row.fits)
    found = [
        Predicted(fits, 1, needed_bytes=40 * GB),
        Predicted(fits, 1, needed_bytes=120 * GB),
        Predicted(fails, needed_bytes=85 * GB),
        Predicted(fails, needed_bytes=120 * GB),
    ]
    score = Score.of(found)
    assert score.fits_right == (2, 3)
    assert score.risky == 1
