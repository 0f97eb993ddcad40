"""Fixtures of the tests on one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from overlapc.solvers.constants import MERGED

# Whose work takes as long as its bytes: half of it, half as long.
SLOW = """
name = "slow"
status = "made up"
base = "v100-sxm2-32"
memory.bytes_per_s = { value = 1e8, source = "made up" }
compute.launch_ns = { value = 10, source = "made up" }
intra.alpha_ns = { value = 10, source = "made up" }
intra.bytes_per_s = { value = 3e7, source = "made up" }
"""


@pytest.fixture
def short_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer orders of slices and of merged microbatches are tried."""
    for module in ("slices", "merging"):
        monkeypatch.setattr(f"overlapc.solvers.{module}.MERGED", MERGED // 20)


@pytest.fixture
def auto(tmp_path: Path, short_search: None) -> dict[str, Any]:
    """Options with which slices are predicted to be faster."""
    path = tmp_path / "slow.toml"
    path.write_text(SLOW)
    return {"slices": "auto", "profile": "estimate", "hardware": str(path), "solver": "heu"}
