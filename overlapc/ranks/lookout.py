"""`Lookout` judges, while a rank waits for others, whether they can still come. There are three
states, and no fourth:

- Dead: the kernel says that the process has ended, or that its host is gone. That is an error.
- Disagreeing: the rank lives and cannot come. It has raised, it waits in a collective for this
  rank or for one that waits for this rank, or it has left the process group. That is an error, too.
- Late: anything else, however long it takes. One line on stderr says for whom this rank waits, and
  where that one is.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed as dist

from overlapc.ranks.board import IDLE, Board, Doing, issued_by_name, own_board
from overlapc.ranks.here import described
from overlapc.ranks.presence import LEFT

# So long a rank must stay in one place before it is said to disagree: it may be on its way.
APART_S = 3.0
LATE_S = 5.0  # before a line says that a rank is late
_LATER = 4  # each further line comes so many times later
_ASK_S = 0.5
_LOOK_S = 0.1
_SPEAK = 2  # so many of those that wait say who is late
_FEW = 8  # at most so many ranks are asked at once
_MOST_ASKED = 32  # of those that a collective joins
_MANY = 64  # so many that wait for one rank ask it each `_ASK_S`; more of them, less often
_EXPECTED = (
    "expected the same calls on all ranks: see the output of that rank for what it did instead"
)
_DEEP = 8  # so long a chain of ranks that wait for each other is followed


class Lookout:
    """What one rank sees of the others during one wait, `what`. `place`: its number among those
    that wait for the same; the first say who is late, and the last of many ask seldom. Of
    `transfers` another rank may have sent long ago what is still on its way: then only what it has
    raised says that it cannot come. `group` names the process group of a collective that is waited
    for."""

    def __init__(
        self,
        board: Board,
        rank: int,
        what: str,
        place: int = 0,
        transfers: bool = False,
        group: str = "",
    ) -> None:
        self.start = time.monotonic()
        self._group = group
        self._board, self._rank, self._what = board, rank, what
        self._transfers = transfers
        self._seldom = max(1.0, place / _MANY)
        self._ask_s = _ASK_S * self._seldom
        self._next_look = self.start
        self._next_ask = self.start + (self._ask_s if place > _MANY else 0.0)
        self._says_at = LATE_S if place < _SPEAK else float("inf")
        self._since: dict[Any, float] = {}  # when evidence was first seen, without a break

    def hopeless(self, missing: Sequence[int], concerned: Sequence[int]) -> str | None:
        """Why the wait cannot end, or None. A missing rank must be able to come; one that is
        concerned must only live."""
        now = time.monotonic()
        if now < self._next_look:
            return None
        self._next_look = now + _LOOK_S
        if (found := self._board.presence.lost([*missing, *concerned])) is not None:
            return f"{found}; expected it to live: see the output of that rank for why it ended"
        for rank in missing:
            if self._board.presence.gone.get(rank) == LEFT:
                return f"rank {rank} has destroyed its process group; {_EXPECTED}"
        if now >= self._next_ask:
            self._next_ask = now + self._ask_s
            joined = [*concerned[:_MOST_ASKED]] if self._group else []
            self._board.presence.ask([*self._asked(missing), *joined])
        before, self._since = self._since, {}
        signs = [self._signs(rank, (self._rank,)) for rank in missing[:_FEW]]
        signs += [self._elsewhere(rank) for rank in concerned if self._group]
        for each in signs:
            for evidence, what in each:
                first = self._since[evidence] = before.get(evidence, now)
                if now - first >= APART_S * self._seldom:
                    return f"{what}; {_EXPECTED}"
        self._say_who_is_late(now - self.start, missing)
        return None

    def last(self, rank: int) -> int:
        """The rank that `rank` waits for in the end, as far as known; itself if it waits for
        none."""
        path = [rank]
        while (answer := self._answer(path[-1])) and answer["waits"]:
            if answer["waits"][0] in path:
                break
            path.append(answer["waits"][0])
        return path[-1]

    def where(self, rank: int) -> str:
        """Where the rank was when it last answered."""
        if (answer := self._answer(rank)) is not None:
            doing = answer["phase"] or "its script"
            return f"{doing}, {described(answer)}"
        presence = self._board.presence
        if rank in presence.unreached:
            return f"it cannot be asked: {presence.unreached[rank]}"
        if rank in presence.answers:
            return "it does not answer yet: it may be stopped, or busy outside of Python"
        return "it has not used overlapc yet"

    def _answer(self, rank: int) -> dict[str, Any] | None:
        when, answer = self._board.presence.answers.get(rank, (0.0, None))
        return answer if when >= self.start and time.monotonic() - when < 4 * self._ask_s else None

    def _asked(self, missing: Sequence[int]) -> list[int]:
        """The ranks that are missing, and those that they wait for, as far as known."""
        found = list(missing[:_FEW])
        for rank in found:
            answer = self._answer(rank)
            for other in answer["waits"] if answer and len(found) < 2 * _FEW else ():
                if other not in found and other != self._rank:
                    found.append(other)
        return found

    def _signs(self, rank: int, path: tuple[int, ...]) -> Iterator[tuple[Any, str]]:
        """What speaks against that the rank will come: evidence, which must last, and in words."""
        answer = self._answer(rank)
        if answer is None:
            return
        place = described(answer)
        call, raised = answer["raised"]
        if answer["phase"] == IDLE and call == self._board.history.calls and raised:
            text = f"rank {rank} has raised {raised}, and goes on ({place})"
            yield ("raised", rank, raised), text
        if self._transfers:
            return
        for other in answer["waits"]:
            if self._has_done_its_part(other, answer["step"]):
                continue
            if other in path:
                circle = (*path[path.index(other) :], rank)
                ranks = " and ".join(f"rank {r}" for r in circle)
                told = self._answers(circle)
                text = f"{ranks} wait for each other at different steps: {told}"
                yield ("circle", circle, answer["number"]), text
            elif len(path) < _DEEP:
                yield from self._signs(other, (*path, rank))
        if answer["waits"]:
            return
        if (group := self._waits_in(answer)) is not None:
            held = answer["within"] or "a collective"
            text = (
                f"rank {rank} is not planning: it waits in {held} of process group {group!r} for "
                f"this rank ({place}), so it has passed this call or left it out"
            )
            yield ("held", rank, answer["at"], str(answer["issued"])), text

    def _has_done_its_part(self, rank: int, step: Any) -> bool:
        """Has the rank done already what another waits for at that step, and that one has not
        noticed yet? It may run seldom on a busy machine."""
        if rank == self._rank:
            done: Any = self._board.history.done
        else:
            answer = self._answer(rank)
            done = {} if answer is None else answer["done"]
        return step is not None and tuple(done.get(step[0], (-1, -1))) >= tuple(step[1:])

    def _waits_in(self, answer: dict[str, Any]) -> str | None:
        """The group of a collective in which that rank waits for this one."""
        mine, theirs = issued_by_name(), answer["issued"]
        if answer["group"] is not None:
            name = answer["group"] or dist.group.WORLD.group_name
            # As many there as here: this rank has issued that collective, too.
            return name if name in mine and mine[name] != theirs.get(name) else None
        if not answer["computes"]:
            return None
        ahead = (name for name in mine if theirs.get(name, 0) > mine[name])
        return next(ahead, None)

    def _elsewhere(self, rank: int) -> Iterator[tuple[Any, str]]:
        """Does the rank wait in another collective in the place of the one that is waited for?"""
        answer = self._answer(rank)
        if answer is None or answer["phase"] != IDLE or answer["group"] is None:
            return
        name = answer["group"] or dist.group.WORLD.group_name
        mine, theirs = issued_by_name(), answer["issued"]
        if name == self._group and mine.get(name) == theirs.get(name):
            text = f"rank {rank} waits in {answer['within']} instead ({described(answer)})"
            yield ("elsewhere", rank, answer["at"]), text

    def _answers(self, ranks: Sequence[int]) -> str:
        said = []
        for rank in ranks:
            if rank == self._rank:
                said.append(f"rank {rank} {self._what}")
            elif (answer := self._answer(rank)) is not None:
                said.append(f"rank {rank} {answer['phase'] or described(answer)}")
        return ", ".join(said)

    def _say_who_is_late(self, waited_s: float, missing: Sequence[int]) -> None:
        if waited_s < self._says_at or not missing:
            return
        self._says_at *= _LATER
        late = [f"rank {rank} ({self.where(rank)})" for rank in map(self.last, missing[:_FEW])]
        more = " and others" if len(missing) > _FEW else ""
        with suppress(OSError, ValueError, AttributeError):  # stderr may be gone
            sys.stderr.write(
                f"overlapc: rank {self._rank} {self._what}, {waited_s:.0f} s so far: "
                f"waits for {', '.join(late)}{more}\n"
            )
            sys.stderr.flush()


class _Alone:
    """The lookout of a rank that has no others to watch: its group's ranks are one process."""

    def __init__(self) -> None:
        self.start = time.monotonic()

    def hopeless(self, missing: Sequence[int], concerned: Sequence[int]) -> str | None:
        return None


@contextmanager
def waiting_for(
    ranks: Sequence[int], what: str, pending: Callable[[], bool], group: str = ""
) -> Iterator[Lookout | _Alone]:
    """The lookout of a wait for transfers from the ranks, or for a collective of the group. Who
    asks is told of the wait, as long as it is `pending`."""
    board = own_board()
    if board is None:
        yield _Alone()
        return
    with board.busy(what) as say:
        say(Doing(what, tuple(ranks), pending=pending))
        yield Lookout(board, board.rank, what, transfers=True, group=group)
