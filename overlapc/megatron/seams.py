"""`install` redirects Megatron's three schedule functions, whoever holds them, by whatever name.

Scripts may fetch the functions before `patch` or after. So the function objects stay, and their
code is replaced.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from types import CodeType, FunctionType
from typing import Any

from overlapc.errors import OverlapcError

NAMES = (
    "forward_backward_no_pipelining",
    "forward_backward_pipelining_without_interleaving",
    "forward_backward_pipelining_with_interleaving",
)
# Runs a step: takes the name of a schedule function, the function itself, and its arguments.
Run = Callable[[str, Callable[..., Any], dict[str, Any]], Any]
_before: dict[FunctionType, tuple[CodeType, Any]] = {}  # function -> its own code and defaults


def install(run: Run) -> None:
    """Call `run` in the place of each schedule function, until `remove`."""
    from megatron.core.pipeline_parallel import schedules

    remove()
    for name in NAMES:
        function = inspect.unwrap(getattr(schedules, name))
        if not isinstance(function, FunctionType):
            raise OverlapcError(f"{name} is a {type(function).__name__}, expected a function")
        code, defaults = _before[function] = function.__code__, function.__kwdefaults__
        real = FunctionType(
            code, function.__globals__, name, function.__defaults__, function.__closure__
        )
        real.__kwdefaults__ = defaults
        function.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
        function.__code__ = _entered.__code__.replace(co_freevars=code.co_freevars)
        function.__kwdefaults__ = {"overlapc_runs": partial(run, name, real)}


def remove() -> None:
    """Give the schedule functions their own code back."""
    for function, (code, defaults) in _before.items():
        function.__code__, function.__kwdefaults__ = code, defaults
        del function.__signature__  # type: ignore[attr-defined]
    _before.clear()


def _entered(*, overlapc_runs: Callable[[dict[str, Any]], Any], **given: Any) -> Any:
    """The code that runs in the place of a schedule function. Its globals are Megatron's."""
    return overlapc_runs(given)
