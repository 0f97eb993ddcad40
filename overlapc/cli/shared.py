"""Exit codes, argument types and printing that all commands share.

Nothing here imports torch or other slow modules, because `--help` declares the arguments of every
command.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from overlapc.core.errors import OptionError
from overlapc.core.files import printable
from overlapc.report.table import table

GOOD, FAILED, USAGE = 0, 1, 2
_MOST = 1_000_000
COMPARED = "none,full,selective,megatron,checkmate,heu,opt"  # with the winner of a search

# Declares a command: its name, the function that runs it, one line of help; returns its parser.
Declare = Callable[[str, Callable[[argparse.Namespace], int], str], argparse.ArgumentParser]


def positive(text: str) -> int:
    """Parse an argument that must be a whole number above 0."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if not 0 < number <= _MOST:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number from 1 to {_MOST}")
    return number


def seconds(text: str) -> float:
    """Parse an argument that must be a number of seconds above 0."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number <= _MOST:  # refuses NaN, too
        raise argparse.ArgumentTypeError(f"{text!r}: expected more than 0 and at most {_MOST}")
    return number


def bytes_or_text(text: str) -> int | str:
    """Return a budget as a number of bytes if it is a whole number, else as the user's text."""
    return int(text) if text.strip().isdigit() and len(text) < 20 else text


def can_write(path: Path | None) -> None:
    """Raise if the folder of `path` is missing, before any work is done."""
    if path is not None and not path.absolute().parent.is_dir():
        raise OptionError(
            f"--out {path}: there is no folder {path.absolute().parent}; make it first"
        )


def print_table(rows: Sequence[Sequence[str]]) -> None:
    """Print rows of cells as columns."""
    print("\n".join(table(rows)))


def print_text(text: str) -> None:
    """Print text with names from files, whatever characters they have."""
    print("\n".join(map(printable, text.split("\n"))))


def say(text: str) -> None:
    """Print a message to stderr."""
    print(text, file=sys.stderr, flush=True)
