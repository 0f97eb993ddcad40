"""Tests of this folder need a GPU; without one they are skipped.

PyTorch's deterministic kernels are on: without them eager differs from itself.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

# Read when cuBLAS is first used.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch


@pytest.fixture(autouse=True)
def gpu() -> Iterator[torch.device]:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    yield torch.device("cuda")
    torch.use_deterministic_algorithms(False)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
