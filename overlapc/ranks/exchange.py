"""`Exchange` makes ranks agree: all hold the same plan, or all raise.

    with Exchange(ranks) as exchange:               # one *round* of planning
        exchange.agree("trace", trace.digest, hint)
        times = exchange.gather("times", mine)      # everyone's bytes, on every rank
        text = exchange.broadcast("plan", solve)    # the leader, ranks[0], solves; all receive
        ...                                         # parse, check, rewrite

The block is all or nothing. Either it ends normally on every rank, or every living rank gets an
error: the failed rank its own, the others a `RankError` that says who failed and why.

A round is a sequence of *steps*. In a step each rank contributes a record and the leader
answers with one reply. Records go through the key-value store that the process group was made
with, not through collectives, because a collective hangs when a rank is gone. Under the prefix
`overlapc/<version>`:

    <group>/<round>/<step>/<rank>        a contribution
    <group>/<round>/<step>/reply         the leader's answer
    <group>/<round>/failed               why the round failed; stays for ranks that come late
    <group>/<round>/told                 how many ranks know of the failure
    <group>/<round>/skipped              the round ended without a rank that cannot capture
    refused/<rank>                       the rank's last attempt that it cannot capture
    troubles                             how many rounds have failed, and attempts were refused

Ranks wait for a late rank, up to the process group's own timeout. They give up one that has ended,
that has raised, or that waits for ranks which wait for it: see `lookout`. Between steps, and while
it is `busy`, a rank watches the others, too: see `guard`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from functools import partial
from operator import methodcaller
from typing import Any, TypeVar

import torch.distributed as dist

from overlapc.core.errors import CaptureError, OptionError, OverlapcError, RankError
from overlapc.ranks.board import (
    Board,
    Doing,
    board_of,
    has_peers,
    missing,
    own_board,
    own_rank,
)
from overlapc.ranks.guard import (
    NAMING_S,
    Lost,
    guarded,
    is_broken,
    lost,
    named_dead,
    started,
    unguarded,
)
from overlapc.ranks.lookout import Lookout
from overlapc.tools.progress import doing

T = TypeVar("T")

# TCPStore drops the connection of a client that sends a value above 8 MiB.
CHUNK_BYTES = 1 << 20
# How long a rank that failed stays for the others to read why: its process may host the store.
LINGER_S = 0.5
LOOK_S = 0.25
# Each waiting rank looks so often that all of them are no burden for the store.
_LOOKS_EACH_S = 1_000
TROUBLES = "troubles"
_FEW = 8  # so many of those that are missing are looked at
PLANNING = "planning"
_UNCAPTURED = b"uncaptured "


class Exchange:
    """One round of planning among `ranks` (global ranks, the same list on each; [0] leads).

    `timeout_s`: how long a living rank may be late; by default the process group's own timeout.
    `attempt` names what is planned, equally on all ranks: with it, a CaptureError of one rank, even
    from before the round, is raised on all. With one rank, or under the fake backend, every call
    answers at once. `store` and `rank` default to the default group's; a store of their own joins
    the ranks of the round alone.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        timeout_s: float | None = None,
        store: Any = None,
        rank: int | None = None,
        attempt: str = "",
    ) -> None:
        self.ranks = tuple(ranks)
        self._attempt = attempt
        self.rank = own_rank() if rank is None else rank
        if self.rank not in self.ranks or len(set(self.ranks)) < len(self.ranks):
            raise OptionError(
                f"ranks={list(self.ranks)} on rank {self.rank}: expected distinct global ranks "
                "with this one among them; pass dist.get_process_group_ranks(group)"
            )
        if timeout_s is not None and timeout_s <= 0:
            raise OptionError(f"timeout_s={timeout_s}: expected more than 0 seconds")
        self.leader = self.ranks[0]
        self._board: Board | None = None
        self._limit_s = 0.0
        if len(self.ranks) > 1 and (store is not None or has_peers()):
            board = own_board() if store is None else board_of(store, self.rank, self.ranks)
            assert board is not None
            self._board = board
            self._limit_s = timeout_s or self._board.limit_s
        self._failed = False
        self._troubles = 0  # so many have been looked at
        count = len(self.ranks)
        self._pause_s = max(min(0.2, 0.02 * count), count / _LOOKS_EACH_S)
        self._exits = contextlib.ExitStack()

    def __enter__(self) -> Exchange:
        if self._board is not None:
            self._group = hashlib.sha256(repr(self.ranks).encode()).hexdigest()[:12]
            number = self._next_round(self._board)
            self._round, self._number = f"{self._group}/{number}", (number, 0)
            self._exits.enter_context(guarded(partial(_lost, self._board, self.ranks)))
            self._say = self._exits.enter_context(self._board.busy(PLANNING))
        return self

    def __exit__(self, *raised: Any) -> None:
        if (error := raised[1]) is not None:
            # The others may leave as soon as they know: that they are gone is no news then.
            with contextlib.suppress(Lost), unguarded():
                self._fail(error)
            self._exits.__exit__(*raised)
            return
        with self._exits:
            try:
                self._step("end of planning", b"", lambda parts: b"")
            except BaseException as late:
                self._fail(late)
                raise

    def _next_round(self, board: Board) -> int:
        """The number of the next round, passing over rounds that ended without this rank."""
        while True:
            number = board.history.rounds[self._group]
            board.history.rounds[self._group] += 1
            if not board.call(methodcaller("check", [f"{self._group}/{number}/skipped"])):
                return number

    # Messages between ranks

    @contextlib.contextmanager
    def within(self, limit_s: float) -> Iterator[None]:
        """In the block, wait no longer than this for a rank that is alive."""
        before, self._limit_s = self._limit_s, limit_s
        yield  # an error ends the round
        self._limit_s = before

    def agree(self, topic: str, value: str, hint: str) -> None:
        """Return if all ranks have the same `value`; else RankError on each, ending in `hint`."""
        short = value if len(value) <= 200 and value.isprintable() else ""
        mine = json.dumps([hashlib.sha256(value.encode()).hexdigest(), short])

        def compare(parts: list[bytes]) -> bytes:
            if len(set(parts)) > 1:
                raise RankError(self._disagreement(topic, parts, hint))
            return b""

        self._step(topic, mine.encode(), compare)

    def gather(self, topic: str, value: bytes) -> list[bytes]:
        """Return the bytes of all ranks, on every rank, in the order of `ranks`."""

        def join(parts: list[bytes]) -> bytes:
            return json.dumps([len(part) for part in parts]).encode() + b"\n" + b"".join(parts)

        head, _, body = self._step(topic, value, join).partition(b"\n")
        parts, start = [], 0
        for size in json.loads(head):
            parts.append(body[start : start + size])
            start += size
        return parts

    def broadcast(self, topic: str, make: Callable[[], str]) -> str:
        """Return the text of the leader's `make` on every rank; only the leader calls `make`.

        `make` may take long. It runs on a daemon thread, so that the leader, too, notices within
        the timeout that a rank died. So it must not rely on state that torch keeps per thread.
        """
        if self._board is None:
            return make()
        work = started(make) if self.rank == self.leader else None
        reply = self._step(
            topic, b"", lambda parts: work.result().encode() if work is not None else b"", work
        )
        return reply.decode()

    def during(self, what: str, work: Callable[[], T]) -> T:
        """Return the result of `work`, which may wait for other ranks in collectives. It runs on a
        daemon thread, so that this thread notices when a rank is lost or has failed."""
        if self._board is None:
            return work()
        result = started(work)
        self._say(Doing(what))
        while not result.done():
            wait([result], LOOK_S)
            self._raise_if_failed()
        self._say(Doing(PLANNING))
        if result.exception() is not None:
            self._raise_if_failed()
        with named_dead():
            return result.result()

    def _disagreement(self, topic: str, parts: list[bytes], hint: str) -> str:
        holders: dict[bytes, list[int]] = {}
        for rank, part in zip(self.ranks, parts, strict=True):
            holders.setdefault(part, []).append(rank)
        held = []
        for part, ranks in list(holders.items())[:8]:
            digest, short = json.loads(part)
            held.append(
                f"{_named(ranks)} {'hold' if ranks[1:] else 'holds'} {short or digest[:12]}"
            )
        if len(holders) > len(held):
            held.append(f"and {len(holders) - len(held)} other values")
        return (
            f"the ranks disagree on {topic}: {'; '.join(held)}; "
            f"expected one value on {_named(self.ranks)}: {hint}"
        )

    # One step

    def _step(
        self,
        topic: str,
        mine: bytes,
        answer: Callable[[list[bytes]], bytes],
        work: Future[str] | None = None,
    ) -> bytes:
        """Contribute `mine`; return the leader's `answer` to all contributions (and `work`'s)."""
        board = self._board
        if board is None:
            return answer([mine])
        written = board.history.written.setdefault(self._group, [])
        before = len(written)
        round_number, number = self._number
        step = f"{self._round}/{number}"
        if self.rank == self.leader:
            others = {rank: f"{step}/{rank}" for rank in self.ranks if rank != self.rank}
            parts = {**self._await(topic, others, work), self.rank: mine}
            reply = answer([parts[rank] for rank in self.ranks])
            self._write(f"{step}/reply", topic, reply)
            board.history.done[self._group] = self._number
        else:
            self._write(f"{step}/{self.rank}", topic, mine)
            board.history.done[self._group] = self._number
            reply = self._await(topic, {self.leader: f"{step}/reply"})[self.leader]
        self._number = round_number, number + 1
        # All ranks have reached this step, so nobody will read records of earlier ones.
        for key in written[:before]:
            board.send(methodcaller("delete_key", key))
        del written[:before]
        return reply

    def _write(self, key: str, topic: str, value: bytes) -> None:
        """Store `value` in pieces; `key`, written last, says that all pieces are there."""
        assert self._board is not None
        packed = zlib.compress(value, 1)
        chunks = [packed[i : i + CHUNK_BYTES] for i in range(0, len(packed), CHUNK_BYTES)]
        head = json.dumps([topic, len(chunks)]).encode() + b"\n"
        records = {f"{key}/{i}": chunk for i, chunk in enumerate(chunks) if i > 0}
        records[key] = head + chunks[0]
        for name, record in records.items():
            self._board.put(name, record)
        self._board.history.written[self._group] += records

    def _read(self, keys: list[str], topic: str) -> list[bytes]:
        """Read the values under `keys`, which are there."""
        assert self._board is not None
        values: list[bytes] = []
        for key, record in zip(
            keys, self._board.call(methodcaller("multi_get", keys)), strict=True
        ):
            head, _, packed = record.partition(b"\n")
            theirs, chunks = json.loads(head)
            if theirs != topic:
                raise RankError(
                    f"rank {self.rank} is at the step {topic!r} of planning, but "
                    f"{'the leader' if key.endswith('reply') else 'rank ' + key.split('/')[-1]} "
                    f"is at {theirs!r}; expected the same calls on {_named(self.ranks)}: use one "
                    "version of overlapc and the same options on all ranks"
                )
            for i in range(1, chunks):
                packed += self._board.call(methodcaller("get", f"{key}/{i}"))
            values.append(zlib.decompress(packed))
        return values

    def _await(
        self, topic: str, keys: dict[int, str], work: Future[str] | None = None
    ) -> dict[int, bytes]:
        """Each rank's value once all are there and `work` is done; RankError if one never comes."""
        with unguarded():
            return self._awaited(topic, keys, work)

    def _awaited(
        self, topic: str, keys: dict[int, str], work: Future[Any] | None
    ) -> dict[int, bytes]:
        assert self._board is not None
        what = f"is at the step {topic!r} of planning"
        lookout = Lookout(self._board, self.rank, what, self.ranks.index(self.rank))
        ranks = {key: rank for rank, key in keys.items()}
        hopeless: str | None = None
        pause_s = self._pause_s / 16
        while True:
            # Read first: an answer that was there before a rank failed still counts.
            failure = self._trouble(list(keys))
            absent = self._board.call(partial(missing, keys=list(ranks), most=_FEW + 1))
            late = [ranks[key] for key in absent]
            working = work is not None and not work.done()
            if work is not None and not working:
                work.result()  # its exception ends the round now, whoever is missing
            if not late and not working:
                self._say(Doing(PLANNING))
                return dict(zip(keys, self._read(list(keys.values()), topic), strict=True))
            if failure is not None:
                raise failure
            if hopeless is not None:
                raise RankError(hopeless)
            if working:
                self._say(Doing(f"making the {topic}"))
            else:
                phase, step = f"waiting at the step {topic!r}", (self._group, *self._number)
                self._say(Doing(phase, tuple(late), step))
            # What a rank wrote before it ended still counts, so read once more. (The guard has
            # watched for longer than this wait.)
            hopeless = lost() or self._hopeless(lookout, late, topic)
            wait([work], pause_s) if work is not None and working else time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, 0.2 if working else self._pause_s)

    def _hopeless(self, lookout: Lookout, missing: list[int], topic: str) -> str | None:
        """Why the step cannot end, or None."""
        hopeless = lookout.hopeless(missing, self.ranks)
        waited_s = time.monotonic() - lookout.start
        too_late = bool(missing) and waited_s > self._limit_s
        if hopeless is None and not too_late:
            return None
        self._raise_if_failed()  # report the cause, not that others have left
        if hopeless is not None:
            return f"planning stopped at the step {topic!r}: {hopeless}"
        late = lookout.last(missing[0])
        return (
            f"planning stopped at the step {topic!r}: rank {late} did not come in {waited_s:.0f} s "
            f"({lookout.where(late)}); expected at most {self._limit_s:g} s: make that work "
            "shorter, or give a longer timeout_s (by default it is the process group's own, "
            "init_process_group(timeout=...))"
        )

    # All ranks fail together

    def _trouble(self, ranks: Sequence[int]) -> OverlapcError | None:
        """Why the round has failed, or which of the ranks could not capture what it is about."""
        assert self._board is not None
        count = self._board.call(methodcaller("add", TROUBLES, 0))
        if count == self._troubles:
            return None
        self._troubles = count
        if (failure := self._failure()) is not None:
            return failure
        records = self._board.look([f"refused/{rank}" for rank in ranks if self._attempt])
        for rank, record in zip(ranks, records, strict=False):
            attempt, reason, place = json.loads(record or '["", "", ""]')
            if attempt and attempt == self._attempt:
                self._board.put(f"{self._round}/skipped", "")
                return CaptureError(f"{reason} (on rank {rank})", place)
        return None

    def _raise_if_failed(self) -> None:
        failure = self._failure()
        if failure is not None:
            raise failure

    def _failure(self) -> OverlapcError | None:
        """Why the round has failed on some rank."""
        assert self._board is not None
        record = self._board.look([f"{self._round}/failed"])[0]
        if record is None:
            return None
        self._failed = True
        if record.startswith(_UNCAPTURED):
            return CaptureError(*json.loads(record.removeprefix(_UNCAPTURED)))
        return RankError(record.decode())

    def _fail(self, error: BaseException) -> None:
        """Tell the others that this rank left the round by `error`; never raises."""
        board = self._board
        if board is None:
            return
        text = str(error)
        if isinstance(error, Lost):
            self._say(Doing())
            return  # the others notice the loss, too
        if isinstance(error, CaptureError) and self._attempt:
            text = _UNCAPTURED.decode() + json.dumps([error.reason, error.place])
        elif not isinstance(error, RankError):
            what = f"{type(error).__name__}: {text}" if text else type(error).__name__
            text = (
                f"rank {self.rank} failed while planning with {_named(self.ranks)}: {what}; "
                f"expected every rank to finish: correct that error on rank {self.rank}"
            )
        failed, told = f"{self._round}/failed", f"{self._round}/told"
        if self.rank == self.leader:
            board.history.written.setdefault(self._group, []).extend([failed, told])
        with contextlib.suppress(RankError):
            if not self._failed:
                board.put(failed, text)
                board.call(methodcaller("add", TROUBLES, 1))
            # This rank stays in the round but is lost to it; the others can read why.
            self._say(Doing())
            until = time.monotonic() + max(LINGER_S, 2 * self._pause_s)
            count = board.call(methodcaller("add", told, 1))
            while count < len(self.ranks) and time.monotonic() < until:
                time.sleep(0.02)
                count = board.call(methodcaller("add", told, 0))


