"""`Record` is a base of dataclasses that are pickled for another process while threads use them."""

from __future__ import annotations

from dataclasses import fields
from typing import Any


class Record:
    """Pickles a dataclass by its fields alone. Cached properties stand beside the fields, and
    another thread may add one during pickling."""

    def __getstate__(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self)}  # type: ignore[arg-type]
