"""OVERLAPC_DEBUG sets what goes to stderr: 1 stage summaries, 2 the plan, 3 its changes, 4
graphs."""

from __future__ import annotations

import os
import sys


def debug_level() -> int:
    """The level that OVERLAPC_DEBUG asks for; 0 without it."""
    text = os.environ.get("OVERLAPC_DEBUG", "0")
    return int(text) if text.isdigit() else 0


def log(level: int, message: str) -> None:
    """Print a message to stderr if the debug level is at least `level`."""
    if debug_level() >= level:
        print(f"overlapc: {message}", file=sys.stderr, flush=True)
