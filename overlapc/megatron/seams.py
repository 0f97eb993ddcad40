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

from overlapc.core.errors import OverlapcError

NAMES = (
    "forward_backward_no_pipelining",
    "forward_backward_pipelining_without_interleaving",
    "forward_backward_pipelining_with_interleaving",
)
# Runs a step: takes the name of a schedule function, the function itself, and its arguments.
Run = Callable[[str, Callable[..., Any], dict[str, Any]], Any]
_Before = tuple[CodeType, Any, Any, dict[str, Any]]
_before: dict[FunctionType, _Before] = {}  # function -> its own code, defaults and attributes


def install(run: Run, joined: Callable[[], None]) -> None:
    """Call `run` in the place of each schedule function, and `joined` before Megatron makes its
    process groups, until `remove`."""
    try:
        from megatron.core import parallel_state
        from megatron.core.pipeline_parallel import schedules
    except ModuleNotFoundError as error:
        if not str(error.name).startswith("megatron"):
            raise
        raise OverlapcError(
            "found no megatron.core; expected it where the script imports it: "
            "pip install megatron-core, or pass a script of a Megatron-LM checkout"
        ) from error

    steps = {name: _function(schedules, name) for name in NAMES}
    groups = _function(parallel_state, "initialize_model_parallel")
    remove()
    for name, function in steps.items():
        _replace(function, _entered.__code__, partial(run, name, _copy(function)))
    _replace(groups, _joined.__code__, partial(_after, joined, _copy(groups)))


def remove() -> None:
    """Give the functions their own code back."""
    for function, (code, defaults, keywords, attributes) in _before.items():
        function.__code__ = code
        function.__defaults__, function.__kwdefaults__ = defaults, keywords
        vars(function).clear()
        vars(function).update(attributes)
    _before.clear()


def _function(module: Any, name: str) -> FunctionType:
    function = inspect.unwrap(getattr(module, name))
    if not isinstance(function, FunctionType):
        raise OverlapcError(f"{name} is a {type(function).__name__}, expected a function")
    return function


def _copy(function: FunctionType) -> FunctionType:
    copied = FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


def _replace(function: FunctionType, code: CodeType, runs: Callable[..., Any]) -> None:
    """Give a function other code, which gets `runs`."""
    before = function.__code__, function.__defaults__, function.__kwdefaults__
    signature = inspect.signature(function)
    _before[function] = *before, dict(vars(function))
    function.__signature__ = signature  # type: ignore[attr-defined]
    function.__code__ = code.replace(co_freevars=function.__code__.co_freevars)
    function.__defaults__, function.__kwdefaults__ = None, {"overlapc_runs": runs}


def _after(before: Callable[[], None], real: Callable[..., Any], *args: Any, **given: Any) -> Any:
    before()
    return real(*args, **given)


# The code that runs in the place of Megatron's. Its globals are Megatron's.


def _entered(*, overlapc_runs: Callable[[dict[str, Any]], Any], **given: Any) -> Any:
    return overlapc_runs(given)


def _joined(*args: Any, overlapc_runs: Callable[..., Any], **given: Any) -> Any:
    return overlapc_runs(*args, **given)
