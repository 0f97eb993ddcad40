"""Which ranks run Megatron with overlapc: `tell` leaves this rank's word, `Roll` reads all of them.

A rank that was never patched cannot be asked, and one that is late has nothing to say yet: from
outside they look alike. So nobody guesses. Each patched rank leaves its word in the store as early
as it can: in `patch`, or when Megatron makes its process groups. If a word is missing when a rank
comes to its first step, all ranks decide together, by one record of the store, to run this one step
as plain Megatron, which needs nothing of anybody. A rank that is late finds the decision and does
the same. When the step has ended, all ranks have been in it: whose word is missing now was in it
without overlapc.

    megatron/count         how many ranks are patched
    megatron/word/<rank>   "patched", or why the rank is not
    megatron/first/<n>     "planned" or "plain": how all ranks run their n-th first step
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
import weakref
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from overlapc.core.errors import RankError
from overlapc.ranks.board import Board, has_peers, own_board, present

PATCHED = "patched"
UNPATCHED = "it called overlapc.megatron.unpatch()"
_NEVER = "it never called overlapc.megatron.patch()"
_PLANNED, _PLAIN = "planned", "plain"
_COUNT = "megatron/count"
_LOOK_S = 0.1
_SAID_S = 5.0  # so long the store may take to answer

_firsts = itertools.count()  # first steps of this process: all ranks have the same
# What this process has said, by store and rank.
_said: weakref.WeakKeyDictionary[Any, dict[int, str]] = weakref.WeakKeyDictionary()


def tell(word: str = PATCHED) -> None:
    """Leave this rank's word for the others, as soon as there are any."""
    if not has_peers():
        return
    rank, said = dist.get_rank(), _said.setdefault(_get_default_store(), {})
    before = said.get(rank)
    if before == word or (before is None and word == UNPATCHED):
        return
    said[rank] = word
    more = (word == PATCHED) - (before == PATCHED)

    def write(store: Any) -> None:
        store.set(f"megatron/word/{rank}", word)
        if more:
            store.add(_COUNT, more)

    board = _board()
    if before == PATCHED:  # others count on it until they can read the new word
        sent = threading.Event()
        board.presence.once_begun(sent.set)
        sent.wait(_SAID_S)
        with contextlib.suppress(RankError):  # the store has ended, and so has the run
            board.call(write, _SAID_S)
    else:  # behind its presence record: a rank whose word is there can be seen to end
        board.presence.once_begun(lambda: board.send(write))


def are_all_patched(store: Any) -> bool:
    count: int = store.add(_COUNT, 0)
    return count >= dist.get_world_size()


class Roll:
    """The words of all ranks before and behind a first step, as this rank reads them."""

    def is_complete(self, patience_s: float) -> bool:
        """Do all ranks plan this first step? False on all of them if some rank has waited so long
        in vain for the word of another."""
        if not has_peers():
            return True
        tell()
        key = f"megatron/first/{next(_firsts)}"
        until = time.monotonic() + patience_s

        def ask(store: Any) -> bytes | None:
            complete = are_all_patched(store)
            if complete or time.monotonic() >= until:
                decided: bytes = store.compare_set(key, "", _PLANNED if complete else _PLAIN)
                return decided
            return present(store, [key])[0]

        while (decided := _board().call(ask)) is None:
            time.sleep(_LOOK_S)
        return decided.decode() == _PLANNED

    def missing(self) -> Mapping[int, str]:
        """The ranks that are not patched, and why."""
        ranks = range(dist.get_world_size())
        keys = [f"megatron/word/{rank}" for rank in ranks]
        words = _board().look(keys)
        said = {r: _NEVER if w is None else w.decode() for r, w in zip(ranks, words, strict=True)}
        return {rank: word for rank, word in said.items() if word != PATCHED}


def absent(missing: Mapping[int, str], what_came: str) -> RankError:
    """The error that names the ranks of a plain step that are not patched."""
    held = "; ".join(f"rank {rank}: {why}" for rank, why in list(missing.items())[:8])
    more = f"; and {len(missing) - 8} more" if len(missing) > 8 else ""
    return RankError(
        f"not all ranks of this run have overlapc in them: {held}{more}; expected every rank to "
        "call overlapc.megatron.patch(), to make its TrainStep, or to be started by -m "
        f"overlapc.megatron, before its first step ({what_came})"
    )


def _board() -> Board:
    board = own_board()
    assert board is not None
    return board
