"""`find_function` imports a user's own function by its name, "module:function"."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

from overlapc.core.errors import OptionError


def find_function(where: str, example: str) -> Callable[..., Any]:
    """Import the function; `example` is named in errors."""
    name, _, function = where.partition(":")
    if not name or not function:
        raise OptionError(f"{where!r}: expected module:function, as {example}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(name), function)
    except Exception as error:  # importing a user's module may raise anything
        raise OptionError(f"{where!r}: {error!r}; expected module:function from here") from error
    if not callable(found):
        raise OptionError(f"{where!r} is no function; expected one, as {example}")
    made: Callable[..., Any] = found
    return made
