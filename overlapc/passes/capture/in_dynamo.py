"""Within `collectives_in_graphs` Dynamo keeps raw collectives of `torch.distributed` in its graphs.

By default Dynamo rewrites some synchronous collectives and breaks the graph at asynchronous ones.
Within the context it traces `_called` in the place of each call. That leaves two nodes in Dynamo's
graph, `begun` and `landed`, which AOTAutograd traces under `Raw` as it would trace the calls.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.exc import unimplemented
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.functions import (
    CollectiveFunctionRewriteVariable as Rewrite,
)
from torch._dynamo.variables.functions import UserFunctionVariable
from torch._guards import TracingContext
from torch.distributed import distributed_c10d as c10d

from overlapc.passes.capture.collectives import STARTS, StartedCollective, current, reduction, start
from overlapc.tools.shared_changes import Shared, replaced

_OTHER_NAMES = {
    "_all_gather_base": "all_gather_into_tensor",
    "_reduce_scatter_base": "reduce_scatter_tensor",
}
_NAMES = {
    getattr(c10d, here): name
    for here, name in [*zip(STARTS, STARTS, strict=True), *_OTHER_NAMES.items()]
    if hasattr(c10d, here)
}
# A coalescing manager may add up in another order than its collectives one by one.
_REFUSED = {c10d._coalescing_manager, c10d.barrier, c10d.gather, c10d.reduce, c10d.scatter}
_TAKEN = {*_NAMES, *_REFUSED}


@torch._dynamo.allow_in_graph
def begun(name: str, group: str, line: str, given: dict[str, Any]) -> Tensor:
    """Start a collective; the returned tensor carries its flight."""
    members = c10d._resolve_process_group(group) if group else dist.group.WORLD
    raw = current()
    begin = start if raw is None else raw.start
    flight = begin(name, members, given, line)
    result = flight.result
    result.overlapc_flight = flight  # type: ignore[attr-defined]
    return result


@torch._dynamo.allow_in_graph
def landed(result: Tensor) -> Tensor:
    """Wait for a collective and write its result into its targets."""
    flight: StartedCollective = result.__dict__.pop("overlapc_flight")
    raw = current()
    if raw is None:
        flight.land()
    else:
        raw.land(flight)
    return result


class Handle:
    """What an asynchronous call returns while Dynamo traces."""

    def __init__(self, result: Tensor) -> None:
        self._result = result
        self._waited = False

    def wait(self, timeout: object = None) -> bool:
        if not self._waited:
            self._waited = True
            landed(self._result)
        return True


def _called(name: str, line: str, group: Any, async_op: bool, **given: Any) -> Handle | None:
    handle = Handle(begun(name, "" if group is None else group.group_name, line, given))
    if async_op:
        return handle
    handle.wait()
    return None


@contextlib.contextmanager
def _rewriting() -> Iterator[None]:
    can_rewrite, create, call_function = Rewrite.can_rewrite, Rewrite.create, Rewrite.call_function

    def can(value: Any) -> bool:
        return (inspect.isfunction(value) and value in _TAKEN) or can_rewrite(value)

    def made(tx: Any, function: Any, source: Any, **options: Any) -> Any:
        if function not in _TAKEN:
            return create(tx, function, source, **options)
        instead = UserFunctionVariable(_called)
        return Rewrite(function, replacement_var=instead, source=source, **options)

    def call(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if self.fn in _REFUSED:
            name = f"dist.{self.fn.__name__} cannot be captured"
            unimplemented(gb_type=name, context="", explanation="", hints=[])
        if self.fn not in _NAMES:
            return call_function(self, tx, args, kwargs)
        given = dict(inspect.signature(self.fn).bind(*args, **kwargs).arguments)
        known = {
            "name": _NAMES[self.fn],
            "line": _line(),
            "group": given.pop("group", None),
            "async_op": given.pop("async_op", False),
        }
        if "op" in given:
            given["op"] = VariableTracker.build(tx, reduction(given["op"].value))
        for key, value in known.items():
            is_built = isinstance(value, VariableTracker)
            given[key] = value if is_built else VariableTracker.build(tx, value)
        return self.replacement_var.call_function(tx, [], given)

    with (
        replaced(Rewrite, "can_rewrite", staticmethod(can)),
        replaced(Rewrite, "create", staticmethod(made)),
        replaced(Rewrite, "call_function", call),
    ):
        yield


collectives_in_graphs = Shared(_rewriting)


def _line() -> str:
    """The line of the user's code that Dynamo traces now."""
    frames = TracingContext.extract_stack()
    return f'File "{frames[-1].filename}", line {frames[-1].lineno}' if frames else ""
