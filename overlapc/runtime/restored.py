"""`as_it_was` restores a model after the steps that run inside it.

It restores values of tensors, gradients, what attributes and their containers hold, and random
states. What a forward changes elsewhere (a global, a variable of a closure, the state of an
optimizer that a hook steps) it does not know, and that stays changed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from overlapc.passes.draws import random_states, set_random_states
from overlapc.state.snapshot import held_by, random_restores, value_of


@contextlib.contextmanager
def as_it_was(model: nn.Module) -> Iterator[None]:
    """Clear gradients for the block; afterwards restore the model and the random states."""
    tensors, restores = held_by([model])
    restores += [value_of(tensor) for tensor in tensors]
    restores += random_restores()
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
    tensors, restores = held_by(objects)
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


def held(objects: Sequence[Any]) -> Callable[[], None]:
    """What puts back what these objects hold now, and the random states, but no values of
    tensors."""
    _, restores = held_by(objects)
    restores += random_restores()
    states = random_states()

    def restore() -> None:
        for each in restores:
            each()
        set_random_states(states)

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
