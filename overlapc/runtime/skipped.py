"""`GivenUp` finds the functions that Dynamo gives up without an error and runs as plain PyTorch.

Dynamo skips a function if it cannot continue after a graph break (inside a loop or a `try`), and
stops compiling a function that it has compiled too often. It reports both only in logs that are
off. `GivenUp` reads Dynamo's counters around a call.
"""

from __future__ import annotations

import contextlib
import re
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._dynamo import convert_frame, eval_frame
from torch._dynamo.exc import InternalTorchDynamoError, TorchRuntimeError, Unsupported
from torch._dynamo.utils import counters
from torch.utils._pytree import tree_leaves

from overlapc.core.errors import CaptureError
from overlapc.passes.capture import joint
from overlapc.passes.capture.model_files import is_models
from overlapc.tools.reach import autograd_nodes
from overlapc.tools.shared_changes import Shared, replaced

_OF_AN_ERROR = ("an error was suppressed", "compilation failed")
_LIMIT = "recompile limit"
_FAILED = "Dynamo failed: "
_REASON, _LINE = "Explanation: ", re.compile(r'File "(.*)", line \d+')  # in Dynamo's errors
# Leaves of the autograd graph, hooks, views and copies that AOTAutograd makes around graphs.
_NO_WORK = (
    *("torch", "Accumulate", "Alias", "AsStrided", "BackwardHook", "Clone", "Copy", "Detach"),
    *("Diagonal", "Expand", "Narrow", "Permute", "Reshape", "Select", "Slice", "Split"),
    *("Squeeze", "T", "Transpose", "Unbind", "Unfold", "Unsafe", "Unsqueeze", "View", "ToCopy"),
)
_NO_REASON = (
    "Dynamo compiled none of it, and gave no reason; threads that compile at once are one: "
    "call the model once before they do; TORCH_LOGS=dynamo tells more"
)


_thread = threading.local()  # api: the code that the current `GivenUp` surrounds


