"""`one_op_each` makes what is fused by `torch.compile` one op of a graph each: functions of
Megatron's and the script's Python modules, functions that the model's modules or their
configurations have been given, and methods and static methods of the model's classes. So does it
with the functions of Transformer Engine that are known by name.

A fused kernel rounds less often than the ops that a trace would find in it. What is fused elsewhere
ends the trace before it is entered: Dynamo, which compiles nothing within a trace, would leave it
unfused for the rest of the process. The module around it is one op then, or the chunk runs plain.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MethodType, ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.fx import _symbolic_trace

from overlapc.core.errors import CaptureError
from overlapc.passes.opaque.calls import learned_within, tensors_of
from overlapc.passes.opaque.op import called
from overlapc.state.known import is_known, name_of, writes_to_first
from overlapc.state.module_state import classes_of, contents, members_of
from overlapc.state.snapshot import answers, is_a
from overlapc.tools.shared_changes import replaced

UNFUSED = "_torchdynamo_orig_callable"  # Dynamo's attribute for what it was given
# Megatron's methods that count tokens: sums of whole numbers are the same however they are made.
# They are traced, since an op of its own may not write to its module's buffers.
_COUNTS = {"_apply_expert_bias"}
_WHOLE_MODULES = {"forward", "_compiled_call_impl"}  # where these are fused, the module is one op
Change = tuple[Any, str, Any, Any]  # owner, name, what it has, what stands for it in a trace


@contextlib.contextmanager
def one_op_each(model: nn.Module, modules: Iterable[ModuleType]) -> Iterator[None]:
    """`modules` are Megatron's and the script's. While an op is tried out, everything is as it was
    before the block."""
    found = {(id(change[0]), change[1]): change for change in _changes(model, modules)}

    def put() -> None:
        for owner, name, _, new in found.values():
            setattr(owner, name, new)

    def back() -> None:
        for owner, name, old, _ in found.values():
            if vars(owner).get(name) is not old:
                setattr(owner, name, old)

    @contextlib.contextmanager
    def apart() -> Iterator[None]:
        try:
            back()
            yield
        finally:
            put()

    # With this flag what torch.compile made raises, in each pass of a trace.
    with learned_within(apart), replaced(_symbolic_trace, "_is_fx_tracing_flag", True):
        try:
            put()
            yield
        finally:
            back()


def _changes(model: nn.Module, modules: Iterable[ModuleType]) -> Iterator[Change]:
    shared: set[int] = set()  # functions that have a place in a Python module
    for owner in modules:
        for name, value in list(vars(owner).items()):
            if _is_fused(value) or is_known(value):
                shared.add(id(value))
                yield owner, name, value, _as_one_op(value)
    members = members_of(model)
    lasting = {each: tensors_of(each) for each in members.modules if _has_methods(each)}
    for kind in classes_of(members):
        for name, value in _methods(kind).items():
            yield kind, name, value, _stand_in(kind, name, value, lasting)
    for each in members.modules:
        for owner in (each, *_configs(each)):
            for name, value in list(vars(owner).items()):
                if not _is_fused(value) or name in _WHOLE_MODULES:
                    continue
                if id(value) in shared:  # the same as there: Megatron compares activations
                    yield owner, name, value, _as_one_op(value)
                elif owner is each and not _holds_module(getattr(value, UNFUSED)):
                    yield owner, name, value, _as_one_op_of(each, value)


def _is_fused(value: Any) -> bool:
    if is_a(value, nn.Module) or not answers(value, UNFUSED):
        return False
    return not getattr(value, "_torchdynamo_disable", False)  # what torch.compiler.disable made


def _configs(module: nn.Module) -> list[Any]:
    """Its configuration, unless that cannot be changed."""
    config = vars(module).get("config")
    frozen = getattr(getattr(type(config), "__dataclass_params__", None), "frozen", False)
    return [config] if answers(config, "__dict__") and not frozen else []


def _holds_module(function: Any) -> bool:
    """Is it a method of an object, or has its closure a module? It would keep that alive, and may
    read its parameters."""
    held = map(contents, getattr(function, "__closure__", None) or ())
    return is_a(function, MethodType) or any(is_a(each, nn.Module) for each in held)


def _methods(kind: type) -> dict[str, Any]:
    """The fused methods and static methods that the class itself defines."""
    found = {}
    for name, value in vars(kind).items():
        plain = value.__func__ if is_a(value, staticmethod) else value
        if name not in _WHOLE_MODULES and _is_fused(plain):
            found[name] = value
    return found


def _has_methods(module: nn.Module) -> bool:
    return any(map(_methods, type(module).__mro__))


@dataclass(frozen=True)
class _Apart:
    """A function as one of a module that it does not read."""

    fused: Callable[..., Any]

    @property
    def __name__(self) -> str:
        return name_of(self.fused)[1]

    def __call__(self, _: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if writes_to_first(self.fused):  # which a graph may read again
            args = args[0].clone(), *args[1:]
        return self.fused(*args, **kwargs)


def _as_one_op_of(module: nn.Module, fused: Callable[..., Any]) -> Callable[..., Any]:
    function = _Apart(fused)
    others = (dist.ProcessGroup, torch.Size) if is_known(fused) else ()

    def run(*args: Any, **kwargs: Any) -> Any:
        return called(module, function, {}, {}, args, kwargs, others=others)

    return run


@functools.cache
def _as_one_op(fused: Callable[..., Any]) -> Callable[..., Any]:
    return _as_one_op_of(nn.Module(), fused)


def _stand_in(
    kind: type, name: str, value: Any, lasting: Mapping[nn.Module, Mapping[str, Tensor]]
) -> Any:
    if is_a(value, staticmethod):
        return staticmethod(_as_one_op(value.__func__))
    if name in _COUNTS and kind.__module__.partition(".")[0] == "megatron":
        return getattr(value, UNFUSED)

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self not in lasting:
            raise CaptureError(f"a {type(self).__name__} is not among the model's modules")
        for each in self.modules():
            for attribute, held in vars(each).items():
                if isinstance(held, Tensor):
                    raise CaptureError(f"{name} is fused, and may read the tensor {attribute!r}")
        return called(self, value, lasting[self], tensors_of(self), args, kwargs)

    return run
