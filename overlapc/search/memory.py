"""What a run needs of a GPU: `needed_bytes` has it all, `usable_bytes` is what a run may take,
`answer` says whether it will run.

A plan's peak is what tensors take. Beside them there are CUDA's context, the buffers of NCCL's
communicators and cuBLAS's workspace; and the allocator keeps more than it hands out, because blocks
of the sizes that are asked for are not free where others are. A search plans within what a run may
take: `tensor_bytes` is what that leaves to tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from overlapc.profiler.hardware import Hardware
from overlapc.search.layouts import Cluster, Layout

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


def usable_bytes(machine: Hardware) -> int:
    """What a run may take of a GPU and leave room: all that CUDA reports but its edge."""
    return round((1 - EDGE) * machine.total_bytes)


def needed_bytes(layout: Layout, static_bytes: int, peak_bytes: int) -> int:
    """What a rank needs whose tensors take so much at the peak, and so much throughout."""
    divided = layout.tp, layout.cp, layout.pp, layout.dp
    groups = 2 + sum(ranks > 1 for ranks in divided)  # all, and nodes
    beside = CONTEXT_BYTES + groups * COMMUNICATOR_BYTES + CUBLAS_BYTES
    return peak_bytes + round(FRAGMENTS * max(0, peak_bytes - static_bytes)) + beside


def run_bytes(cluster: Cluster, layout: Layout, static_bytes: int, peak_bytes: int) -> int:
    """What such a rank takes of the cluster's `memory_bytes`."""
    return needed_bytes(layout, static_bytes, peak_bytes) if cluster.of_run else peak_bytes


def most_bytes(
    cluster: Cluster, layout: Layout, static: Sequence[int], peaks: Sequence[int]
) -> int:
    """The same of the rank that takes the most."""
    ranks = zip(static, peaks, strict=True)
    return max((run_bytes(cluster, layout, *rank) for rank in ranks), default=0)


def tensor_bytes(cluster: Cluster, layout: Layout, static_bytes: int) -> int:
    """The most that tensors may take at a rank's peak: `run_bytes` turned around."""
    if not cluster.of_run:
        return cluster.memory_bytes
    beside = needed_bytes(layout, static_bytes, static_bytes) - static_bytes
    left = cluster.memory_bytes - beside - static_bytes
    if left < 0:
        return static_bytes + left
    most = static_bytes + math.floor(left / (1 + FRAGMENTS))
    while needed_bytes(layout, static_bytes, most + 1) <= cluster.memory_bytes:
        most += 1
    while needed_bytes(layout, static_bytes, most) > cluster.memory_bytes:
        most -= 1
    return most


def answer(machine: Hardware, needed: int) -> Answer:
    """Whether a GPU has enough."""
    if needed <= usable_bytes(machine):
        return "fits"
    return "risky" if needed <= machine.total_bytes else "does not fit"
