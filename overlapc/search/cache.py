"""The cache keeps planned layouts in files, for later searches."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict
from pathlib import Path

from overlapc.core import __version__
from overlapc.core.errors import FileError
from overlapc.core.files import read_json, write_file
from overlapc.search.evaluate import Found
from overlapc.search.layouts import Cluster, Layout
from overlapc.search.models.transformer import Model
from overlapc.tools.told import warn

VERSION = 14


class PlannedLayouts:
    """Planned layouts: a folder for each question, with a file for each layout, so searches that
    run at the same time lose nothing."""

    def __init__(self, folder: Path | None, model: Model, cluster: Cluster, solver: str) -> None:
        from overlapc.profiler.hardware import load_hardware

        self.folder: Path | None = None
        if folder is None:
            return
        question = json.dumps(
            [VERSION, __version__, asdict(model), asdict(cluster), solver], sort_keys=True
        ) + repr(load_hardware(cluster.hardware))
        name = f"{model.name[:100]}-{hashlib.sha256(question.encode()).hexdigest()[:16]}"
        self.folder = folder / name.replace(os.sep, "_")

    def get(self, layout: Layout, within: int = 0) -> Found | None:
        """Look up a layout; `within` is a limit in bytes other than the question's own memory."""
        if self.folder is None:
            return None
        path = self._path(self.folder, layout, within)
        if not path.exists():
            return None
        try:
            return Found.parse(read_json(path, "search cache"))
        except (FileError, ValueError, TypeError, LookupError, AttributeError):
            return None  # an older or broken file: plan again

    def put(self, found: Found, within: int = 0) -> None:
        if self.folder is None:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            path = self._path(self.folder, found.layout, within)
            write_file(path, json.dumps(found.as_json()))
        except (OSError, FileError) as error:  # a search goes on without its cache
            warn(f"overlapc keeps nothing of this search: {error}")
            self.folder = None

    @staticmethod
    def _path(folder: Path, layout: Layout, within: int) -> Path:
        return folder / (f"{layout} {within or ''}".rstrip() + ".json")
