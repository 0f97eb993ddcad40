"""`StepPace` finds ranks that run the same step differently: planned before, or planned anew.

A rank that calls `patch()` again, or trains other models, plans in its next step, together with all
others. If it is alone with that, the others run planned graphs meanwhile, and it would wait for
ever. So each rank writes how far it is when it begins a step.

    megatron/pace/<rank>   [steps begun, first steps among them]
    megatron/apart         the first difference that some rank has found
"""

from __future__ import annotations

import json
from operator import methodcaller
from typing import Any

import torch.distributed as dist

from overlapc.core.errors import RankError
from overlapc.ranks.board import own_board, present
from overlapc.ranks.presence import neighbours
from overlapc.ranks.roll import are_all_patched

_APART = "megatron/apart"


class StepPace:
    """How far this process is; all of its `Steps` share one."""

    def __init__(self) -> None:
        self.steps = 0
        self._firsts = 0
        self._apart = ""
        self._lacks = self.lacks = False

    def begin(self, first: bool) -> None:
        """A step begins. Raise what any rank found in the steps before; `first`: ranks plan. Then
        `lacks` says whether a rank was not patched any more when the last step began."""
        self.steps += 1
        self._firsts += first
        self.lacks, self._lacks = self._lacks and not first, False
        if (board := own_board()) is None:
            return
        apart, self._apart = self._apart, ""
        if apart:
            raise RankError(apart)
        record, rank = json.dumps([self.steps, self._firsts]), board.rank

        def write(store: Any) -> None:
            store.set(f"megatron/pace/{rank}", record)
            (found,) = present(store, [_APART])
            self._apart = "" if found is None else found.decode()
            self._lacks = not are_all_patched(store)

        board.send(write)  # read in the next step: no step waits for the store

    def look(self) -> str | None:
        """In a first step: the rank that is in the same step, or behind it, without planning."""
        if (board := own_board()) is None:
            return None
        others = neighbours(range(dist.get_world_size()), board.rank)
        records = board.look([f"megatron/pace/{other}" for other in others])
        for other, record in zip(others, records, strict=True):
            steps, firsts = (0, 0) if record is None else json.loads(record)
            if steps >= self.steps and firsts < self._firsts:
                said = (
                    f"rank {other} runs step {steps} by the plans that it has, and rank "
                    f"{board.rank} plans anew in step {self.steps}; expected all ranks to "
                    "call overlapc.megatron.patch() again, or to train other models, before the "
                    "same step, or none"
                )
                board.call(methodcaller("compare_set", _APART, "", said))
                return said
        return None


pace = StepPace()
