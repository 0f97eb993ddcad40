"""Old objects are not looked at in the block, and what steers the collector is put back."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from overlapc.tools.collecting import of_young_alone


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    """Without the objects of other tests: the more there are, the later all are looked at."""
    before = gc.get_threshold()
    gc.freeze()
    gc.collect()
    yield
    gc.unfreeze()
    gc.set_threshold(*before)


def test_no_full_collection_in_the_block() -> None:
    gc.set_threshold(10, 2, 2)

    def collections() -> int:
        """Of old objects, while many are made that stay."""
        before = gc.get_stats()[2]["collections"]
        kept = [[[]] for _ in range(10_000)]
        return gc.get_stats()[2]["collections"] - before if kept else 0

    without = collections()
    with of_young_alone():
        assert collections() == 0
    assert without > 0


def test_thresholds_are_put_back_however_the_block_ends() -> None:
    gc.set_threshold(700, 10, 7)
    with pytest.raises(ZeroDivisionError), of_young_alone(), of_young_alone():
        _ = 1 / 0
    assert gc.get_threshold() == (700, 10, 7)


def test_thresholds_that_the_block_sets_stay() -> None:
    with of_young_alone():
        gc.set_threshold(500, 5, 5)
    assert gc.get_threshold() == (500, 5, 5)


def test_a_collector_that_is_off_stays_off() -> None:
    gc.disable()
    try:
        with of_young_alone():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()
