"""`warn` speaks to a user at the line of his own code; `Told` tells each thing once."""

from __future__ import annotations

import os
import sys
import warnings

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
# Python's own code between a user's line and ours.
_BETWEEN = ("contextlib.py", "functools.py", "threading.py")


def warn(text: str) -> None:
    """Give a RuntimeWarning at the innermost line that is neither ours nor PyTorch's."""
    torch = getattr(sys.modules.get("torch"), "__file__", None)
    folders = (_OURS, os.path.dirname(torch) + os.sep) if torch else (_OURS,)
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and _is_between(frame.f_code.co_filename, folders):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, RuntimeWarning, stacklevel=level)


def _is_between(file: str, folders: tuple[str, ...]) -> bool:
    return file.startswith((*folders, "<")) or os.path.basename(file) in _BETWEEN


class Told(list[str]):
    """Reasons why something runs as plain PyTorch, each told once."""

    def tell(self, reason: str, text: str) -> None:
        if reason not in self:
            self.append(reason)
            warn(text)