@contextlib.contextmanager
def busy(phase: str, further: Callable[[], str | None] | None = None) -> Iterator[None]:
    """While the block runs, others who ask are told `phase`, and a lost rank ends it. If it takes
    long, stderr reports it, too. The guard also asks `further` what is wrong; "": it will say so
    soon."""
    board = own_board()
    if board is None:
        with doing(phase, own_rank()):
            yield
        return
    lost = partial(_lost, board, range(dist.get_world_size()))

    def look() -> str | None:
        said = None if further is None else further()
        return lost() if said is None else said or None

    with (
        guarded(look),
        board.telling(),
        board.busy(phase),
        doing(phase, board.rank),
        named_dead(),
    ):
        yield


@contextlib.contextmanager
def in_call() -> Iterator[None]:
    """A call of a front door that need not plan. What it raises is told to ranks that ask; where a
    collective of it fails because a rank has ended, the error names that rank."""
    board = own_board()
    if board is None:
        yield
        return
    with board.telling(), naming_the_dead():
        yield


@contextlib.contextmanager
def naming_the_dead() -> Iterator[None]:
    """If a collective of the block fails because a rank has ended, raise what names that rank."""
    try:
        yield
    except RuntimeError as error:
        board = own_board() if is_broken(error) else None
        until = time.monotonic() + NAMING_S
        while board is not None and time.monotonic() < until:
            if (found := board.presence.lost(range(dist.get_world_size()))) is not None:
                raise RankError(
                    f"rank {board.rank} waited in a collective: {found}; expected all ranks to "
                    "live until training ends: see the output of that rank for why it ended"
                ) from error
            time.sleep(LOOK_S / 10)
        raise


def _lost(board: Board, ranks: Sequence[int]) -> str | None:
    """Which of the ranks has ended while this one plans."""
    found = board.presence.lost(ranks)
    return found and (
        f"rank {board.rank} stopped planning: {found}; expected all ranks to live while others "
        "plan: see the output of that rank for why it ended"
    )


def _named(ranks: Sequence[int]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:16])
    more = f" and {len(ranks) - 16} more" if len(ranks) > 16 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"
