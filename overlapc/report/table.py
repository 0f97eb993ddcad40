"""Columns of text."""

from __future__ import annotations

from collections.abc import Sequence

from overlapc.files import printable


def table(rows: Sequence[Sequence[str]], indent: str = "") -> list[str]:
    """A line for each row, its cells as wide as their columns."""
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        indent + "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
