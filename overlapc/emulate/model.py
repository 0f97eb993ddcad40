"""`Link` gives the time of a collective on an alpha-beta link, without torch.

    seconds = alpha_s + wire_bytes / bytes_per_s

`wire_bytes` is what one rank sends (and receives) under the standard ring algorithms. Sizes
are *full* sizes: what an all-gather produces, what a reduce-scatter or an all-to-all consumes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from overlapc.core.errors import OptionError

Kind = Literal[
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all",
    "broadcast", "reduce", "gather", "scatter", "p2p", "barrier",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Link:
    """A link of one direction: latency `alpha_s` and bandwidth `bytes_per_s`.

    >>> Link(alpha_s=0.001, bytes_per_s=1e9).seconds("all_reduce", 4_000_000, ranks=4)
    0.007
    """

    alpha_s: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        if not self.alpha_s >= 0:
            raise OptionError(f"alpha_s is {self.alpha_s}; a latency is zero or more seconds")
        if not self.bytes_per_s > 0:
            raise OptionError(f"bytes_per_s is {self.bytes_per_s}; a bandwidth is above zero")

    @staticmethod
    def wire_bytes(kind: Kind, size_bytes: int, ranks: int) -> float:
        """Bytes one rank puts on the wire for a collective of `size_bytes` over `ranks`."""
        others = (ranks - 1) / ranks
        match kind:
            case "all_reduce":
                return 2 * others * size_bytes
            case "all_gather" | "reduce_scatter" | "all_to_all" | "gather" | "scatter":
                return others * size_bytes
            case "broadcast" | "reduce" | "p2p":
                return float(size_bytes) if ranks > 1 else 0.0
            case "barrier":
                return 0.0
        raise OptionError(f"unknown kind of collective {kind!r}; known: {get_args(Kind)}")

    def seconds(self, kind: Kind, size_bytes: int, ranks: int) -> float:
        """How long the link is busy; a group of one rank sends nothing and takes no time."""
        if ranks == 1:
            return 0.0
        return self.wire_seconds(self.wire_bytes(kind, size_bytes, ranks))

    def wire_seconds(self, wire_bytes: float) -> float:
        return self.alpha_s + wire_bytes / self.bytes_per_s
