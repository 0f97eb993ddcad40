"""Plans that earlier runs found, in files: a job that starts again has them in seconds.

    file     = {"overlapc": "kept plans", "version", "ranks", "adding", "plans"}
    ranks    = the costs of each rank, as `agreement.packed` writes them
    plans    = question -> plans' texts

There is a file for each graph on a device, for so many ranks and one version of overlapc. What was
measured first is what all plans there are for, whatever their budgets are: a run measures again,
and takes the costs that are kept if its own are near. So a second run plans the same. The file is
replaced in one step; two processes that write at once may lose plans, not correctness. Of a folder
the files that were used last stay.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from overlapc.core import __version__
from overlapc.core.errors import FileError
from overlapc.core.files import read_json, write_file
from overlapc.core.ir import Plan, Problem, Profile, Trace
from overlapc.core.text import format_plan, format_problem, parse_plan
from overlapc.planning.options import Options
from overlapc.tools.told import warn

_KIND, VERSION = "kept plans", 1
_NEAR = 2.0  # the times in all that count as near: machines and links vary from run to run
_FILES = 200  # of a folder
_NAME = "[0-9a-f]" * 24 + ".json"  # nobody else's files are touched
_CONDITIONS = ("device", "torch", "threads", "matmul_precision", "deterministic", "clock")


class KeptPlans:
    """The file of a graph; without a cache there is none."""

    def __init__(self, options: Options, trace: Trace, profiles: Sequence[Profile]) -> None:
        from overlapc.profiler.cache import default_path

        self.path: Path | None = None
        self._estimated = options.profile == "estimate"
        self.content: dict[str, Any] = {}
        if not options.cache:
            return
        costs = default_path() if isinstance(options.cache, bool) else Path(options.cache)
        conditions = [profiles[0].conditions.get(name) for name in _CONDITIONS]
        sizes = [value.bytes for value in trace.values]  # a digest has no sizes of symbols
        names = [op.name for op in trace.ops]
        graph = [VERSION, __version__, trace.digest, names, sizes, conditions, len(profiles)]
        graph += [options.profile, str(options.hardware) if self._estimated else ""]
        self.path = costs.with_suffix(".plans") / f"{_hashed([json.dumps(graph)])}.json"

    def costs(self, now: Sequence[Mapping[str, Any]]) -> str:
        """The costs of all ranks that are kept, if those of `now` are near, as JSON; else none, and
        nothing that is kept is used: a broken file is replaced."""
        if self.path is None or not self.path.exists():
            return ""
        try:
            found = read_json(self.path, _KIND)
            known = found["overlapc"] == _KIND and found["version"] == VERSION
            near = _same if self._estimated else _near
            pairs = zip(found["ranks"], now, strict=True)
            if known and all(near(*pair) for pair in pairs) and dict(found["plans"]):
                self.content = found
                with contextlib.suppress(OSError):  # where others' files are only read
                    os.utime(self.path)
                return json.dumps([found["ranks"], float(found["adding"])])
        except (FileError, ValueError, TypeError, LookupError, AttributeError):
            pass
        return ""

    def plans(self, question: str) -> tuple[Plan, ...]:
        """The plans for the same problem and options; none if there are none that can be read."""
        try:
            return tuple(map(parse_plan, self.content["plans"][question]))
        except (FileError, ValueError, TypeError, LookupError):
            return ()

    def put(
        self,
        ranks: Sequence[Mapping[str, Any]],
        adding: float,
        question: str,
        plans: Sequence[Plan],
    ) -> None:
        """Keep plans for the costs of these ranks, beside those for other options."""
        if self.path is None:
            return
        head = {"overlapc": _KIND, "version": VERSION, "ranks": ranks, "adding": adding}
        more = {question: [format_plan(plan) for plan in plans]}
        self.content = head | {"plans": {**self.content.get("plans", {}), **more}}
        try:
            with contextlib.suppress(OSError):  # write_file says what is wrong
                os.makedirs(self.path.parent, exist_ok=True)
            write_file(self.path, json.dumps(self.content) + "\n")
            _forget(self.path.parent)
        except FileError as error:
            warn(f"{error}; going on without keeping plans")


def _forget(folder: Path) -> None:
    with contextlib.suppress(OSError):  # another process forgets, too; or may not here
        files = sorted(folder.glob(_NAME), key=lambda file: file.stat().st_mtime_ns)
        for file in files[:-_FILES]:
            file.unlink()


def question_of(problems: Iterable[Problem], about: Sequence[str]) -> str:
    """What plans are asked for: the problems, and what else decides."""
    return _hashed([*map(format_problem, problems), *about])


def _hashed(texts: Iterable[str]) -> str:
    found = hashlib.sha256()
    for text in texts:
        found.update(text.encode() + b"\0")
    return found.hexdigest()[:24]


def _same(kept: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Are estimates the same? (A hardware file or a cache of op times may have changed.)"""
    return bool(kept["costs"] == now["costs"] and kept["slowdown"] == now["slowdown"])


def _near(kept: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Do compute and traffic take about as long, and is the memory the same?"""
    if kept["costs"].keys() != now["costs"].keys():
        return False
    pairs = [(kept["costs"][name], cost) for name, cost in now["costs"].items()]
    times = [[sum(cost[i] for cost in each) for each in zip(*pairs, strict=True)] for i in (0, 1)]
    same_bytes = all(old[2] == new[2] for old, new in pairs)
    return same_bytes and all(max(each) <= _NEAR * min(each) for each in times)
