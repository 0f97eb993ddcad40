"""What a module consists of, and `attributes_of`, which describes its Python state: two that are
equal compute alike."""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

PLAIN = (type(None), bool, int, float, str, enum.Enum, torch.dtype, torch.device)
SIMPLE = {type(None), bool, int, float, str}
_NUMBERS = {int, float}
INTERNAL = set(vars(nn.Module())) - {"training"}  # attributes that PyTorch gives every module
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_OF_PARAMETERS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_DEEPEST = 4  # containers in containers that are looked into
# They make modules, and say nothing of what one computes; the first torch.compile of a process
# replaces those of nn.Module.
_MAKERS = {"__init__", "__setstate__"}


class Members(NamedTuple):
    """A module's parts, each once, in the order of PyTorch's own walks, which take ten times as
    long and are many: a step looks at all of them for each microbatch."""

    modules: list[nn.Module]
    paths: list[str]  # of the modules
    parameters: list[Tensor]
    buffers: list[Tensor]

    @property
    def lasting(self) -> list[Tensor]:
        return [*self.parameters, *self.buffers]


def members_of(module: nn.Module) -> Members:
    modules: dict[int, nn.Module] = {}
    paths = []
    parameters: dict[int, Tensor] = {}
    buffers: dict[int, Tensor] = {}
    left = [("", module)]
    while left:
        path, each = left.pop()
        if id(each) in modules:
            continue
        modules[id(each)] = each
        paths.append(path)
        for found, named in ((parameters, each._parameters), (buffers, each._buffers)):
            for tensor in named.values():
                if tensor is not None and id(tensor) not in found:
                    found[id(tensor)] = tensor
        if each._modules:
            begin = f"{path}." if path else ""
            children = reversed(each._modules.items())
            left += [(begin + name, child) for name, child in children if child is not None]
    return Members([*modules.values()], paths, [*parameters.values()], [*buffers.values()])


def hooks_of_all() -> dict[str, Mapping[int, Any]]:
    """The hooks on every module there is, by kind."""
    return {f"_global{kind}": getattr(torch.nn.modules.module, f"_global{kind}") for kind in _HOOKS}


def hooks_of(members: Members) -> list[int]:
    """How many hooks there are, by kind and place."""
    hooks = [len(each) for each in hooks_of_all().values()]
    hooks += [len(getattr(each, kind)) for each in members.modules for kind in _HOOKS]
    for parameter in members.parameters:
        hooks += [len(getattr(parameter, kind, None) or ()) for kind in _OF_PARAMETERS]
    return hooks


@dataclass
class Describer:
    """How values are described: plain ones by value, functions by id, tensors by a number among
    the `inputs` or else by id. Attributes and fields called one of `unread` are left out. In a
    rough description numbers and tensors are of one kind or of another."""

    unread: Collection[str] = ()
    inputs: Mapping[int, int] = field(default_factory=dict)  # by a tensor's id
    roughly: bool = False
    held: list[Any] = field(default_factory=list)  # described by id: kept, so that ids stay unique

    def said_of(self, value: Any, depth: int = 0) -> Any:
        """Also of what containers hold, and dataclasses, declared or not; None of other objects."""
        if isinstance(value, nn.Module) or depth > _DEEPEST:
            return None
        if isinstance(value, Tensor):
            return self._tensor(value)
        if self.roughly and type(value) in _NUMBERS:
            return type(value)
        if type(value) in SIMPLE or isinstance(value, (*PLAIN, np.generic, slice, range)):
            return repr(value)
        if not self.roughly and is_plain(value):
            return repr(value)
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:
            return str(value.dtype), value.shape, None if self.roughly else hash(value.tobytes())
        if callable(value):
            self.held.append(value)
            return id(value)
        if is_dataclass(value):
            declared = {each.name: getattr(value, each.name, None) for each in fields(value)}
            value = {
                name: each
                for name, each in (declared | getattr(value, "__dict__", {})).items()
                if name not in self.unread
            }
        if isinstance(value, Mapping):
            value = [part for pair in value.items() for part in pair]
        if isinstance(value, (list, tuple, set, frozenset)):
            return tuple(self.said_of(each, depth + 1) for each in value)
        return None

    def _tensor(self, value: Tensor) -> Any:
        if self.roughly:
            return value.dtype, tuple(value.shape), str(value.device), value.requires_grad
        self.held.append(value)
        return id(value)


def attributes_of(members: Members, describer: Describer) -> dict[str, Any]:
    """Return what is said of the attributes of modules and of their classes, by name."""
    found = _of_classes(members, describer)
    configs: dict[int, str] = {}
    unread, inputs, roughly = describer.unread, describer.inputs, describer.roughly
    for path, each in zip(members.paths, members.modules, strict=True):
        begin = f"{path}." if path else ""
        for name, value in vars(each).items():
            if name in INTERNAL or name in unread:
                continue
            if type(value) in SIMPLE and not roughly:
                found[begin + name] = repr(value)
            elif id(value) in inputs:
                found[begin + name] = "input", inputs[id(value)]
            elif is_dataclass(value) and not isinstance(value, type):
                if id(value) not in configs:
                    configs[id(value)] = repr(describer.said_of(value))
                found[begin + name] = configs[id(value)]
            elif (said := describer.said_of(value)) is not None:
                found[begin + name] = said
    return found


class Watch:
    """The state of modules that no trace enters. Where it is of another `kind` they are traced
    anew; `number` is another for each state, though only numbers or tensors are others."""

    def __init__(self) -> None:
        self.kind, self.number = "", 0
        self._last: Any = None
        self._kinds: dict[Any, tuple[str, list[Any]]] = {}

    def look(self, modules: Collection[nn.Module]) -> None:
        members = [members_of(each) for each in modules]
        exactly = _state_of(members, False)
        if self._last is None or exactly[0] != self._last[0]:
            self._last, (kind, held) = exactly, _state_of(members, True)
            self.number += 1
            self.kind, _ = self._kinds.setdefault(kind, (str(len(self._kinds)), held))


def _state_of(parts: Sequence[Members], roughly: bool) -> tuple[Any, list[Any]]:
    describer = Describer(roughly=roughly)
    said = [(tuple(hooks_of(each)), *attributes_of(each, describer).items()) for each in parts]
    return tuple(said), describer.held


def classes_of(members: Members) -> list[type]:
    """The classes of all modules, and those that they inherit from."""
    kinds = {type(each): None for each in members.modules}
    found = dict.fromkeys(kind for one in kinds for kind in one.__mro__ if kind is not object)
    return list(found)


def _of_classes(members: Members, describer: Describer) -> dict[str, Any]:
    """What classes hold: plain values, and methods by id. (Two classes may have one name.)"""
    found: dict[str, Any] = {}
    for kind in classes_of(members):
        for name, value in vars(kind).items():
            if name in _MAKERS:
                continue
            key = f"{kind.__qualname__}.{name}"
            if callable(value) or isinstance(value, (property, classmethod, staticmethod)):
                describer.held.append(value)
                found[key] = (*found.get(key, ()), id(value))
                continue
            said = None if name.startswith("__") else describer.said_of(value)
            if said is not None:
                found[key] = (*found.get(key, ()), said)
    return found


def is_plain(value: Any, depth: int = 0) -> bool:
    """Can `repr` tell this value from another?"""
    if isinstance(value, Mapping):
        value = [part for pair in value.items() for part in pair]
    if isinstance(value, (list, tuple, set, frozenset)):
        return depth <= _DEEPEST and all(is_plain(each, depth + 1) for each in value)
    return isinstance(value, PLAIN)
