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

from overlapc.passes.held import held_in, value_of
from overlapc.runtime.objects import is_looked_into

_Restore = Callable[[], Any]


@contextlib.contextmanager
def as_it_was(model: nn.Module) -> Iterator[None]:
    """Clear gradients for the block; afterwards restore the model and the random states."""
    tensors, restores = _state([model])
    restores += [value_of(tensor) for tensor in tensors]
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
    restores += [value_of(tensor) for tensor in tensors]
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
        elif isinstance(value, (dict, list, deque, set)):
            restores.append(held_in(value))
            left += value.values() if isinstance(value, dict) else value
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


def _random_states() -> list[_Restore]:
    pythons = random.getstate()
    restores: list[_Restore] = [lambda: random.setstate(pythons)]
    if numpy := sys.modules.get("numpy"):
        numpys = numpy.random.get_state()
        restores.append(lambda: numpy.random.set_state(numpys))
    return restores
