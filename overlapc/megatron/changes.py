"""What a model changes while it runs: `refused` names it, `restored` undoes it.

A trace runs `forward` and the backward several times, on tensors without values; a graph runs
neither. So a model that changes its own Python state, or draws outside of torch, cannot be a graph,
and no such change of a trace may stay.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from overlapc.core.errors import CaptureError
from overlapc.runtime.restored import holding_the_same
from overlapc.state.described import UNREAD
from overlapc.state.module_state import Describer, attributes_of, classes_of, is_plain, members_of
from overlapc.state.snapshot import generator
from overlapc.tools.shared_changes import replaced

SETS = "changes the attribute"
_SEEDS = ("manual_seed", "manual_seed_all", "seed", "seed_all", "set_rng_state")


@contextlib.contextmanager
def refused(model: nn.Module, who: str) -> Iterator[None]:
    """Raise a CaptureError if the block changes attributes, parameters or buffers of modules, or
    draws from random states that are not torch's."""
    describer = Describer(UNREAD)
    before, drawn = _known(model, describer), _drawn(model)
    yield
    after = _known(model, describer)
    for name in sorted(before.keys() | after.keys()):  # all ranks name the same
        if before.get(name) != after.get(name):
            raise CaptureError(f"{who} {SETS} {name}, and a graph would not")
    if drawn != _drawn(model):
        raise CaptureError(f"{who} draws from Python's or NumPy's random, and a graph would not")


@contextlib.contextmanager
def unseeded() -> Iterator[None]:
    """Raise a CaptureError if the block sets a random state of torch. (A module that no trace
    enters may: it runs outside of the trace's modes.)"""
    with contextlib.ExitStack() as stack:
        for module in (torch, torch.random, torch.cuda, torch.cuda.random):
            for name in _SEEDS:
                if hasattr(module, name):
                    real = getattr(module, name)
                    stack.callback(setattr, module, name, real)
                    setattr(module, name, _refusing(real))
        yield


@contextlib.contextmanager
def unhooked() -> Iterator[None]:
    """Raise a CaptureError if the block lets hooks see what autograd saves. (Checkpoints without
    reentry do; what they recompute is in the graph.)"""
    real = saved_tensors_hooks.__enter__

    def refuse(hooks: Any) -> Any:
        if type(hooks).__module__ == "torch.utils.checkpoint" or not _in_trace():
            return real(hooks)
        raise CaptureError(
            f"forward enters {type(hooks).__name__} of torch.autograd.graph, and a graph would not"
        )

    with replaced(saved_tensors_hooks, "__enter__", refuse):
        yield


def _in_trace() -> bool:
    return bool(_get_current_dispatch_mode_stack())


def _refusing(real: Callable[..., Any]) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        if not _in_trace():
            return real(*args, **kwargs)
        raise CaptureError(f"forward calls torch's {real.__name__}, and a graph would not")

    return refuse


def _refuse_data(tensor: Any, new: Any) -> None:
    """(Megatron's routers move their weight to where it is.)"""
    alike = (new.dtype, new.shape) == (tensor.dtype, tensor.shape)
    if alike and new.untyped_storage()._cdata == tensor.untyped_storage()._cdata:
        return
    raise CaptureError(
        f"forward sets `.data` of a tensor of shape {tuple(tensor.shape)}, and a graph would not; "
        "expected copy_() under torch.no_grad()"
    )


# In the place of a traced tensor's `.data`: what is set there no trace sees.
DATA = property(torch.Tensor.data.__get__, _refuse_data)


@contextlib.contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """Afterwards restore what modules and their helpers hold, plain attributes of their classes,
    and random states."""
    kinds = [
        (kind, name, value)
        for kind in classes_of(members_of(model))
        for name, value in vars(kind).items()
        if is_plain(value) and not name.startswith("__")
    ]
    containers = [value for _, _, value in kinds if isinstance(value, (dict, list, set))]
    with holding_the_same([model, *containers]):
        try:
            yield
        finally:
            for kind, name, value in kinds:
                if vars(kind).get(name) is not value:
                    setattr(kind, name, value)


def _known(model: nn.Module, describer: Describer) -> dict[str, Any]:
    found = attributes_of(members_of(model), describer)
    for kind in (model.named_parameters, model.named_buffers):
        for name, tensor in kind(remove_duplicate=False):
            describer.held.append(tensor)
            found[name] = id(tensor)
    return found


def _drawn(model: nn.Module) -> list[str]:
    """The random states of Python and NumPy, and of generators that modules have."""
    numpy = sys.modules.get("numpy")
    states = [random.getstate(), *([numpy.random.get_state(legacy=False)] if numpy else [])]
    own = [generator(value) for each in model.modules() for value in vars(each).values()]
    states += [read() for read, _ in filter(None, own)]
    return [repr(state) for state in states]
