"""Damaged plan and profile files: a FileError each time, and the file stays as it is."""

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from overlapc.core.errors import FileError
from overlapc.core.files import load_plan, load_profile
from overlapc.core.text import format_plan, format_profile
from tests.plain.strategies import random_plan, random_problem

CASES = 5200  # of each kind


def damaged(data: bytes, rng: Random) -> bytes:
    """`data` cut short, with bits flipped, with bytes put in, taken out, repeated or zeroed."""
    at = rng.randrange(len(data))
    end = min(len(data), at + rng.randint(1, 40))
    kind = rng.choice(("cut", "flip", "flip", "insert", "insert", "drop", "repeat", "zero", "tail"))
    if kind == "cut":
        return data[:at]
    if kind == "flip":
        flipped = bytearray(data)
        for _ in range(rng.choice((1, 1, 2, 8))):
            flipped[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        return bytes(flipped)
    if kind == "insert":
        return data[:at] + rng.randbytes(rng.choice((1, 1, 1, 4))) + data[at:]
    if kind == "drop":
        return data[:at] + data[end:]
    if kind == "repeat":
        return data[:end] + data[at:]
    if kind == "zero":
        return data[:at] + bytes(end - at) + data[end:]
    return data + rng.choice((b"\n", b" ", b"\0", data))


@pytest.mark.parametrize("kind", ["plan", "profile"])
def test_damaged_files(kind: str, tmp_path: Path) -> None:
    load: Callable[[Path], Any] = load_plan if kind == "plan" else load_profile
    path = tmp_path / kind
    changed = 0
    for seed in range(CASES):
        rng = Random(seed)
        if seed % 40 == 0:
            problem = random_problem(rng, max_ops=5)
            plan = random_plan(problem, rng)
            original = plan if kind == "plan" else problem.profile
            text = format_plan(plan) if kind == "plan" else format_profile(problem.profile)
        data = damaged(text.encode(), rng)
        path.write_bytes(data)
        try:
            loaded = load(path)
        except FileError:
            changed += 1
        else:
            assert data == text.encode(), seed
            assert loaded == original
        assert path.read_bytes() == data
    assert changed > 0.98 * CASES
    assert list(tmp_path.iterdir()) == [path]
