"""The loops that people write, each two steps long: planned, they end bitwise as plain PyTorch."""

from __future__ import annotations

import random
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

import tests.loops.libraries
import tests.loops.plain  # noqa: F401 (both add to LOOPS)
from tests.loops.loop import LOOPS, Door, State

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]


def ended(name: str, planned: bool, folder: Path) -> tuple[State, Door, list[str]]:
    """How a loop ends, and what overlapc warns of."""
    folder.mkdir()
    door = Door(planned, folder)
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = LOOPS[name].run(door)
    return found, door, [str(w.message) for w in caught if "overlapc" in str(w.message)]


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_ends_as_plain_pytorchs(name: str, tmp_path: Path) -> None:
    for package in LOOPS[name].needs:
        pytest.importorskip(package, reason="install the extra: pip install -e '.[zoo]'")
    expected, _, _ = ended(name, False, tmp_path / "plain")
    found, door, said = ended(name, True, tmp_path / "planned")
    assert found.keys() == expected.keys()
    different = [key for key in found if not torch.equal(found[key], expected[key])]
    assert different == []
    assert said == []
    for front in door.planned:
        assert front.graphs
        assert front.fallbacks == []


def test_there_are_fifty() -> None:
    assert len(LOOPS) >= 50
