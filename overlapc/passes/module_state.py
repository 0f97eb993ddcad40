"""What a module consists of, and `attributes_of`, which describes its Python state: two that are
equal compute alike."""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

PLAIN = (type(None), bool, int, float, str, enum.Enum, torch.dtype, torch.device)
SIMPLE = {type(None), bool, int, float, str}
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


def attributes_of(
    members: Members,
    held: list[Any],
    inputs: Mapping[int, int] | None = None,
    unread: Collection[str] = (),
) -> dict[str, Any]:
    """Return attributes of modules and of their classes under their names: plain ones by value,
    tensors and functions by id. Objects given by id are added to `held`, except tensors that have a
    number among the `inputs`. Attributes and fields called one of `unread` are left out."""
    found = _of_classes(members, held, unread)
    configs: dict[int, str] = {}
    for path, each in zip(members.paths, members.modules, strict=True):
        begin = f"{path}." if path else ""
        for name, value in vars(each).items():
            if name in INTERNAL or name in unread:
                continue
            if type(value) in SIMPLE:
                found[begin + name] = repr(value)
            elif id(value) in (inputs or {}):
                found[begin + name] = "input", (inputs or {})[id(value)]
            elif is_dataclass(value) and not isinstance(value, type):
                if id(value) not in configs:
                    configs[id(value)] = repr(_described(value, held, unread))
                found[begin + name] = configs[id(value)]
            elif (said := _described(value, held, unread)) is not None:
                found[begin + name] = said
    return found


def _described(value: Any, held: list[Any], unread: Collection[str], depth: int = 0) -> Any:
    """What a plain value is, what containers and dataclasses hold, declared or not, and which
    object a tensor or function is; None of other objects."""
    if isinstance(value, nn.Module) or depth > _DEEPEST:
        return None
    if type(value) in SIMPLE:
        return repr(value)
    if is_plain(value) or isinstance(value, (np.generic, slice, range)):
        return repr(value)
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return str(value.dtype), value.shape, hash(value.tobytes())
    if isinstance(value, Tensor) or callable(value):
        held.append(value)
        return id(value)
    if is_dataclass(value):
        declared = {field.name: getattr(value, field.name, None) for field in fields(value)}
        value = {
            name: each
            for name, each in (declared | getattr(value, "__dict__", {})).items()
            if name not in unread
        }
    if isinstance(value, Mapping):
        value = [part for pair in value.items() for part in pair]
    if isinstance(value, (list, tuple, set, frozenset)):
        return tuple(_described(each, held, unread, depth + 1) for each in value)
    return None


def classes_of(members: Members) -> list[type]:
    """The classes of all modules, and those that they inherit from."""
    kinds = {type(each): None for each in members.modules}
    found = dict.fromkeys(kind for one in kinds for kind in one.__mro__ if kind is not object)
    return list(found)


def _of_classes(members: Members, held: list[Any], unread: Collection[str]) -> dict[str, Any]:
    """What classes hold: plain values, and methods by id. (Two classes may have one name.)"""
    found: dict[str, Any] = {}
    for kind in classes_of(members):
        for name, value in vars(kind).items():
            if name in _MAKERS:
                continue
            key = f"{kind.__qualname__}.{name}"
            if callable(value) or isinstance(value, (property, classmethod, staticmethod)):
                held.append(value)
                found[key] = (*found.get(key, ()), id(value))
                continue
            said = None if name.startswith("__") else _described(value, held, unread)
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
