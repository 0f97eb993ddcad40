"""`RaisedRecord` tells all ranks what one of them raised within a training step, or that it ended.

That rank alone has its error. The others wait for it in collectives, which fail when its process
ends, with an error that names an address. So the rank writes what it raised into the store before
it goes on; a rank whose collective fails looks there. If nothing was written, it asks which process
has ended. In the first step, which every rank guards, the guard looks as well: there ranks
also wait for each other's messages.

    megatron/raised/<step>         what some rank raised, or found lost, in this step of training
    megatron/raised/<step>/knows   how many ranks have read that
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

import torch.distributed as dist

from overlapc.core.errors import RankError
from overlapc.ranks.board import Board, has_peers, own_board, present
from overlapc.ranks.guard import LOOK_S, NAMING_S, is_broken
from overlapc.ranks.pace import pace

# So long a rank may still raise the same error itself: all ranks find some errors alike.
_GRACE_S = 2.0


class RaisedRecord:
    """What a rank raised in the step that runs, under a key of this step's own."""

    def __init__(self) -> None:
        self._guards = False
        self._seen: tuple[float, str] | None = None  # when, and what

    def begin(self, guards: bool) -> None:
        """A step begins; `guards`: all ranks call `look` in it, again and again."""
        self._guards, self._seen = guards, None

    def look(self) -> str | None:
        """What another rank has raised in this step, or which is lost or does another step; ""
        while this rank has time to raise the same."""
        if self._seen is None:
            told = self._call(self._read) or self._found()
            if told is None:
                return None
            self._seen = time.monotonic(), told
            self._call(lambda store: store.add(self._knows, 1))
        when, told = self._seen
        return told if time.monotonic() - when >= _GRACE_S else ""

    def instead_of(self, error: BaseException) -> RankError | None:
        """What to raise in the place of what this rank raised, if another rank's error explains it.
        An error of this rank's own is told to the others."""
        if not has_peers():
            return None
        if is_broken(error) or isinstance(error, RankError):
            told = self._seen[1] if self._seen else self._reason(error)
            # That a rank is gone says less than what it raised before.
            named = told is not None and told.partition(" raised ")[0] in str(error)
            known = told is None or (named and " is gone" not in str(error))
            return None if known else RankError(told)
        if not isinstance(error, RankError):
            with contextlib.suppress(RankError):  # the store has ended, too
                self._tell(error)
        return None

    def _found(self) -> str | None:
        """What this rank finds in a first step. All others are told."""
        found = pace.look() or self._ended()
        if found is None:
            return None
        # A rank that raised may have ended a moment after it wrote.
        self._call(lambda store: store.compare_set(self._key, "", found))
        return self._call(self._read) or found

    def _reason(self, error: BaseException) -> str | None:
        """Why a collective has failed. A note of the error says so, if it is not a rank's end."""
        has_store = True
        try:
            if (told := self._call(self._read)) or not is_broken(error):
                return told
        except RankError as lost:
            has_store = False  # asking it again would take as long again
            _note(error, str(lost))
            if not is_broken(error):
                return None
        until = time.monotonic() + NAMING_S
        while (ended := self._ended()) is None and time.monotonic() < until:
            time.sleep(LOOK_S / 5)
        if ended is None:
            _note(error, "no process of another rank has ended")
            return None
        if has_store:
            with contextlib.suppress(RankError):
                self._call(lambda store: store.compare_set(self._key, "", ended))
                return self._call(self._read) or ended
        return ended

    def _tell(self, error: BaseException) -> None:
        said = f"{type(error).__name__}: {error}".rstrip(": ")
        text = (
            f"rank {dist.get_rank()} raised {said}; expected every rank to end the step: correct "
            "that error (its output has the traceback)"
        )
        self._call(lambda store: store.compare_set(self._key, "", text))
        knows = self._call(lambda store: store.add(self._knows, int(self._seen is None)))
        # This process may host the store.
        until = time.monotonic() + 2 * LOOK_S
        while self._guards and knows < dist.get_world_size() and time.monotonic() < until:
            time.sleep(LOOK_S / 20)
            knows = self._call(lambda store: store.add(self._knows, 0))

    def _read(self, store: Any) -> str | None:
        (told,) = present(store, [self._key])
        return None if told is None else told.decode()

    def _ended(self) -> str | None:
        """Which rank's process has ended."""
        found = _board().presence.lost(range(dist.get_world_size()))
        return found and (
            f"{found}; expected all ranks to live until training ends: see the output of that rank "
            "for why it ended, and start the run again"
        )

    def _call(self, request: Any) -> Any:
        return _board().call(request)

    @property
    def _key(self) -> str:
        return f"megatron/raised/{pace.steps}"

    @property
    def _knows(self) -> str:
        return f"{self._key}/knows"


def _board() -> Board:
    board = own_board()
    assert board is not None
    return board


def _note(error: BaseException, found: str) -> None:
    """Append what was found to an error (from Python 3.11 on)."""
    if hasattr(error, "add_note"):
        error.add_note(f"overlapc looked for the rank that ended: {found}")
