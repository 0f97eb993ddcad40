"""What a module consists of, and `attributes_of`, which describes its Python state: two that are
equal compute alike."""

from __future__ import annotations

import enum
import functools
import numbers
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from overlapc.state.known import settled_by

PLAIN = (type(None), bool, int, float, str, enum.Enum, torch.dtype, torch.device)
SIMPLE = {type(None), bool, int, float, str}
INTERNAL = set(vars(nn.Module())) - {"training"}  # attributes that PyTorch gives every module
_PLAIN = (numbers.Number, np.generic, bytes, bytearray, slice, range)  # `repr` tells these, too
_MUTABLE = (dict, list, set, deque, bytearray, np.ndarray)
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_OF_PARAMETERS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_DEEPEST = 4  # containers in containers that are looked into
# They make and change modules, and say nothing of what one computes. The first torch.compile of a
# process replaces those of nn.Module, and so does who watches for changes.
_MAKERS = {"__init__", "__setstate__", "__setattr__", "__delattr__"}
_MAKERS |= {"register_buffer", "register_parameter", "add_module"}


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
    """Describes values: plain ones by value, tensors and functions by id, with what closures hold,
    tensors among the `inputs` by their number there. Attributes and fields called one of `unread`
    are left out."""

    unread: Collection[str] = ()
    inputs: Mapping[int, int] = field(default_factory=dict)  # by a tensor's id
    held: list[Any] = field(default_factory=list)  # described by id: kept, so that ids stay unique
    others: list[nn.Module] = field(default_factory=list)  # modules that values hold
    mutable: dict[int, Any] = field(default_factory=dict)  # containers and dataclasses, by id

    def said_of(self, value: Any, depth: int = 0) -> Any:
        """Also of what containers and dataclasses hold, declared or not; None of other objects."""
        if type(value) in SIMPLE:
            return repr(value)
        if depth > _DEEPEST:
            return None
        if isinstance(value, nn.Module):
            self.others.append(value)
            return self._named(value)
        if is_plain(value) or isinstance(value, _PLAIN):
            return repr(value)
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:
            return str(value.dtype), value.shape, hash(value.tobytes())
        if isinstance(value, Tensor):
            return self._named(value)
        parts = self._parts(value)
        name = self._named(value) if callable(value) else None
        return name if parts is None else (name, *[self.said_of(each, depth + 1) for each in parts])

    def _named(self, value: Any) -> int:
        self.held.append(value)
        return id(value)

    def _parts(self, value: Any) -> Iterable[Any] | None:
        """What an object consists of; None if that is not asked."""
        if is_dataclass(value) and not isinstance(value, type):
            declared = {each.name: getattr(value, each.name, None) for each in fields(value)}
            found = (declared | getattr(value, "__dict__", {})).items()
            return [part for pair in found if pair[0] not in self.unread for part in pair]
        if isinstance(value, functools.partial):
            return value.func, value.args, value.keywords
        if isinstance(value, MethodType):
            return [value.__self__] if isinstance(value.__self__, nn.Module) else None
        if isinstance(value, FunctionType):
            return [contents(cell) for cell in value.__closure__ or ()]
        if isinstance(value, Mapping):
            return [part for pair in value.items() for part in pair]
        if isinstance(value, np.ndarray):
            return value.ravel().tolist()  # type: ignore[no-any-return]
        return value if isinstance(value, (list, tuple, set, frozenset, deque)) else None


def attributes_of(members: Members, describer: Describer) -> dict[str, Any]:
    """Return what is said of the attributes of modules, of their classes, and of the modules that
    attributes hold, by name."""
    found: dict[str, Any] = {}
    seen = {id(each) for each in members.modules}
    while True:
        for name, said in _of_classes(members, describer).items():
            found[name] = (*found.get(name, ()), *said)
        found |= _of_modules(members, describer)
        others = {id(each): each for each in describer.others if id(each) not in seen}
        if not others:
            return found
        parts = [members_of(each) for each in others.values()]
        fresh = {id(m): m for one in parts for m in one.modules if id(m) not in seen}
        kinds = [type(each).__name__ for each in fresh.values()]
        paths = [f"held {kind} {len(seen) + i}" for i, kind in enumerate(kinds)]
        members = Members([*fresh.values()], paths, [], [])
        found |= {f"{paths[0]} hooks": tuple(hooks_of(members))}
        describer.others += fresh.values()
        seen |= fresh.keys()


def _of_modules(members: Members, describer: Describer) -> dict[str, Any]:
    found: dict[str, Any] = {}
    configs: dict[int, str] = {}
    unread, inputs = describer.unread, describer.inputs
    for path, each in zip(members.paths, members.modules, strict=True):
        begin, settled = f"{path}." if path else "", settled_by(each)
        for name, value in vars(each).items():
            if name in INTERNAL or name in unread or name in settled:
                continue
            if type(value) in SIMPLE:
                found[begin + name] = repr(value)
            elif id(value) in inputs:
                found[begin + name] = "input", inputs[id(value)]
            elif is_dataclass(value) and not isinstance(value, type):
                if id(value) not in configs:
                    configs[id(value)] = repr(describer.said_of(value))
                    describer.mutable[id(value)] = value
                found[begin + name] = configs[id(value)]
            elif (said := describer.said_of(value)) is not None:
                found[begin + name] = said
                if isinstance(value, _MUTABLE):
                    describer.mutable[id(value)] = value
    return found


def contents(cell: Any) -> Any:
    """What a cell of a closure holds; None if it is empty."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


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
