"""Within `guarding` Dynamo checks at every call state that it otherwise takes for granted.

By default Dynamo assumes that

- the lookup of a name in a class still finds the function that was traced (`_finds`);
- no hooks of all modules were added or removed (`_same_hooks`);
- a key or an attribute that was missing is still missing (`_missing_keys`, `_missing_names`);
- the kernels are still allowed that attention and others chose from (`_same_kernels`);
- `os.getenv` still returns what it returned.

Dynamo also freezes the numbers drawn from a `random.Random`. So a graph ends where the code draws
from a generator that existed before the call (`_generators`).

`hands_on` tells whether what a call does depends on the calls before it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import re
from collections.abc import Iterator
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch._dynamo.exc import ObservedAttributeError, unimplemented
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.output_graph import OutputGraph
from torch._dynamo.source import AttrSource, GlobalSource, Source
from torch._dynamo.symbolic_convert import InliningInstructionTranslator, InstructionTranslator
from torch._dynamo.variables.base import (
    AttributeMutationExisting,
    ValueMutationExisting,
    VariableTracker,
)
from torch._dynamo.variables.dicts import ConstDictVariable
from torch._dynamo.variables.functions import UserFunctionVariable
from torch._dynamo.variables.misc import NewGlobalVariable, PythonModuleVariable, RandomVariable
from torch._dynamo.variables.nn_module import UnspecializedNNModuleVariable
from torch._dynamo.variables.user_defined import (
    UserDefinedClassVariable,
    UserDefinedObjectVariable,
)
from torch._guards import Guard
from torch.nn.modules import module as nn_module

from overlapc.passes.capture.huggingface import instead
from overlapc.passes.exact.switches import switches
from overlapc.tools.shared_changes import Shared, replaced

_HOOKS = (
    "_global_forward_pre_hooks",
    "_global_forward_hooks",
    "_global_backward_pre_hooks",
    "_global_backward_hooks",
)
# PyTorch's switches: which kernels it may choose from while it traces. Those that also count while
# ops run are in switches.py.
_SWITCHES = [
    *(name for name in dir(torch._C) if re.fullmatch("_get_.*_enabled", name)),
    *("_get_sdp_priority_order", "_get_math_sdp_allow_fp16_bf16_reduction"),
]
_kernels: dict[str, None] = {}  # how the switches are set, as keys, which Dynamo can guard


@contextlib.contextmanager
def _changes() -> Iterator[None]:
    with (
        _finds(),
        _same_hooks(),
        _same_kernels(),
        _missing_keys(),
        _missing_names(),
        _generators(),
    ):
        yield


_changed = Shared(_changes)


@contextlib.contextmanager
def guarding() -> Iterator[None]:
    """Guard what a call traces, and bring up to date what the guards read."""
    now = {f"{name} {getattr(torch._C, name)()}": None for name in _SWITCHES}
    now |= {f"{name} {value}": None for name, value in switches().items()}
    if now.keys() != _kernels.keys():
        _kernels.clear()
        _kernels.update(now)
    with _changed:
        yield


def hands_on() -> bool:
    """Within a backend of `torch.compile`: does the traced function read Python state that it
    changes, or draw Python's random numbers? Then its calls have an order.

    An attribute is read if a guard names it. That its name is free is asked by setting it, too.
    """
    output = InstructionTranslator.current_tx().output
    effects = output.side_effects
    read = " ".join(
        f"{guard.name} {getattr(guard.create_fn, 'keywords', '')}"
        for guard in output.guards
        if not _asks_whether_free(guard)
    )
    for held in _changed_objects().values():
        names = effects.store_attr_mutations.get(held)
        if not names or any(re.search(rf"\b{re.escape(name)}\b", read) for name in names):
            return True
    return bool(output.random_calls)


def changed_objects() -> set[int | str]:
    """Within a backend of `torch.compile`: the ids of the Python objects that the function changes,
    and the names of globals and of what modules hold."""
    effects = InstructionTranslator.current_tx().output.side_effects
    found: set[int | str] = set()
    for number, held in _changed_objects().items():
        found.add(number)
        if isinstance(held, (NewGlobalVariable, PythonModuleVariable)):
            found |= set(effects.store_attr_mutations.get(held, ()))
    return found


def _changed_objects() -> dict[int, VariableTracker]:
    effects = InstructionTranslator.current_tx().output.side_effects
    kinds = (AttributeMutationExisting, ValueMutationExisting)
    return {
        number: held
        for number, held in effects.id_to_variable.items()
        if isinstance(held.mutation_type, kinds) and effects.is_modified(held)
    }


def _asks_whether_free(guard: Guard) -> bool:
    """Does it ask that a dict lacks a key?"""
    asked = getattr(guard.create_fn, "func", guard.create_fn)
    if hasattr(GuardBuilder, "DICT_NOT_CONTAINS"):
        return asked is GuardBuilder.DICT_NOT_CONTAINS
    inverted = getattr(guard.create_fn, "keywords", {}).get("invert", False)  # torch 2.11
    return inverted and asked is GuardBuilder.DICT_CONTAINS


@contextlib.contextmanager
def _finds() -> Iterator[None]:
    build = InliningInstructionTranslator.build_inline_tracer

    def built(frame: Any, function: Any, args: Any, *more: Any, **options: Any) -> Any:
        traced = getattr(function, "fn", None)
        if traced is os.getenv:
            function = UserFunctionVariable(_getenv)
        elif isinstance(traced, FunctionType) and (known := instead(traced, args, *more)):
            function = UserFunctionVariable(known)
        owner = getattr(function, "obj", None) or next(iter(args), None)
        if isinstance(traced, FunctionType):
            if isinstance(owner, UserDefinedObjectVariable):
                _guard_lookups(frame, type(owner.value), traced)
            elif isinstance(owner, UserDefinedClassVariable):
                _guard_lookups(frame, owner.value, traced)
        return build(frame, function, args, *more, **options)

    with replaced(InliningInstructionTranslator, "build_inline_tracer", staticmethod(built)):
        yield


def _getenv(key: str, default: str | None = None) -> str | None:
    """`os.getenv`, in a module whose reads Dynamo guards."""
    return os.environ.get(key, default)


def _guard_lookups(frame: Any, kind: type, function: FunctionType) -> None:
    """Guard what the class, and the base class that defines the function, find under its name."""
    tracer = frame.output.current_tracer  # guards of an inner tracer may be discarded
    done = tracer.__dict__.setdefault("overlapc_guarded", set())
    if (kind, function) in done:
        return
    done.add((kind, function))
    for base in kind.__mro__:
        for name, held in vars(base).items():
            if getattr(held, "__func__", held) is function:
                for owner in dict.fromkeys((kind, base)):
                    _guard_lookup(frame, owner, name)


def _guard_lookup(frame: Any, owner: type, name: str) -> None:
    source: Source = AttrSource(_global(frame, owner), name)
    found = getattr(owner, name, None)
    if isinstance(found, MethodType):  # a classmethod: each lookup makes a new object
        source = AttrSource(source, "__func__")
    elif not isinstance(found, FunctionType):
        return
    install_guard(source.make_guard(GuardBuilder.ID_MATCH))


def _global(frame: Any, value: Any) -> GlobalSource:
    return GlobalSource(frame.output.install_global_by_id("overlapc_guarded", value))


@contextlib.contextmanager
def _same_hooks() -> Iterator[None]:
    call = UnspecializedNNModuleVariable.call_function

    def called(self: Any, frame: Any, *args: Any, **options: Any) -> Any:
        for name in _HOOKS:
            hooks = _global(frame, getattr(nn_module, name))
            install_guard(hooks.make_guard(GuardBuilder.DICT_KEYS_MATCH))
        return call(self, frame, *args, **options)

    with replaced(UnspecializedNNModuleVariable, "call_function", called):
        yield


@contextlib.contextmanager
def _same_kernels() -> Iterator[None]:
    begin = OutputGraph.__init__

    def begun(self: Any, *args: Any, **options: Any) -> None:
        begin(self, *args, **options)
        name = self.install_global_by_id("overlapc_guarded", _kernels)
        self.guards.add(GlobalSource(name).make_guard(GuardBuilder.DICT_KEYS_MATCH))

    with replaced(OutputGraph, "__init__", begun):
        yield


@contextlib.contextmanager
def _missing_keys() -> Iterator[None]:
    get = ConstDictVariable.getitem_const_raise_exception_if_absent

    def got(self: Any, frame: Any, key: VariableTracker) -> VariableTracker:
        if key not in self:
            self.install_dict_contains_guard(frame, [key])
        return get(self, frame, key)

    with replaced(ConstDictVariable, "getitem_const_raise_exception_if_absent", got):
        yield


@contextlib.contextmanager
def _missing_names() -> Iterator[None]:
    get = UserDefinedObjectVariable.var_getattr

    def got(self: Any, frame: Any, name: str) -> VariableTracker:
        try:
            return get(self, frame, name)
        except ObservedAttributeError:
            # Dynamo traces a `__getattr__` of the user's itself.
            asked = getattr(type(self.value), "__getattr__", None)
            if self.source and asked in (None, nn.Module.__getattr__):
                install_guard(_missing(self.source, name))
            raise

    with replaced(UserDefinedObjectVariable, "var_getattr", got):
        yield


def _missing(source: Source, name: str) -> Guard:
    if "attr" in inspect.signature(GuardBuilder.HASATTR).parameters:  # since torch 2.12
        return source.make_guard(functools.partial(GuardBuilder.HASATTR, attr=name))
    return AttrSource(source, name).make_guard(GuardBuilder.HASATTR)


@contextlib.contextmanager
def _generators() -> Iterator[None]:
    call = RandomVariable.call_method

    def called(self: Any, frame: Any, name: str, *args: Any, **options: Any) -> Any:
        if self.source is not None:
            unimplemented(
                gb_type="random.Random of the model's is asked for a number",
                context=f"{name}()",
                explanation="",
                hints=[],
            )
        return call(self, frame, name, *args, **options)

    with replaced(RandomVariable, "call_method", called):
        yield
