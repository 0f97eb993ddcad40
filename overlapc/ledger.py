"""What is alive when, in one place: memory that comes at one moment and goes at another.

    holding   so many bytes, from the first moment that has them to the last
    Ledger    the whole of one order: all holdings, and what is there for one moment only

`simulate` writes down the storages of a plan, whose issues are the moments; `pipeline` what a
rank's steps hold, work with and send; `stages` what actions leave to later ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate


@dataclass(slots=True)
class Ledger:
    """Holdings are numbered. One whose first moment is -1 was there before, and one whose last is
    the number of moments stays."""

    works: list[int]  # by moment: bytes that are there for that moment only
    size: list[int] = field(default_factory=list)  # by holding, as are:
    first: list[int] = field(default_factory=list)
    last: list[int] = field(default_factory=list)

    def add(self, size: int, first: int, last: int) -> int:
        """The number of a new holding."""
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
