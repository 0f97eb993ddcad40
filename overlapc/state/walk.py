"""`walk` visits what Python objects hold: the one loop of those that look into them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

Parts = Iterable[tuple[str, Any]]  # the step to each part, and the part


def walk(
    roots: Parts,
    parts: Callable[[Any], Parts | None],
    but: Collection[int] = (),
    deepest: float = float("inf"),
) -> Iterator[tuple[str, Any, bool]]:
    """All that the roots reach: the way to it, the value, and whether it is looked into.

    What `parts` looks into comes once; a value of which it returns None comes as often as it is
    met. Values whose ids are in `but` are left out, and what is deeper than `deepest` steps is not
    looked into."""
    left = [(way, value, 0) for way, value in roots]
    seen: dict[int, Any] = {}  # keeps the values: no other may get one of their ids
    while left:
        way, value, depth = left.pop()
        if id(value) in seen or id(value) in but:
            continue
        found = parts(value) if depth < deepest else None
        if found is not None:
            seen[id(value)] = value
            left += [(way + step, part, depth + 1) for step, part in found]
        yield way, value, found is not None
