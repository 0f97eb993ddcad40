"""The ledger counts memory: each holding of bytes lives from one moment to another.

    holding   so many bytes, from the first moment that has them to the last
    Ledger    the whole of one order: all holdings, and what is there for one moment only
    Flow      what issues do to holdings, in whatever order they come
    Balance   a Flow's issues one after the other: what one would add; run it; take it back

Four modules write a Ledger. `simulate` enters the storages of a plan, whose issues are the moments;
`pipeline` what a rank's steps hold, work with and send; `stages` what actions keep for later ones;
`shares` what the graphs of a step hold while others run. Schedulers, which choose issue after
issue, ask a Balance instead: it gives for each issue the figure that the Ledger has once all are
known.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, MutableMapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TypeVar

H = TypeVar("H", bound=Hashable)
NO_LIMIT = 1 << 62


@dataclass(slots=True)
class Ledger:
    """The holdings of one order, by number. A first moment of -1 means that the holding was there
    before; a last moment equal to the number of moments means that it stays."""

    works: list[int]  # by moment: bytes that live for that moment only
    size: list[int] = field(default_factory=list)  # by holding, as are:
    first: list[int] = field(default_factory=list)
    last: list[int] = field(default_factory=list)

    def add(self, size: int, first: int, last: int) -> int:
        """Add a holding and return its number."""
        self.size.append(size)
        self.first.append(first)
        self.last.append(last)
        return len(self.size) - 1

    def alive(self) -> list[int]:
        """Bytes alive at each moment."""
        change = [0] * (len(self.works) + 3)  # at moment -1, 0, 1 and so on
        for size, first, last in zip(self.size, self.first, self.last, strict=True):
            change[first + 1] += size
            change[last + 2] -= size
        change[1] += change[0]
        held = accumulate(change[1:])
        return [there + works for there, works in zip(held, self.works, strict=False)]


@dataclass(frozen=True, slots=True)
class Flow:
    """Which issues make and read which holdings, both as numbers, in any order. A holding is freed
    by the last issue that reads it, whichever that is, unless it stays to the end."""

    allocates: list[int]  # by issue: bytes while it runs
    makes: list[int]  # by issue: bytes that outlive it, before those that it frees
    frees: list[list[int]]  # by issue: the holdings it reads that their last reader frees
    size: list[int]  # by holding
    users: list[list[int]]  # by holding: the issues that read it

    @staticmethod
    def of(
        count: int,
        issues: Iterable[tuple[int, int, Collection[H], Collection[H]]],
        size: Callable[[H], int],
        stays: Callable[[H], bool],
    ) -> Flow:
        """Make the Flow of some of `count` issues. Each is its number, the bytes it works with, the
        holdings that it makes and the holdings that it reads."""
        allocates, makes = [0] * count, [0] * count
        frees: list[list[int]] = [[] for _ in range(count)]
        sizes: list[int] = []
        users: list[list[int]] = []
        number: dict[H, int] = {}  # holding -> its number, -1 if it stays
        issues = list(issues)
        for n, _, _, reads in issues:
            for holding in reads:
                at = number.get(holding)
                if at is None:
                    at = -1 if stays(holding) else len(sizes)
                    number[holding] = at
                    if at >= 0:
                        sizes.append(size(holding))
                        users.append([])
                if at >= 0:
                    frees[n].append(at)
                    users[at].append(n)
        for n, works, made, _ in issues:
            allocates[n] = works
            for holding in made:
                more = size(holding)
                allocates[n] += more
                if holding in number or stays(holding):
                    makes[n] += more
        return Flow(allocates, makes, frees, sizes, users)

    def during(self, issues: Iterable[int], held: Iterable[int]) -> list[int]:
        """Return the bytes while each issue runs, where `held` bytes are held before each."""
        return [before + self.allocates[n] for n, before in zip(issues, held, strict=False)]


class Balance:
    """Counts what issues of a Flow hold, run one by one, on top of `held` bytes that were there
    before.

    `left` says how many readers of each holding are still to come, by default all of them.
    """

    __slots__ = ("flow", "held", "left")

    def __init__(
        self, flow: Flow, held: int = 0, left: list[int] | MutableMapping[int, int] | None = None
    ) -> None:
        self.flow, self.held = flow, held
        self.left = [len(users) for users in flow.users] if left is None else left

    def adds(self, n: int) -> int:
        """Return how many bytes more (or less) are held once the issue has run."""
        flow, left = self.flow, self.left
        more = flow.makes[n]
        for holding in flow.frees[n]:
            if left[holding] == 1:
                more -= flow.size[holding]
        return more

    def run(self, n: int) -> None:
        flow, left = self.flow, self.left
        more = flow.makes[n]
        for holding in flow.frees[n]:
            left[holding] -= 1
            if not left[holding]:
                more -= flow.size[holding]
        self.held += more

    def along(self, issues: Iterable[int], most: int = NO_LIMIT) -> list[int]:
        """Run the issues until one would have more than `most` while it runs; return what is held
        after each."""
        flow, left, held = self.flow, self.left, self.held
        allocates, makes, frees, size = flow.allocates, flow.makes, flow.frees, flow.size
        after = []
        for n in issues:
            if held + allocates[n] > most:
                break
            held += makes[n]
            for holding in frees[n]:
                now = left[holding] - 1
                left[holding] = now
                if not now:
                    held -= size[holding]
            after.append(held)
        self.held = held
        return after

    def undo(self, n: int) -> None:
        """Take back the issue that ran last."""
        flow, left = self.flow, self.left
        self.held -= flow.makes[n]
        for holding in flow.frees[n]:
            if not left[holding]:
                self.held += flow.size[holding]
            left[holding] += 1
