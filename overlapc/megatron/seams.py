"""Where Megatron is entered: its three schedule functions, by all names they are known by.

`get_forward_backward_func` looks them up in their module at each call; other modules may have
imported them by name.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

NAMES = (
    "forward_backward_no_pipelining",
    "forward_backward_pipelining_without_interleaving",
    "forward_backward_pipelining_with_interleaving",
)
# How a step is run: the name of a schedule function, the function itself, and its arguments.
Run = Callable[[str, Callable[..., Any], dict[str, Any]], Any]
_real: dict[str, Callable[..., Any]] = {}
_ours: dict[str, Callable[..., Any]] = {}


def install(run: Run) -> None:
    """Have `run` called in the place of each schedule function, until `remove`."""
    from megatron.core.pipeline_parallel import schedules

    remove()
    for name in NAMES:
        _real[name] = getattr(schedules, name)
        _ours[name] = _seam(name, _real[name], run)
        swept(_real[name], _ours[name])


def remove() -> None:
    for name, real in _real.items():
        swept(_ours[name], real)
    _real.clear()
    _ours.clear()


def swept(old: Any, new: Any) -> None:
    """Put `new` wherever a module has `old` under some name."""
    for module in list(sys.modules.values()):
        names = vars(module) if hasattr(module, "__dict__") else {}
        for name in [name for name, value in list(names.items()) if value is old]:
            setattr(module, name, new)


def _seam(name: str, real: Callable[..., Any], run: Run) -> Callable[..., Any]:
    @functools.wraps(real)
    def seam(**given: Any) -> Any:
        if _ours.get(name) is not seam:  # somebody kept it, and it has been removed since
            return real(**given)
        return run(name, real, given)

    return seam
