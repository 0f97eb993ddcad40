"""Load and save plans, profiles, traces and problems. Every failure is a FileError.

A file is replaced as a whole or not at all: readers see the old text or the new one, also when the
writer dies. Text is parsed once before it is saved, so every saved file can be loaded.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import stat
from collections.abc import Callable
from typing import Any, TypeVar

from overlapc.core.errors import FileError
from overlapc.core.ir import Plan, Problem, Profile, Trace
from overlapc.core.text import (
    format_plan,
    format_problem,
    format_profile,
    format_trace,
    parse_plan,
    parse_problem,
    parse_profile,
    parse_trace,
)

StrPath = str | os.PathLike[str]
MAX_BYTES = 256 << 20

_T = TypeVar("_T")


def load_plan(path: StrPath) -> Plan:
    """Load a plan from a file; a FileError says what is wrong with it."""
    return _load(path, "plan", parse_plan)


def save_plan(path: StrPath, plan: Plan) -> None:
    """Save a plan to a file that `load_plan` reads."""
    _save(path, "plan", plan, format_plan, parse_plan)


def load_profile(path: StrPath) -> Profile:
    """Load a profile from a file; a FileError says what is wrong with it."""
    return _load(path, "profile", parse_profile)


def save_profile(path: StrPath, profile: Profile) -> None:
    """Save a profile to a file that `load_profile` reads."""
    _save(path, "profile", profile, format_profile, parse_profile)


def load_trace(path: StrPath) -> Trace:
    """Load a trace from a file; a FileError says what is wrong with it."""
    return _load(path, "trace", parse_trace)


def save_trace(path: StrPath, trace: Trace) -> None:
    """Save a trace to a file that `load_trace` reads."""
    _save(path, "trace", trace, format_trace, parse_trace)


def load_problem(path: StrPath) -> Problem:
    """Load a problem from a file; a FileError says what is wrong with it."""
    return _load(path, "problem", parse_problem)


def save_problem(path: StrPath, problem: Problem) -> None:
    """Save a problem to a file that `load_problem` reads."""
    _save(path, "problem", problem, format_problem, parse_problem)


def read_text(path: StrPath, kind: str) -> str:
    """Return the file's text, newlines unchanged. `kind` is the expected kind of file, for
    errors."""
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise FileError(
                    f"cannot read the {kind} {_show(path)}: found a pipe or device, "
                    "expected a file: pass the path of a file"
                )
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise FileError(
                f"cannot read the {kind} {_show(path)}: found more than {MAX_BYTES} bytes, "
                f"expected a {kind} of overlapc's: pass the path of one"
            )
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise FileError(
            f"cannot read the {kind} {_show(path)}: found {error.object[error.start]:#x} at byte "
            f"{error.start}, expected UTF-8: make the {kind} again"
        ) from error
    except (OSError, ValueError) as error:
        raise FileError(
            f"cannot read the {kind} {_show(path)}: {_reason(error)}: pass the path of a file "
            "you may read"
        ) from error


def read_json(path: StrPath, kind: str, finite: bool = True) -> Any:
    """Parse the file's JSON. If all numbers have to be `finite`, NaN, Infinity and those that
    overflow to Infinity are refused."""

    def number_of(word: str) -> float:
        number = float(word)
        if finite and not math.isfinite(number):
            raise ValueError(f"found {word}, which is no finite number")
        return number

    text = read_text(path, kind)
    try:
        return json.loads(text, parse_float=number_of, parse_constant=number_of)
    except RecursionError:
        reason = "it is nested too deeply"
    except ValueError as error:
        reason = str(error)
    raise FileError(f"cannot read the {kind} {_show(path)}: {reason}: expected JSON, make it again")


def printable(text: str) -> str:
    """Return the text on one line that any terminal can show; unprintable characters are
    escaped."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text
    )


def write_file(path: StrPath, content: str | bytes) -> None:
    """Replace the file's content; if that fails, the old file stays."""
    try:
        data = content.encode("utf-8") if isinstance(content, str) else content
        target = os.path.realpath(path)  # write to the file behind a link, do not replace the link
        temporary = os.path.join(os.path.dirname(target), f".overlapc-{secrets.token_hex(8)}")
        try:
            # Not `tempfile`, whose files only their owner may read.
            with open(temporary, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, target)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
    except (OSError, ValueError) as error:
        raise FileError(
            f"cannot write {_show(path)}: {_reason(error)}: pass a path where you may write; "
            "nothing was changed"
        ) from error


def make_folder(path: StrPath, option: str = "--out") -> None:
    """Make the folder if it is missing, before any work is done."""
    try:
        os.makedirs(path, exist_ok=True)
    except (OSError, ValueError) as error:
        raise FileError(
            f"{option} {_show(path)}: {_reason(error)}; pass a folder you may write to"
        ) from None


def _load(path: StrPath, kind: str, parse: Callable[[str], _T]) -> _T:
    text = read_text(path, kind)
    try:
        return parse(text)
    except FileError as error:
        raise FileError(f"{_show(path)}: {error}") from error


def _save(
    path: StrPath, kind: str, item: _T, format: Callable[[_T], str], parse: Callable[[str], _T]
) -> None:
    text = format(item)
    try:
        same = parse(text) == item
    except FileError as error:
        raise FileError(f"cannot write {_show(path)}: {error}") from error
    if not same:
        raise FileError(
            f"cannot write {_show(path)}: found names that are not Unicode text, expected a "
            f"{kind} that reads back as it is: rename them"
        )
    write_file(path, text)


def _open_at_once(path: str, flags: int) -> int:
    """Open without waiting: otherwise a pipe that nobody writes to would block."""
    return os.open(path, flags | os.O_NONBLOCK)


def _reason(error: OSError | ValueError) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error)


def _show(path: StrPath) -> str:
    """Show a path on one printable line."""
    return ascii(os.fspath(path))
