"""Says once, of a model whose trace may give other numbers than eager, which line that is."""

from __future__ import annotations

from collections.abc import Sequence

from overlapc.tools.told import warn


class Inexact:
    """Warns of the first such line, at the first call that has one."""

    def __init__(self) -> None:
        self._said = False

    def say(self, lines: Sequence[str]) -> None:
        if self._said or not lines:
            return
        self._said = True
        more = f" (and {len(lines) - 1} more: see .differences)" if lines[1:] else ""
        warn(f"overlapc: numbers may differ from eager's, as torch.compile's do: {lines[0]}{more}")
