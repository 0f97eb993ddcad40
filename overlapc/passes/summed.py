"""Weight gradients that a kernel adds to `main_grad` itself, in the backward of an opaque op.

An opaque op runs its module on copies of parameters. A kernel reads `main_grad` from a copy, adds
the gradient there, sets the copy's `grad_added_to_main_grad`, and returns a tensor of no meaning.
`summing` lends the parameter's own `main_grad` to its copy, and sets the mark of the parameter.
While a module is tried out or measured, kernels add to scratch memory instead.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

_OWNER = "overlapc_owner"  # of a copy: the parameter
_MARK = "grad_added_to_main_grad"
_aside = 0  # blocks in which nothing is added to parameters


def copy_of(parameter: Tensor, values: Tensor, needs: bool) -> Any:
    """A parameter of these values, with all attributes of another."""
    copy = nn.Parameter(values, needs)
    vars(copy).update(vars(parameter))
    if hasattr(parameter, "main_grad"):
        setattr(copy, _OWNER, parameter)
    return copy


@contextlib.contextmanager
def aside() -> Iterator[None]:
    """In the block, kernels add weight gradients to scratch memory."""
    global _aside
    _aside += 1
    try:
        yield
    finally:
        _aside -= 1


def is_aside() -> bool:
    """Is a module tried out or measured, on values that are made up?"""
    return _aside > 0


@contextlib.contextmanager
def summing(inputs: Sequence[Any]) -> Iterator[None]:
    """Run a backward in the block: its kernels add to `main_grad` of those parameters whose copies
    are among the inputs."""
    copies = [each for each in inputs if hasattr(each, _OWNER)]
    for copy in copies:
        own = getattr(copy, _OWNER).main_grad
        copy.main_grad = torch.empty_like(own) if _aside else own
        if hasattr(copy, _MARK):
            setattr(copy, _MARK, False)
    yield
    for copy in copies:
        if is_added(copy) and not _aside:
            setattr(getattr(copy, _OWNER), _MARK, True)
        del copy.main_grad


def is_added(copy: Any) -> bool:
    """Did the backward add this copy's gradient to `main_grad`?"""
    return hasattr(copy, _OWNER) and getattr(copy, _MARK, False)


def blank(gradient: Tensor) -> Tensor:
    """In the place of a gradient that has been added: zeros that take no memory. (Who reads them
    has asked for zeros, by `zero_out_wgrad`.)"""
    return gradient.new_zeros(()).expand(gradient.shape)
