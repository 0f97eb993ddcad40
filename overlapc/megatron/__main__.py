"""`python -m overlapc.megatron [options] script.py ...` runs a Megatron script with overlapc in it.

    torchrun --nproc_per_node 8 -m overlapc.megatron --memory-budget 40GB pretrain_gpt.py ...

The script runs as `python script.py ...` runs it, with its arguments behind its name. The options
before its name are those of `overlapc.megatron.patch`: `--solver heu` or `--solver=heu` is
`solver="heu"`. `--help` lists them.
"""

from __future__ import annotations

import os
import runpy
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

from overlapc.core.errors import OptionError, OverlapcError
from overlapc.megatron import patch
from overlapc.planning.options import UNITS, value_of

_USAGE = (
    "expected: torchrun ... -m overlapc.megatron [--option value ...] script.py [its arguments]"
)
OPTIONS = {  # what --help says of each
    "memory-budget": "the most that a step of a chunk may allocate: 40GB, bytes, or a fraction of "
    "what keeping everything takes, 0.5; by default what the script's own recompute would take",
    "solver": "overlap (the default), heu (quicker), opt, or a baseline",
    "profile": "measure (the default) times ops and links here; estimate takes them from hardware",
    "hardware": "a preset's name, or a file of `overlapc profile`; for estimates",
    "cache": "a file in which measured costs are kept for the next run",
    "slices": "into how many slices each microbatch is cut, which hide each other's communication, "
    "or auto; gradients are the whole microbatch's to rounding then",
    "plan": "a file of a saved plan, instead of planning",
    "timeout-s": "seconds that ranks wait for a rank without a sign of life, 7 by default",
    "merge": "false: each forward and each backward is a graph of its own, without a pipeline too",
    "fill": "false: recompute and weight gradients are not moved to where a stage waits",
    "schedule": "1f1b (the default), or merged: each forward in 1F1B is one graph with a backward",
    "search": "the search.json of `overlapc search --out DIR`: budgets, solver and slices",
}


def main(arguments: Sequence[str]) -> None:
    """Patch Megatron, then run the script that the arguments name, as `__main__`."""
    try:
        options, script, rest = split(arguments)
        if "help" in options:
            print(help_text())
            return
        if not os.path.isfile(script):
            raise OptionError(f"script {script!r}: found no such file; {_USAGE}")
        sys.path[0] = os.path.dirname(os.path.abspath(script))  # before Megatron is imported
        sys.argv = [script, *rest]
        patch(**options)
    except OverlapcError as error:
        sys.exit(f"overlapc: {error}")
    runpy.run_path(script, run_name="__main__")


def help_text() -> str:
    """What `--help` prints."""
    listed = [
        textwrap.fill(f"--{name:<15}{what}", 100, initial_indent="  ", subsequent_indent=" " * 19)
        for name, what in OPTIONS.items()
    ]
    return "\n".join([str(__doc__), "Options:", *listed])


def split(arguments: Sequence[str]) -> tuple[dict[str, Any], str, list[str]]:
    """Split the command line: options of overlapc, the script, and the script's arguments. Where
    help is asked for it is the only option."""
    options: dict[str, Any] = {}
    left = list(arguments)
    while left and left[0].startswith("-"):
        word, equals, value = left.pop(0).partition("=")
        if word in ("-h", "--help"):
            return {"help": True}, "", []
        if not word.startswith("--"):
            raise OptionError(f"option {word!r}: found one dash; {_USAGE}")
        if not equals and (not left or left[0].startswith("--")):
            raise OptionError(f"option {word!r}: found no value behind it; {_USAGE}")
        value = value if equals else left.pop(0)
        if left and left[0].upper() in UNITS and not os.path.isfile(left[0]):
            raise OptionError(
                f"option {word!r}: found a space in {value} {left[0]}; expected one word: "
                f"{word} {value}{left[0]}"
            )
        options[word[2:].replace("-", "_")] = value_of(value)
    if not left:
        raise OptionError(f"found no script; {_USAGE}")
    return options, left[0], left[1:]


if __name__ == "__main__":
    main(sys.argv[1:])
