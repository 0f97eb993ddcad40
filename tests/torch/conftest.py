"""Fixtures of the tests on one process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from overlapc.solvers.constants import MERGED
from tests.slow import slow_hardware


@pytest.fixture
def short_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer orders of slices and of merged microbatches are tried."""
    for module in ("slices", "merging"):
        monkeypatch.setattr(f"overlapc.solvers.order.{module}.MERGED", MERGED // 20)


@pytest.fixture
def auto(tmp_path: Path, short_search: None) -> dict[str, Any]:
    """Options with which slices are predicted to be faster."""
    hardware = slow_hardware(tmp_path)
    return {"slices": "auto", "profile": "estimate", "hardware": hardware, "solver": "heu"}


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()
