"""These functions find the ranks that must agree on a graph: those that its collectives join."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterator, Sequence
from operator import methodcaller
from typing import TypeVar

import torch.distributed as dist

from overlapc.core.errors import CaptureError, OverlapcError, RankError
from overlapc.ranks.board import attend, own_board
from overlapc.ranks.exchange import TROUBLES, Exchange

T = TypeVar("T")


def ranks_of(groups: Sequence[str]) -> list[int]:
    """The global ranks that share the collectives of these process groups.

    A group in which one process stands for many (a fake group, the one-process fabric) needs no
    agreement. If a graph has several groups, all ranks of the world agree.
    """
    if not groups or not dist.is_initialized():
        return []
    real = [group for group in groups if not _stands_alone(group)]
    if not real:
        return []
    members = [
        dist.get_process_group_ranks(dist.distributed_c10d._resolve_process_group(group))
        for group in real
    ]
    widest = max(members, key=len)
    if all(set(ranks) <= set(widest) for ranks in members):
        return sorted(widest)
    return list(range(dist.get_world_size()))


def _stands_alone(group: str) -> bool:
    resolved = dist.distributed_c10d._resolve_process_group(group)
    return dist.get_backend(resolved) in ("fake", "overlapc_fabric")


class Attempts:
    """Numbers the graphs that a front door tries to plan, equally on all ranks. If one rank has a
    CaptureError for a graph, all ranks raise it for the graph of that number."""

    _doors = itertools.count()

    def __init__(self, door: str) -> None:
        self._door = f"{door} {next(self._doors)}"
        self._count = 0
        attend()
        self._told = False  # do the others know of the last CaptureError, from a round?

    @contextlib.contextmanager
    def exchange_for(
        self, groups: Sequence[str], timeout_s: float | None
    ) -> Iterator[Exchange | None]:
        """A round of planning the next graph among the ranks of these groups."""
        self._count += 1
        try:
            with exchange_of(ranks_of(groups), timeout_s, self._name) as exchange:
                yield exchange
        except CaptureError:
            self._told = True
            raise

    def refused(self, error: CaptureError) -> None:
        """Tell the others that this rank runs its last or next attempt as plain PyTorch."""
        if not self._told:
            self._count += 1
            if (board := own_board()) is not None:
                record = json.dumps([self._name, error.reason, error.place])
                board.send(methodcaller("set", f"refused/{board.rank}", record))
                board.send(methodcaller("add", TROUBLES, 1))
        self._told = False

    @property
    def _name(self) -> str:
        return f"{self._door}, graph {self._count}"


@contextlib.contextmanager
def exchange_for(groups: Sequence[str], timeout_s: float | None) -> Iterator[Exchange | None]:
    """A round of planning among the ranks of these groups, or None for a rank on its own."""
    with exchange_of(ranks_of(groups), timeout_s) as exchange:
        yield exchange


@contextlib.contextmanager
def exchange_of(
    ranks: Sequence[int], timeout_s: float | None, attempt: str = ""
) -> Iterator[Exchange | None]:
    """A round of planning among these ranks, or None for a rank on its own."""
    if len(ranks) < 2:
        yield None
        return
    with Exchange(ranks, timeout_s, attempt=attempt) as exchange:
        try:
            yield exchange
        except OverlapcError:
            raise
        except Exception as error:
            # The others raise, so this rank must not go on alone as plain PyTorch.
            raise RankError(f"planning failed on this rank: {error!r}") from error


def together(exchange: Exchange | None, what: str, found: T | CaptureError) -> T:
    """Return what this rank `found` if no rank has a CaptureError; else raise the first rank's
    CaptureError on every rank."""
    mine = ["", ""] if not isinstance(found, CaptureError) else [found.reason, found.place]
    told = [mine]
    if exchange is not None:
        told = [json.loads(data) for data in exchange.gather(what, json.dumps(mine).encode())]
    if isinstance(found, CaptureError):
        raise found
    for rank, (reason, place) in zip(exchange.ranks if exchange else (), told, strict=False):
        if reason:
            raise CaptureError(f"{reason} (on rank {rank})", place)
    return found
