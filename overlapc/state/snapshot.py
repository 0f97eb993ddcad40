"""Functions that remember what objects, containers, tensors and random generators hold. What they
return puts it back, and returns whether it was anything else by then."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from overlapc.state.walk import walk

CONTAINERS = (dict, list, deque, set)
PLAIN = (str, bytes, int, float, complex, type(None))
_NONE = object()  # where there is no object
Restore = Callable[[], bool]
# These are not looked into. (Of a number of a tensor's, Dynamo does not know whether it is one.)
_WHOLE = (Tensor, int, float, complex, str, type, ModuleType, FunctionType, MethodType)
# Nor objects of these packages, but for modules: loggers remember what they let through, and others
# threads that live.
_OTHERS = ("torch", "builtins", "numpy", "logging", "threading", "concurrent", "multiprocessing")


def is_a(value: Any, kind: type | tuple[type, ...]) -> bool:
    """By its type alone: an object may refuse to say what it is, as a dead weak proxy does."""
    return issubclass(type(value), kind)


def answers(value: Any, name: str) -> bool:
    """Has it such an attribute? One that refuses to be asked has none: a Pydantic model's
    validator, say."""
    try:
        return hasattr(value, name)
    except Exception:
        return False


def is_looked_into(value: Any) -> bool:
    """Are this object's attributes a part of what the object holds?"""
    if is_a(value, nn.Module):
        return True
    if is_a(value, _WHOLE) or not answers(value, "__dict__"):
        return False
    return type(value).__module__.partition(".")[0] not in _OTHERS  # not of an int's: Dynamo fails


def held_in(container: Any) -> Restore:
    """Of one of CONTAINERS: the same objects."""
    is_list = isinstance(container, (list, deque))
    fill: Callable[[Any], None] = container.extend if is_list else container.update

    def items() -> list[Any]:
        return list(container.items() if isinstance(container, dict) else container)

    before = items()

    def restore() -> bool:
        now = items()
        if len(now) == len(before) and all(map(_same, now, before)):
            return False  # left alone, because guards look at when a container was written
        container.clear()
        fill(before)
        return True

    return restore


def _same(one: Any, other: Any) -> bool:
    """Is it the same object, or, of a dict's items, the same key with the same value?"""
    if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other):
        return all(a is b for a, b in zip(one, other, strict=True))
    return one is other


def value_of(tensor: Tensor) -> Restore:
    """Of a tensor: the same values."""
    if tensor.is_inference():  # nothing writes to it
        return lambda: False
    version, before = tensor._version, tensor.detach().clone()

    def restore() -> bool:
        with torch.no_grad():
            if (tensor.dtype, tensor.shape) != (before.dtype, before.shape):
                tensor.data = before
            elif tensor._version != version or not _equal(tensor, before):
                tensor.copy_(before)
            else:
                return False
        return True

    return restore


def _equal(one: Tensor, other: Tensor) -> bool:
    """Has nothing written past autograd's eyes, through `.data`?"""
    strided = one.layout == torch.strided and type(one) in (Tensor, nn.Parameter)
    return not strided or torch.equal(one, other)


def held_by(objects: Iterable[Any]) -> tuple[list[Tensor], list[Restore]]:
    """Find the tensors in these objects' attributes and their containers, and what puts these back
    as they are now."""
    tensors: dict[int, Tensor] = {}
    restores: dict[int, Restore] = {}
    for _, value, _ in walk([("", each) for each in objects], _contents):
        if isinstance(value, Tensor):
            tensors[id(value)] = value
        elif isinstance(value, CONTAINERS):
            restores[id(value)] = held_in(value)
        elif (found := generator(value)) is not None:
            restores.setdefault(id(value), _drawn_from(*found))
    return [*tensors.values()], [*restores.values()]


def _contents(value: Any) -> list[tuple[str, Any]] | None:
    """What a container or an object holds; None of anything else."""
    if isinstance(value, Tensor):
        return None
    if isinstance(value, (*CONTAINERS, tuple)):
        return [("", part) for part in (value.values() if isinstance(value, dict) else value)]
    if generator(value) is None and is_looked_into(value):
        return [("", vars(value))]
    return None


