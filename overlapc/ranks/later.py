"""`Later` tells all ranks of slices that are refused after the first step, when they no longer plan
together."""

from __future__ import annotations

import contextlib
import itertools
from datetime import timedelta
from operator import methodcaller

import torch.distributed as dist

from overlapc.core.errors import OptionError, RankError
from overlapc.ranks.board import own_board

_LEAVE_S = 7.0
_numbers = itertools.count()  # all ranks patch alike


class Later:
    """What a rank refuses is written into the store before the rank goes on with the step. So a
    rank that the step makes wait for that one finds it when the step has ended."""

    def __init__(self) -> None:
        self._key = f"megatron {next(_numbers)}"
        self._mine: OptionError | None = None

    def tell(self, stage: int, error: OptionError) -> None:
        """Keep an error of this rank, and tell the others."""
        self._mine = self._mine or OptionError(f"stage {stage}: {error}")
        if (board := own_board()) is not None:
            board.put(f"{self._key}/refused", f"{self._mine} (on rank {board.rank})")

    def found(self) -> OptionError | None:
        """What some rank has refused."""
        board = own_board()
        if self._mine is not None or board is None:
            return self._mine
        (said,) = board.look([f"{self._key}/refused"])
        return None if said is None else OptionError(said.decode())

    def leave(self) -> None:
        """Behind the first step: rank 0, whose process may host the store, goes on when all others
        have read what they were told. Then it may end at once."""
        if (board := own_board()) is None:
            return
        keys = [f"{self._key}/left/{other}" for other in range(1, dist.get_world_size())]
        with contextlib.suppress(RankError):  # a rank has ended: others say why
            if board.rank:
                board.put(keys[board.rank - 1], "")
            else:
                board.call(methodcaller("wait", keys, timedelta(seconds=_LEAVE_S)))
