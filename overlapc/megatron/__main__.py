"""`python -m overlapc.megatron [options] script.py ...` runs a Megatron script with overlapc in it.

    torchrun --nproc_per_node 8 -m overlapc.megatron --memory-budget 40GB pretrain_gpt.py ...

The script runs as `python script.py ...` runs it, with its arguments behind its name. The options
before its name are those of `overlapc.megatron.patch`: `--solver heu` or `--solver=heu` is
`solver="heu"`.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from typing import Any

from overlapc.errors import OptionError, OverlapcError
from overlapc.megatron import patch
from overlapc.planning.options import value_of

_USAGE = (
    "expected: torchrun ... -m overlapc.megatron [--option value ...] script.py [its arguments]"
)


def main(arguments: Sequence[str]) -> None:
    """Patch Megatron, then run the script that the arguments name, as `__main__`."""
    if list(arguments) in (["-h"], ["--help"]):
        print(__doc__)
        return
    try:
        options, script, rest = split(arguments)
        if not os.path.isfile(script):
            raise OptionError(f"script {script!r}: found no such file; {_USAGE}")
        sys.path[0] = os.path.dirname(os.path.abspath(script))  # before Megatron is imported
        sys.argv = [script, *rest]
        patch(**options)
    except OverlapcError as error:
        sys.exit(f"overlapc: {error}")
    runpy.run_path(script, run_name="__main__")


def split(arguments: Sequence[str]) -> tuple[dict[str, Any], str, list[str]]:
    """Split the command line: options of overlapc, the script, and the script's arguments."""
    options: dict[str, Any] = {}
    left = list(arguments)
    while left and left[0].startswith("-"):
        word, equals, value = left.pop(0).partition("=")
        if not word.startswith("--"):
            raise OptionError(f"option {word!r}: found one dash; {_USAGE}")
        if not equals and (not left or left[0].startswith("--")):
            raise OptionError(f"option {word!r}: found no value behind it; {_USAGE}")
        options[word[2:].replace("-", "_")] = value_of(value if equals else left.pop(0))
    if not left:
        raise OptionError(f"found no script; {_USAGE}")
    return options, left[0], left[1:]


if __name__ == "__main__":
    main(sys.argv[1:])
