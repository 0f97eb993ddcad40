"""Functions that remember what objects, containers, tensors and random generators hold. What they
return puts it back, and returns whether it was anything else by then."""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

CONTAINERS = (dict, list, deque, set)
Restore = Callable[[], bool]
# These are not looked into. (Of a number of a tensor's, Dynamo does not know whether it is one.)
_WHOLE = (Tensor, int, float, complex, str, type, ModuleType, FunctionType, MethodType)
# Nor objects of these packages, but for modules: those of `logging` remember what they let through.
_OTHERS = ("torch", "builtins", "numpy", "logging")


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


def held_by(
    objects: Iterable[Any], seen: dict[int, Any] | None = None
) -> tuple[list[Tensor], list[Restore]]:
    """Find the tensors in these objects' attributes and their containers, and what puts these back
    as they are now. What was `seen` is passed over."""
    tensors: list[Tensor] = []
    restores: list[Restore] = []
    seen = {} if seen is None else seen
    left: list[Any] = [*objects]
    while left:
        value = left.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, CONTAINERS):
            restores.append(held_in(value))
            left += value.values() if isinstance(value, dict) else value
        elif isinstance(value, tuple):
            left += value
        elif (found := generator(value)) is not None:
            restores.append(_drawn_from(*found))
        elif is_looked_into(value):
            left.append(vars(value))
    return tensors, restores


def generator(value: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]] | None:
    """How to read and how to write the state of a random generator of Python's or NumPy's; None of
    any other object."""
    if isinstance(value, random.Random):
        return value.getstate, value.setstate
    if numpy := sys.modules.get("numpy"):
        if isinstance(value, numpy.random.RandomState):
            return value.get_state, value.set_state
        if isinstance(value, numpy.random.Generator):
            bits = value.bit_generator
            return lambda: bits.state, partial(setattr, bits, "state")
    return None


def random_restores() -> list[Restore]:
    """Of Python's and NumPy's own generators."""
    restores = [_drawn_from(random.getstate, random.setstate)]
    if numpy := sys.modules.get("numpy"):
        restores.append(_drawn_from(numpy.random.get_state, numpy.random.set_state))
    return restores


def _drawn_from(read: Callable[[], Any], write: Callable[[Any], Any]) -> Restore:
    before = read()

    def restore() -> bool:
        drawn = repr(read()) != repr(before)
        write(before)
        return drawn

    return restore
