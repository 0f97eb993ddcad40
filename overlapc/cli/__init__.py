"""`overlapc COMMAND` runs one command. Data goes to stdout, messages to stderr.

Exit codes: 0 good, 1 nothing fits or a check failed, 2 wrong use. Each file of this folder declares
the arguments of a few commands and runs them. Commands import torch only when they run, so `--help`
is instant.
"""

from __future__ import annotations

import argparse
import io
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from overlapc.cli.lists import declare_presets
from overlapc.cli.measuring import declare_profile, declare_verify
from overlapc.cli.plan_files import declare_explain, declare_plan
from overlapc.cli.report import declare_report
from overlapc.cli.search import declare_search
from overlapc.cli.shared import FAILED, GOOD, USAGE, say
from overlapc.cli.timelines import declare_simulate
from overlapc.cli.trace import declare_trace
from overlapc.cli.validate import declare_validate
from overlapc.core import __version__
from overlapc.core.errors import (
    Infeasible,
    InvalidPlan,
    InvalidProblem,
    InvalidSchedule,
    OverlapcError,
)

__all__ = ["FAILED", "GOOD", "USAGE", "main"]

_COMMANDS = (  # in the order of --help
    declare_search,
    declare_presets,
    declare_explain,
    declare_plan,
    declare_simulate,
    declare_report,
    declare_verify,
    declare_profile,
    declare_trace,
    declare_validate,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    parser = _parser()
    for stream in (sys.stdout, sys.stderr):  # any name in a file can be printed
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        args = parser.parse_args(argv)
    except SystemExit as ended:  # argparse has said why
        return int(ended.code or 0)
    try:
        args.command = shlex.join(["overlapc", *(sys.argv[1:] if argv is None else argv)])
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except (Infeasible, InvalidPlan, InvalidProblem, InvalidSchedule) as error:
        say(f"overlapc: {error}")
        return FAILED
    except OverlapcError as error:
        say(f"overlapc: {error}")
        return USAGE
    except BrokenPipeError:  # the reader of the output has closed it
        _write_no_more()
        return GOOD
    except OSError as error:  # most often a full disk behind `> file`
        _write_no_more()
        say(f"overlapc: {error}; expected to read and write: free space, or name another file")
        return FAILED
    except KeyboardInterrupt:
        say("overlapc: interrupted")
        return FAILED


def _write_no_more() -> None:
    """Drop the rest of stdout's buffer, which would fail again when the process ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Parser(argparse.ArgumentParser):
    """A parser that tells what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"{self.prog}: {message} (`{self.prog} --help` lists the options)\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="overlapc",
        description="overlapc makes a PyTorch training step faster by doing useful work while the "
        "GPU would wait for communication. These commands need no GPU.",
        epilog="Every figure is predicted unless it says measured. A GB is 10^9 bytes, everywhere.",
    )
    parser.add_argument("--version", action="version", version=f"overlapc {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def command(
        name: str, run: Callable[[argparse.Namespace], int], what: str
    ) -> argparse.ArgumentParser:
        subparser = commands.add_parser(name, help=what, description=what)
        subparser.set_defaults(run=run)
        subparser.add_argument("--json", action="store_true", help="print JSON instead of text")
        return subparser

    for declare in _COMMANDS:
        declare(command)
    return parser
