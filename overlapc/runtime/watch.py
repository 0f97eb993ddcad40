"""`Watch` judges from other ranks' beats which of them live and whether they will come."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from overlapc.runtime.line import BEAT_S, IDLE, Beat, Line, present

_MANY = 32  # up to so many ranks each watches all others


@dataclass(slots=True)
class _Seen:
    """What this rank saw of another: its beat, when the beat last moved, and its last sign of
    coming."""

    beat: Beat | None
    moved: float
    hope: float


class Watch:
    """What one rank knows of the others' beats during one step, by its own clock."""

    def __init__(self, line: Line, timeout_s: float) -> None:
        self.start = time.monotonic()
        self._line = line
        self._timeout_s = timeout_s
        self._seen: dict[int, _Seen] = {}
        self._looked: set[int] = set()
        self._next_look = self.start

    def lost(self, missing: list[int], present: list[int], rank: int) -> str | None:
        """The reason why the round cannot go on, or None.

        A missing rank must be on its way; one that is present must only live.
        """
        now = time.monotonic()
        if now < self._next_look:
            return None
        self._next_look = now + BEAT_S / 4
        self._looked.clear()
        self._look([*missing, *present])
        signs = [self._sign(other, (rank,)) for other in missing]
        signs += [(self._seen[other].moved, self._still(other)) for other in present]
        when, what = min(signs)
        # `now` is from before the look: if this process itself was stopped, all beats moved since.
        return what if now - when > self._timeout_s else None

    def stands_still(self, ranks: list[int]) -> str | None:
        """The first of the ranks that was at work and gives no sign of life any more, or None."""
        now = time.monotonic()
        self._looked.clear()
        self._look(ranks)
        for rank in ranks:
            seen = self._seen[rank]
            at_work = seen.beat is not None and seen.beat.phase != IDLE
            # Allow for the age of a beat when it is read, and for the time to tell others. A late
            # beat is no death, however short the timeout.
            if at_work and now - seen.moved > max(self._timeout_s - BEAT_S, 2.5 * BEAT_S):
                return self._still(rank)
        return None

    def at_work(self, rank: int) -> int:
        """The rank that `rank` waits for in the end, as last seen; itself if it works."""
        path = [rank]
        while (seen := self._seen.get(path[-1])) and seen.beat and seen.beat.waits_for:
            if seen.beat.waits_for[0] in path:
                break
            path.append(seen.beat.waits_for[0])
        return path[-1]

    def phase(self, rank: int) -> str:
        beat = self._seen[rank].beat if rank in self._seen else None
        return beat.phase if beat is not None else "not seen yet"

    def _sign(self, rank: int, path: tuple[int, ...]) -> tuple[float, str]:
        """When `rank` last gave a sign of coming, and what is wrong if that was long ago."""
        self._look([rank])
        seen = self._seen[rank]
        if seen.beat is None:
            return seen.hope, f"rank {rank} has not begun to plan (missing, or not there yet)"
        if seen.beat.phase == IDLE:
            return seen.hope, f"rank {rank} is not planning (no such graph there, or it ended)"
        signs = [(seen.moved, self._still(rank))]
        for other in seen.beat.waits_for:
            if other in path:
                cycle = " and ".join(f"rank {r}" for r in (*path[path.index(other) :], rank))
                signs.append((seen.hope, f"{cycle} wait for each other at different steps"))
            elif len(path) < 8:
                signs.append(self._sign(other, (*path, rank)))
        seen.hope = max(seen.hope, min(signs)[0])
        return min(signs)

    def _still(self, rank: int) -> str:
        return f"rank {rank} gives no sign of life (last seen {self.phase(rank)})"

    def _look(self, ranks: list[int]) -> None:
        """Read the beats of those `ranks` that were not yet read in this look."""
        ranks = [rank for rank in ranks if rank not in self._looked]
        if not ranks:
            return
        self._looked.update(ranks)
        records = self._line.call(
            lambda store: present(store, [f"beat/{rank}" for rank in ranks]), self._timeout_s
        )
        now = time.monotonic()
        for rank, record in zip(ranks, records, strict=True):
            beat = None if record is None else Beat.parse(record)
            if rank not in self._seen:
                # First seen now, but it may have been stopped since the wait began.
                self._seen[rank] = _Seen(beat, self.start, self.start)
                continue
            seen = self._seen[rank]
            if beat is not None and beat != seen.beat:
                self._seen[rank] = _Seen(beat, now, seen.hope)


def watched(ranks: Sequence[int], rank: int) -> list[int]:
    """The ranks that `rank` watches: all others, or of many those at distances of powers of two."""
    others = [other for other in ranks if other != rank]
    if len(others) > _MANY:
        at, count = list(ranks).index(rank), len(ranks)
        steps = [2**k for k in range(count.bit_length()) if 2**k < count]
        others = sorted({ranks[(at + step) % count] for step in (*steps, *(-s for s in steps))})
    return others


def look_after(
    line: Line, ranks: Sequence[int], rank: int, timeout_s: float
) -> Callable[[], str | None]:
    """Make a function that says which of the ranks is lost: one that was at work and whose beat has
    not moved for `timeout_s`. Of many ranks each watches some."""
    others = watched(ranks, rank)
    watch = Watch(line, timeout_s)

    def look() -> str | None:
        lost = watch.stands_still(others)
        return lost and (
            f"rank {rank} stopped planning: {lost} for {timeout_s:g} s; expected all ranks to live "
            "while others plan: see the output of that rank for why it ended"
        )

    return look
