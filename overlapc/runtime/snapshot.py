"""`as_it_was` restores a model after the steps that run inside it.

It restores values of tensors, gradients, what attributes and their containers hold, and random
states. What a forward changes elsewhere (a global, a variable of a closure, the state of an
optimizer that a hook steps) it does not know, and that stays changed.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from overlapc.runtime.objects import is_looked_into

_Restore = Callable[[], None]


@contextlib.contextmanager
def as_it_was(model: nn.Module) -> Iterator[None]:
    """Clear gradients for the block; afterwards restore the model and the random states."""
    tensors, restores = _state([model])
    restores += [_restore_value(tensor) for tensor in tensors]
    restores += _random_states()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices=devices), without_gradients(tensors):
        try:
            yield
        finally:
            for restore in restores:
                restore()


@contextlib.contextmanager
def left_alone(objects: Sequence[Any]) -> Iterator[None]:
    """Afterwards restore what these objects hold."""
    tensors, restores = _state(objects)
    restores += [_restore_value(tensor) for tensor in tensors]
    try:
        yield
    finally:
        for restore in restores:
            restore()


@contextlib.contextmanager
def holding_the_same(objects: Sequence[Any]) -> Iterator[None]:
    """Afterwards restore what these objects hold and the random states, but no values of
    tensors."""
    restore = held(objects)
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            restore()


def held(objects: Sequence[Any]) -> _Restore:
    """What puts back what these objects hold now, and Python's random states, but no values of
    tensors."""
    _, restores = _state(objects)
    restores += _random_states()

    def restore() -> None:
        for each in restores:
            each()

    return restore


@contextlib.contextmanager
def without_gradients(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Put the gradients of these aside, and back afterwards."""
    gradients = [(t, t.grad) for t in tensors if t.is_leaf and t.requires_grad]
    for tensor, _ in gradients:
        tensor.grad = None
    try:
        yield
    finally:
        for tensor, gradient in gradients:
            tensor.grad = gradient


def _state(objects: Sequence[Any]) -> tuple[list[Tensor], list[_Restore]]:
    """Find the tensors in these objects' attributes and their containers, and what puts these back
    as they are now."""
    tensors: list[Tensor] = []
    restores: list[_Restore] = []
    seen: dict[int, Any] = {}
    left: list[Any] = [*objects]
    while left:
        value = left.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, dict):
            restores.append(_restore_items(value, list(value.items()), value.update))
            left += value.values()
        elif isinstance(value, (list, deque)):
            restores.append(_restore_items(value, list(value), value.extend))
            left += value
        elif isinstance(value, set):
            restores.append(_restore_items(value, list(value), value.update))
        elif isinstance(value, tuple):
            left += value
        elif (found := generator(value)) is not None:
            read, write = found
            restores.append(partial(write, read()))
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


def _restore_items(
    container: Any, before: list[Any], fill: Callable[[list[Any]], None]
) -> _Restore:
    def restore() -> None:
        now = list(container.items() if isinstance(container, dict) else container)
        if len(now) == len(before) and all(map(_same, now, before)):
            return  # left alone, because guards look at when a container was written
        container.clear()
        fill(before)

    return restore


def _same(one: Any, other: Any) -> bool:
    """Is it the same object, or, of a dict's items, the same key with the same value?"""
    if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other):
        return all(a is b for a, b in zip(one, other, strict=True))
    return one is other


def _restore_value(tensor: Tensor) -> _Restore:
    if tensor.is_inference():  # nothing writes to it
        return lambda: None
    version, before = tensor._version, tensor.detach().clone()

    def restore() -> None:
        with torch.no_grad():
            if tensor._version != version or not _equal(tensor, before):
                tensor.copy_(before)

    return restore


def _equal(one: Tensor, other: Tensor) -> bool:
    """Has nothing written past autograd's eyes, through `.data`?"""
    strided = one.layout == torch.strided and type(one) in (Tensor, nn.Parameter)
    return not strided or torch.equal(one, other)


def _random_states() -> list[_Restore]:
    pythons = random.getstate()
    restores: list[_Restore] = [lambda: random.setstate(pythons)]
    if numpy := sys.modules.get("numpy"):
        numpys = numpy.random.get_state()
        restores.append(lambda: numpy.random.set_state(numpys))
    return restores
