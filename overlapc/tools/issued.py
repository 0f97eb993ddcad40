"""How many collectives this process has issued."""

from __future__ import annotations

import contextlib
from typing import Any

import torch.distributed as dist


def issued() -> dict[Any, int]:
    """By process group."""
    found = {}
    for group in list(dist.distributed_c10d._world.pg_map) if dist.is_available() else ():
        with contextlib.suppress(RuntimeError):  # a backend that does not count
            found[group] = group._get_sequence_number_for_group()
    return found


def issued_since(before: dict[Any, int]) -> dict[str, int]:
    """By the name of each group that issued any."""
    counts = {group: count - before.get(group, count) for group, count in issued().items()}
    return {group.group_name: count for group, count in counts.items() if count}
