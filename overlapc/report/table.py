"""Functions for columns and figures, which all reports share."""

from __future__ import annotations

from collections.abc import Sequence

from overlapc.core.files import printable


def table(rows: Sequence[Sequence[str]], indent: str = "") -> list[str]:
    """Write a line for each row, with cells padded to their columns."""
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        indent + "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def milliseconds(ns: float) -> str:
    """Write milliseconds with one digit behind the point, or three if the time is short."""
    return f"{ns / 1e6:,.1f}" if ns >= 10_000_000 or ns == 0 else f"{ns / 1e6:.3f}"


def gigabytes(size: float) -> str:
    """Write GB of 10^9 bytes with one digit behind the point, or three if the size is small."""
    return f"{size / 1e9:,.1f}" if size >= 1_000_000_000 or size == 0 else f"{size / 1e9:.3f}"
