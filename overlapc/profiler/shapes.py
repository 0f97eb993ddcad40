"""`Kernels` says how fast a GPU's kernels are by the shapes of what they multiply."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from overlapc.profiler.link_spec import Table, interpolate

# Of a product's tiles, rows and columns, and the part of the largest's rate that each reaches.
_TILES = ((128, 256, 1.0), (256, 128, 1.0), (128, 128, 0.97), (64, 64, 0.7))
_TILE = 128  # rows and columns
_ATTENTION_ROWS = 128  # of queries that a block of fused attention works on
_ALIGNED = 16  # bytes: what a multiprocessor loads at once
_ATTENTION_RAMP = 512  # keys: a causal kernel's diagonal blocks are half empty


def filled(m: int, n: int, batch: int, multiprocessors: int) -> float:
    """Of the tiles that so many multiprocessors could do in a product's waves, the part that it
    has, with the tiles that suit it best."""
    found = 0.0
    for rows, columns, rate in _TILES:
        tiles = -(-m // rows) * -(-n // columns) * batch
        waves = -(-tiles // multiprocessors)
        found = max(found, rate * m * n * batch / (waves * multiprocessors * rows * columns))
    return found


def splits(m: int, n: int, batch: int, multiprocessors: int) -> Iterator[int]:
    """Into how many pieces the sums of a product may be cut, so that a product of few tiles
    occupies all multiprocessors: a small weight's gradient is a sum over many tokens."""
    tiles = -(-m // _TILE) * -(-n // _TILE) * batch
    pieces = 1
    while pieces == 1 or pieces * tiles <= multiprocessors:
        yield pieces
        pieces *= 2


@dataclass(frozen=True)
class Kernels:
    """How fast kernels are by their shapes: parts of the peak where a shape fills the machine.

    A product of matrices is done in tiles, by as many multiprocessors at a time as there are; the
    last wave may leave most of them idle. `ramp` says how long a tile takes to begin and end, in
    steps of k. Layouts are BLAS's: TN a forward, NN an input's gradient, NT a weight's.

    What a product reads is fetched while it multiplies. What it writes hides less: with `writing`
    both take the norm of their times of that power, without it the longer of them.
    """

    multiprocessors: int
    ramp: float
    parts: Mapping[str, float]  # tn, nn, nt, attention_forward, attention_backward
    fills: Mapping[str, float]  # how many waves of attention's blocks take as long as its ends
    # Where long sequences were measured: by keys, attention's rate beside what follows from these
    long: Mapping[str, Table] = field(default_factory=dict)
    # By how many bytes all rows are a multiple of, the part of its rate that a product keeps
    aligned: Table = ()
    writing: float = math.inf
    # Of these rates, the parts that libraries of 2023 reached, which were written for Ampere
    older: Mapping[str, float] = field(default_factory=dict)

    @property
    def of_2023(self) -> Kernels:
        """The same machine with libraries of 2023."""
        parts = {
            kind: part * self.older.get("attention" if "attention" in kind else "products", 1.0)
            for kind, part in self.parts.items()
        }
        return replace(self, parts=parts, older={})

    def matmul_part(
        self, m: int, n: int, k: int, layout: str, batch: int = 1, width: int = 2
    ) -> float:
        """Of a product, or a batch of them, of numbers that are `width` bytes wide."""
        part = max(
            filled(m, n, batch * pieces, self.multiprocessors) * k / (k + pieces * self.ramp)
            for pieces in splits(m, n, batch, self.multiprocessors)
        )
        if self.aligned:
            row = m if layout == "nt" else k  # of the left matrix, as it lies in memory
            rows = (size * width for size in (row, n) if size > 1)
            part *= interpolate(self.aligned, math.gcd(*rows, _ALIGNED))
        return self.parts[layout] * part

    def product_ns(self, computes_ns: float, writes_ns: float) -> float:
        """How long a product takes whose arithmetic and writing would take so long alone."""
        longer, shorter = max(computes_ns, writes_ns), min(computes_ns, writes_ns)
        if math.isinf(self.writing) or not shorter:
            return longer
        return float(longer * (1 + (shorter / longer) ** self.writing) ** (1 / self.writing))

    def attention_part(self, heads: int, seq: int, keys: int, kind: str, causal: bool) -> float:
        """Of attention of so many queries to so many keys; heads of all sequences. If `causal`,
        half of the scores are made."""
        waves = heads * -(-seq // _ATTENTION_ROWS) / self.multiprocessors
        filled = waves / (waves + self.fills[f"{kind}_fill"])
        whole = keys / (keys + _ATTENTION_RAMP) if causal else 1.0
        long = self.long.get(f"{kind}_long")
        return self.parts[kind] * filled * whole * (interpolate(long, keys) if long else 1.0)
