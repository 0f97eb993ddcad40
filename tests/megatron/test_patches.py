"""Megatron's releases have what is replaced in them."""

from __future__ import annotations

import pytest

from overlapc.passes.exact.patches import missing
from tests.megatron import cpu
from tests.multiprocess.spawn import run_ranks

pytestmark = pytest.mark.multiprocess


def absent(rank: int, ranks: int, version: str) -> list[str]:
    cpu.use(version, te="2.9")
    return missing("megatron")


def test_one_of_two_releases_has_each() -> None:
    found = []
    for version in ("0.16.1", "0.19.2"):
        cpu.need(version)
        (names,) = run_ranks(absent, 1, version, timeout_s=60)
        found.append(set(names))
    print(found)
    assert set.intersection(*found) == set()
