"""`of_young_alone` keeps Python's garbage collector from looking at all objects while many are made
that stay, as in tracing and planning."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

_NEVER = 1_000_000_000  # collections of younger objects, before old ones are looked at, too


@contextlib.contextmanager
def of_young_alone() -> Iterator[None]:
    """In the block only objects that were made lately are collected. A model's process has so many
    old ones that to look at them once takes a third of a second."""
    youngest, younger, old = gc.get_threshold()
    gc.set_threshold(youngest, younger, _NEVER)
    try:
        yield
    finally:
        if gc.get_threshold() == (youngest, younger, _NEVER):  # nobody has changed it meanwhile
            gc.set_threshold(youngest, younger, old)