@contextlib.contextmanager
def _going_on() -> Iterator[None]:
    """Let Dynamo skip a function that it fails to trace, as it skips those that it refuses to, if
    the model's code has begun to run: then the call cannot be begun again without Dynamo."""
    convert = convert_frame.ConvertFrameAssert.__call__

    def going_on(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return convert(self, *args, **kwargs)
        except (InternalTorchDynamoError, TorchRuntimeError) as error:
            if not _has_begun(getattr(_thread, "around", None)):
                raise
            raise Unsupported(_failed(error)) from error

    with replaced(convert_frame.ConvertFrameAssert, "__call__", going_on):
        yield


_softened = Shared(_going_on)


def _has_begun(around: Any) -> bool:
    """Is a function of the model on the stack, above the code that is `around` its call?"""
    frame = sys._getframe(1) if around is not None else None
    while frame is not None and frame.f_code is not around:
        if is_models(frame.f_code.co_filename):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


class GivenUp:
    """`with GivenUp() as given_up: call()`; then `given_up.found(...)`."""

    def __enter__(self) -> GivenUp:
        self._around = getattr(_thread, "around", None)
        _thread.around = sys._getframe(1).f_code
        _softened.__enter__()
        self._failures = _failures()
        self._messages = set(_messages())
        self._thread: Any = getattr(eval_frame, "dynamo_tls", eval_frame)
        self._outer = getattr(self._thread, "skip_reasons", None)
        if self._outer is None and hasattr(self._thread, "skip_reasons"):
            self._thread.skip_reasons = []
        self._before = len(self._skipped())
        return self

    def __exit__(self, *failure: Any) -> None:
        _softened.__exit__()
        _thread.around = self._around
        self._now = self._skipped()[self._before :]
        if self._outer is None and hasattr(self._thread, "skip_reasons"):
            self._thread.skip_reasons = None

    def _skipped(self) -> list[str]:
        return list(getattr(self._thread, "skip_reasons", None) or ())

    def found(self, ran: bool, again: Callable[[], Any]) -> list[str]:
        """Return what the call ran as plain PyTorch: function and reason.

        `ran` says whether the call ran a graph at all. `again` traces the call as one graph, which
        shows where Dynamo stops.
        """
        if ran and _failures() == self._failures:
            return []
        places = [_place(text) for text in self._now if any(why in text for why in _OF_AN_ERROR)]
        reason = self._failure() or self._limit() or _first_break(again) or self._first_message()
        return [f"{place}: {reason}" for place in dict.fromkeys(places or ["the whole model"])]

    def between(self, results: Any, given: Any, again: Callable[[], Any]) -> str:
        """Name what ran as plain PyTorch between graphs, if this call ended graphs early; or ""."""
        if all(message in self._messages for message in _messages()):
            return ""
        plain = _plain(results, given)
        if not plain:
            return ""
        names = ", ".join(plain[:3]) + (f" and {len(plain) - 3} more" if plain[3:] else "")
        reason = _first_break(again) or self._first_message()
        return f"what is between its graphs ({names}): {reason}"

    def _new(self) -> list[str]:
        return [message for message in _messages() if message not in self._messages]

    def _first_message(self) -> str:
        new = self._new()
        return _line(new[0]) if new else _NO_REASON

    def _failure(self) -> str:
        return next((_line(m) for m in self._new() if m.startswith(_FAILED)), "")

    def _limit(self) -> str:
        new = [m for m in self._new() if _LIMIT in m.lower()]
        if not new:
            return ""
        return f"{_line(new[0])}; it has other shapes or settings at nearly every call"


def why_untraced(error: Exception) -> str:
    """The reason, if Dynamo failed before any of the model's code ran; "" if some code may have
    run."""
    step = error.__traceback__
    while step is not None and step.tb_frame.f_code.co_filename != convert_frame.__file__:
        if is_models(step.tb_frame.f_code.co_filename):
            return ""
        step = step.tb_next
    return "" if step is None else _failed(error)


def _failed(error: Exception) -> str:
    """The reason and the model's line, from the message of an error of Dynamo's."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reasons = [line.removeprefix(_REASON) for line in lines if line.startswith(_REASON)]
    places = [found[0] for line in lines if (found := _LINE.match(line)) and is_models(found[1])]
    place = f" at {places[-1]}" if places else ""
    return f"{_FAILED}{[*reasons, *lines, type(error).__name__][0]}{place}"


def _plain(results: Any, given: Any) -> list[str]:
    """The kinds of ops between `given` and `results` whose backward lies outside of all graphs."""
    before = [t for t in tree_leaves(given) if isinstance(t, torch.Tensor)]
    behind = [t for t in tree_leaves(results) if isinstance(t, torch.Tensor)]
    names = set()
    for node in autograd_nodes(behind, before):
        kind = re.sub(r"Backward\d*$", "", node.name().rpartition("::")[2])
        if kind != "CompiledFunction" and not kind.startswith(_NO_WORK):
            names.add(kind)
    return sorted(names)


def _failures() -> int:
    return counters["frames"]["total"] - counters["frames"]["ok"]


def _messages() -> Iterator[str]:
    yield from map(str, counters["graph_break"])
    yield from map(str, counters["unimplemented"])


def _line(message: str) -> str:
    return next((line.strip() for line in message.splitlines() if line.strip()), "")


def _place(skipped: str) -> str:
    """`forward (FILE:LINE): reason` -> `forward (File "FILE", line LINE)`."""
    found = re.match(r"(\S+) \((.*):(\d+)\): ", skipped)
    return f'{found[1]} (File "{found[2]}", line {found[3]})' if found else skipped


def _first_break(again: Callable[[], Any]) -> str:
    """Where tracing the call as one graph ends, and why."""
    try:
        again()
    except joint.Stop:
        return ""
    except CaptureError as error:
        return f"{error.reason} at {error.place}" if error.place else error.reason
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
