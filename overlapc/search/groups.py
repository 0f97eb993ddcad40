"""`fake_groups` makes the process groups of a layout, on fake ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from math import lcm
from typing import TypeAlias

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from overlapc.core.errors import OptionError

_Group: TypeAlias = "dist.ProcessGroup | None"


@contextmanager
def fake_groups(
    ranks: int, tp: int, expert_ranks: int, cp: int = 1, expert_step: int = 0, node: int = 0
) -> Iterator[tuple[_Group, _Group, _Group]]:
    """Make the first rank's tensor-parallel group, of neighbours, and its experts' and its
    context-parallel group, one of each of these; none for one rank. Ranks that divide the experts
    are `expert_step` apart, by default one of each tensor-parallel group. Groups lie on nodes of
    so many ranks as the worst of their kind. The process has no process groups before and
    after."""
    if dist.is_initialized():
        raise OptionError(
            "the search captures models on fake ranks, but this process is a rank of a job "
            "already: run it in a process of its own"
        )

    def group(members: list[int]) -> dist.ProcessGroup | None:
        return dist.new_group(members) if len(members) > 1 else None

    sizes = (tp, 1), (expert_ranks, expert_step or tp), (cp, tp)
    members = [spread(count, step, ranks, node) for count, step in sizes]
    most = max(ranks, *(max(each) + 1 for each in members))
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=most)
    try:
        tensor, *others = map(group, members)
        yield tensor, others[0], others[1]
    finally:
        dist.destroy_process_group()


def spread(count: int, step: int, ranks: int, node: int) -> list[int]:
    """Return a group of so many ranks, `step` apart, that begins with the first rank and lies on
    nodes as that one of all `ranks` does which has fewest on any node: groups of six on nodes of
    eight, for one, are whole on a node, or two and four."""
    span = count * step
    if not node or node % span == 0 or span % node == 0:
        return [r * step for r in range(count)]
    firsts = range(0, min(lcm(span, node), max(ranks, span)) - span + 1, span)
    lying = (Counter((first + r * step) // node for r in range(count)) for first in firsts)
    worst = min(lying, key=lambda each: max(each.values()))
    return [n * node + r for n, held in enumerate(worst.values()) for r in range(held)]
