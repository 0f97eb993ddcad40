"""`needed_bytes` says what a run needs of a GPU besides what its allocator hands out; `answer`
whether it will run.

A plan's peak is what tensors take. Beside them there are CUDA's context, the buffers of NCCL's
communicators and cuBLAS's workspace; and the allocator keeps more than it hands out, because blocks
of the sizes that are asked for are not free where others are.
"""

from __future__ import annotations

from typing import Literal

from overlapc.profiler.hardware import Hardware
from overlapc.search.layouts import Layout

Answer = Literal["fits", "risky", "does not fit"]

# CUDA's context with PyTorch's kernels on an A100: what nvidia-smi shows after the first tensor.
CONTEXT_BYTES = 500_000_000
# Of a communicator: up to 24 channels, for each a ring's two ends with 4 MiB of NCCL_BUFFSIZE and
# 1 MiB for the protocols of small messages (NCCL's documentation of its environment).
COMMUNICATOR_BYTES = 24 * 2 * 5 * 2**20
# PyTorch's notes on CUDA: 8 MiB, and 32 MiB from Hopper on; for two handles.
CUBLAS_BYTES = 2 * 32 * 2**20
# What the allocator keeps of freed blocks, as a part of what is not there throughout. Calibrated by
# `layouts-13b`: with less the runs that failed of it are said to fit.
FRAGMENTS = 0.20
# So near the whole of a GPU's memory nobody knows: a run may fit, fail, or take several times as
# long, because the allocator frees and asks again. Calibrated by `layouts-13b`.
EDGE = 0.07


def needed_bytes(layout: Layout, static_bytes: int, peak_bytes: int) -> int:
    """What a rank needs whose tensors take so much at the peak, and so much throughout."""
    divided = layout.tp, layout.cp, layout.pp, layout.dp
    groups = 2 + sum(ranks > 1 for ranks in divided)  # all, and nodes
    beside = CONTEXT_BYTES + groups * COMMUNICATOR_BYTES + CUBLAS_BYTES
    return peak_bytes + round(FRAGMENTS * max(0, peak_bytes - static_bytes)) + beside


def answer(machine: Hardware, needed: int) -> Answer:
    """Whether a GPU has enough."""
    share = needed / machine.total_bytes
    if share <= 1 - EDGE:
        return "fits"
    return "risky" if share <= 1 + EDGE else "does not fit"