def restore_of(value: Any) -> Restore | None:
    """What puts back all that an object itself holds; None of one that holds nothing."""
    if is_a(value, (Tensor, nn.Parameter)):
        return value_of(value) if type(value) in (Tensor, nn.Parameter) else None
    if is_a(value, CONTAINERS):
        return held_in(value)
    if (found := generator(value)) is not None:
        return _drawn_from(*found)
    if is_a(value, np.ndarray):
        return _array(value)
    if is_a(value, type):
        names = [name for name, each in vars(value).items() if is_a(each, PLAIN)]
        return names_of(vars(value), names, partial(setattr, value))
    slots = slots_of(value)
    if not is_looked_into(value) or not is_a(vars(value), dict):  # a list[int]'s are its class's
        return _slots(value, slots) if slots else None
    return _both(held_in(vars(value)), _slots(value, slots)) if slots else held_in(vars(value))


def names_of(
    namespace: Mapping[str, Any],
    names: Iterable[str],
    put: Callable[[str, Any], None] | None = None,
) -> Restore:
    """Of these names in a namespace: the same objects, or none. `put` is how to set one of a class,
    whose names all have an object."""
    before = {name: namespace.get(name, _NONE) for name in names}

    def restore() -> bool:
        changed = [each for each in before.items() if namespace.get(each[0], _NONE) is not each[1]]
        for name, value in changed:
            if put is not None:
                put(name, value)
            elif value is _NONE:
                del cast(dict[str, Any], namespace)[name]
            else:
                cast(dict[str, Any], namespace)[name] = value
        return bool(changed)

    return restore


def slots_of(value: Any) -> dict[str, Any]:
    """The attributes that its classes have given a place of their own."""
    found: dict[str, Any] = {}
    for kind in type(value).__mro__:
        names = vars(kind).get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            private = name.startswith("__") and not name.endswith("__")
            name = f"_{kind.__name__.lstrip('_')}{name}" if private else name
            if is_a(vars(kind).get(name), MemberDescriptorType) and hasattr(value, name):
                found[name] = getattr(value, name)
    return found


def _slots(value: Any, before: dict[str, Any]) -> Restore:
    def restore() -> bool:
        now = slots_of(value)
        if now.keys() == before.keys() and all(now[name] is before[name] for name in now):
            return False
        for name in now.keys() - before.keys():
            object.__delattr__(value, name)
        for name, each in before.items():
            object.__setattr__(value, name, each)
        return True

    return restore


def _both(one: Restore, other: Restore) -> Restore:
    def restore() -> bool:
        return any([one(), other()])

    return restore


def _array(value: np.ndarray[Any, Any]) -> Restore:
    before = value.copy()

    def restore() -> bool:
        if before.dtype.hasobject or value.tobytes() == before.tobytes():
            return False
        value[...] = before
        return True

    return restore


def generator(value: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]] | None:
    """How to read and how to write the state of a random generator of Python's, NumPy's or torch's;
    None of any other object."""
    if isinstance(value, random.Random):
        return value.getstate, value.setstate
    if isinstance(value, np.random.RandomState):
        return value.get_state, value.set_state
    if isinstance(value, np.random.Generator):
        bits = value.bit_generator
        return lambda: bits.state, partial(setattr, bits, "state")
    if isinstance(value, torch.Generator):
        return partial(_torchs, value), partial(_set_torchs, value)
    return None


def _torchs(value: torch.Generator) -> list[int]:
    with _disable_current_modes():
        return value.get_state().tolist()  # type: ignore[no-any-return]


def _set_torchs(value: torch.Generator, state: list[int]) -> None:
    with _disable_current_modes():
        value.set_state(torch.tensor(state, dtype=torch.uint8))


def random_restores() -> list[Restore]:
    """Of Python's and NumPy's own generators."""
    return [
        _drawn_from(random.getstate, random.setstate),
        _drawn_from(np.random.get_state, np.random.set_state),
    ]


def _drawn_from(read: Callable[[], Any], write: Callable[[Any], Any]) -> Restore:
    before = read()

    def restore() -> bool:
        drawn = repr(read()) != repr(before)
        write(before)
        return drawn

    return restore
