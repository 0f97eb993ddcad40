"""`fake_groups` makes the process groups of a layout, on fake ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeAlias

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from overlapc.errors import OptionError

_Group: TypeAlias = "dist.ProcessGroup | None"


@contextmanager
def fake_groups(
    ranks: int, tp: int, expert_ranks: int, cp: int = 1, expert_step: int = 0
) -> Iterator[tuple[_Group, _Group, _Group]]:
    """Make the first rank's tensor-parallel group, of neighbours, and its experts' and its
    context-parallel group, one of each of these; none for one rank. Ranks that divide the experts
    are `expert_step` apart, by default one of each tensor-parallel group. The process has no
    process groups before and after."""
    if dist.is_initialized():
        raise OptionError(
            "the search captures models on fake ranks, but this process is a rank of a job "
            "already: run it in a process of its own"
        )

    def group(members: list[int]) -> dist.ProcessGroup | None:
        return dist.new_group(members) if len(members) > 1 else None

    sizes = (tp, 1), (expert_ranks, expert_step or tp), (cp, tp)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        tensor, *others = (group([r * step for r in range(count)]) for count, step in sizes)
        yield tensor, others[0], others[1]
    finally:
        dist.destroy_process_group()
