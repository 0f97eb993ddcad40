"""What ranks of a process group that measure together need: `agree`, and who they are."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch
import torch.distributed as dist

_ops = torch.ops._c10d_functional


def rank_in(group: str) -> int:
    return dist.distributed_c10d._resolve_process_group(group).rank()


def ranks_in(group: str) -> int:
    return dist.distributed_c10d._resolve_process_group(group).size()


def backend_of(group: str) -> str:
    return str(dist.get_backend(dist.distributed_c10d._resolve_process_group(group)))


def agree(numbers: Sequence[int], how: str, group: str, device: torch.device) -> list[int]:
    """Return `max`, `min` or `sum` of the ranks' numbers, on every rank of the group; also a
    barrier."""
    if ranks_in(group) == 1:
        return list(numbers)
    tensor = torch.tensor(list(numbers), dtype=torch.int64, device=device)
    return [int(n) for n in _ops.wait_tensor(_ops.all_reduce(tensor, how, group)).tolist()]


def middle_mean(values: Sequence[int]) -> int:
    """The mean of the middle half. Gloo's all-to-all takes one of two times, depending on which
    rank is first; for many of them the mean is closer than the median, and stalls are still left
    out."""
    cut = len(values) // 4
    return int(statistics.mean(sorted(values)[cut : len(values) - cut]))
