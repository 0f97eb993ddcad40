"""`Later` tells all ranks of slices that are refused after the first step, when they no longer plan
together."""

from __future__ import annotations

import contextlib
import itertools
from datetime import timedelta
from operator import methodcaller

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from overlapc.errors import OptionError, RankError
from overlapc.runtime.line import PREFIX, has_peers, line_to

_numbers = itertools.count()  # all ranks patch alike


class Later:
    """What a rank refuses is written into the store before the rank goes on with the step. So a
    rank that the step makes wait for that one finds it when the step has ended."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._key = f"{PREFIX}/megatron {next(_numbers)}"
        self._mine: OptionError | None = None

    def tell(self, stage: int, error: OptionError) -> None:
        """Keep an error of this rank, and tell the others."""
        self._mine = self._mine or OptionError(f"stage {stage}: {error}")
        if has_peers():
            said = f"{self._mine} (on rank {dist.get_rank()})"
            line = line_to(_get_default_store(), dist.get_rank())
            line.call(methodcaller("set", f"{self._key}/refused", said), self._timeout_s)

    def found(self) -> OptionError | None:
        """What some rank has refused."""
        if self._mine is not None or not has_peers():
            return self._mine
        line = line_to(_get_default_store(), dist.get_rank())
        key = f"{self._key}/refused"
        if not line.call(methodcaller("check", [key]), self._timeout_s):
            return None
        return OptionError(line.call(methodcaller("get", key), self._timeout_s).decode())

    def leave(self) -> None:
        """Behind the first step: rank 0, whose process may host the store, goes on when all others
        have read what they were told. Then it may end at once."""
        if not has_peers():
            return
        rank, ranks = dist.get_rank(), dist.get_world_size()
        keys = [f"{self._key}/left/{other}" for other in range(1, ranks)]
        line = line_to(_get_default_store(), rank)
        with contextlib.suppress(RankError):  # a rank has ended: others say why
            if rank:
                line.call(methodcaller("set", keys[rank - 1], ""), self._timeout_s)
            else:
                wait = methodcaller("wait", keys, timedelta(seconds=self._timeout_s))
                line.call(wait, 2 * self._timeout_s)
