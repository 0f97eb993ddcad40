"""`Record` is a dataclass that another process may be sent while this one works with it."""

from __future__ import annotations

from dataclasses import fields
from typing import Any


class Record:
    """Pickles a dataclass by its fields alone: what is computed from them once, and kept beside
    them, may come while another thread pickles."""

    def __getstate__(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self)}  # type: ignore[arg-type]
