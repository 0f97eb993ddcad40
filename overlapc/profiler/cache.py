"""The cache keeps measured figures in a file, so that the same thing is not measured twice.

    file     = {"overlapc": "profile cache", "version", "checksum", "entries"}
    entries  = section -> key -> whole numbers
    section  = what the figures depend on: device, torch, threads; or the identity of a link
    key      = op signature, or kind, ranks and bytes of a collective

The file is replaced in one step, so a reader sees the old or the new one and never a part. Two
processes that save at once may lose figures, not correctness.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from overlapc.core.errors import FileError
from overlapc.core.files import StrPath, read_text, write_file
from overlapc.tools.told import warn

__all__ = ["Cache", "default_path"]

_KIND, _VERSION = "profile cache", 1
Entries = dict[str, dict[str, list[int]]]


def default_path() -> Path:
    """Return `profile.json` in the folder that OVERLAPC_CACHE names, else in ~/.cache/overlapc."""
    folder = os.environ.get("OVERLAPC_CACHE")
    return (Path(folder) if folder else Path.home() / ".cache" / "overlapc") / "profile.json"


def cache_key(signature: str, sizes: Iterable[object] = ()) -> str:
    """Make an op's key, from its signature and the sizes that the signature leaves open."""
    return f"{signature} | {','.join(map(str, sizes))}"


class Cache:
    """Holds the figures in the file at `path`, and those added until `save()`.

    A file that the user names must be good or absent; else FileError, and the file stays unchanged.
    If the default file is damaged or cannot be written, one warning says so and measuring goes on
    without it.
    """

    def __init__(self, path: StrPath | None = None) -> None:
        self.path = Path(path) if path is not None else default_path()
        self._named = path is not None
        self._entries: Entries = {}
        self._added: Entries = {}
        try:
            self._entries = _read(self.path)
        except FileError as error:
            self._complain(error, "measuring again")

    def get(self, section: str, key: str) -> tuple[int, ...] | None:
        for entries in (self._added, self._entries):
            if (numbers := entries.get(section, {}).get(key)) is not None:
                return tuple(numbers)
        return None

    def put(self, section: str, key: str, numbers: Sequence[int]) -> None:
        self._added.setdefault(section, {})[key] = [int(number) for number in numbers]

    def save(self) -> None:
        """Write the added figures, together with those that are in the file by now."""
        if not self._added:
            return
        try:
            entries = _read(self.path)
        except FileError:
            entries = self._entries  # a named file was good when opened: replace it
        for section, figures in self._added.items():
            entries.setdefault(section, {}).update(figures)
        try:
            _write(self.path, entries)
        except FileError as error:
            self._complain(error, "going on without saving")
            return
        self._entries, self._added = entries, {}

    def _complain(self, error: FileError, what_now: str) -> None:
        if self._named:
            raise error
        warn(f"{error}; {what_now}")


def _read(path: Path) -> Entries:
    if not path.exists():
        return {}
    try:
        data = json.loads(read_text(path, _KIND))
    except (ValueError, RecursionError) as error:
        raise FileError(f"{_KIND} {path} is damaged (not JSON): delete it") from error
    if not isinstance(data, dict) or data.get("overlapc") != _KIND:
        raise FileError(f"{path} is not a profile cache of overlapc: name another file")
    if data.get("version") != _VERSION:
        raise FileError(
            f"{_KIND} {path} has version {data.get('version')!r}, this overlapc reads "
            f"{_VERSION}: delete it"
        )
    entries: Any = data.get("entries")
    if data.get("checksum") != _checksum(entries) or not _is_entries(entries):
        raise FileError(f"{_KIND} {path} is damaged (wrong checksum): delete it")
    return dict(entries)


def _is_entries(entries: Any) -> bool:
    return isinstance(entries, dict) and all(
        isinstance(figures, dict)
        and all(
            isinstance(numbers, list) and all(type(n) is int and n >= 0 for n in numbers)
            for numbers in figures.values()
        )
        for figures in entries.values()
    )


def _checksum(entries: Any) -> str:
    return hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()


def _write(path: Path, entries: Entries) -> None:
    head = {"overlapc": _KIND, "version": _VERSION, "checksum": _checksum(entries)}
    with contextlib.suppress(OSError):  # write_file says what is wrong
        path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, json.dumps(head | {"entries": entries}, sort_keys=True, indent=0) + "\n")
