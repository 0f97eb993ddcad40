"""Objects that hold tensors, such as a cache of keys and values: among a model's results they are
no lists, tuples or dicts, and PyTorch's pytrees do not open them."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from overlapc.core.errors import OptionError
from overlapc.state.snapshot import is_looked_into
from overlapc.state.walk import walk


def is_held(leaf: Any) -> bool:
    """Is this leaf of a pytree an object that `inside` opens? (A module's state is the model's.)"""
    return not isinstance(leaf, nn.Module) and is_looked_into(leaf)


def objects_in(values: Any) -> list[Any]:
    """The objects among arguments or results."""
    return [leaf for leaf in tree_leaves(values) if is_held(leaf)]


def inside(name: str, value: Any) -> dict[str, Any]:
    """What an object holds: all that is neither a container nor such an object, each with the way
    to it, `result 1.layers[0].keys`."""
    visited = walk([(name, value)], _parts)
    return {way: what for way, what, is_opened in visited if not is_opened}


def rebuilt(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A copy of an object, and of the objects, lists, tuples and dicts in it, with each of its
    tensors changed. This is traced, too."""
    return _walked(value, change, True, [])


def _walked(value: Any, change: Callable[[Tensor], Tensor], copies: bool, done: list[Any]) -> Any:
    """Call `change` with each tensor in an object, as often as it is there; return the object with
    what that returns, if it `copies`. `done`: what was met, and its copy."""
    if isinstance(value, Tensor):
        return change(value)
    for old, new in done:
        if old is value:
            return new
    made: Any
    if type(value) is tuple:
        made = tuple(_walked(part, change, copies, done) for part in value)
        done.append((value, made))
        return made
    if type(value) is list:
        made = []
        done.append((value, made))
        made.extend([_walked(part, change, copies, done) for part in value])
        return made
    if type(value) is dict:
        made = {}
        done.append((value, made))
        for key, part in value.items():
            made[key] = _walked(part, change, copies, done)
        return made
    if not is_held(value):
        return value
    made = copy.copy(value) if copies else value
    done.append((value, made))
    for key, part in list(vars(value).items()):
        changed = _walked(part, change, copies, done)
        if copies:
            object.__setattr__(made, key, changed)  # also if it is frozen
    return made


def ends_in(leaves: Sequence[Any]) -> list[Tensor]:
    """The tensors in objects among these leaves of a pytree that are results of their own, each as
    often as it is there, in the order in which `rebuilt` meets them: those that require a gradient.
    If no result does, the numbers, of which one may be the loss. No parameters."""
    found = [tensor for leaf in leaves if is_held(leaf) for tensor in tensors_in(leaf)]
    plain = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    differentiable = any(_needs_gradient(tensor) for tensor in [*plain, *found])
    is_end = _needs_gradient if differentiable else _may_be_loss
    return [tensor for tensor in found if is_end(tensor)]


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in an object, in the order in which `rebuilt` meets them."""
    found: list[Tensor] = []

    def meet(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    _walked(value, meet, False, [])
    return found


def opened(results: Sequence[Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What the objects among these results hold, by the way to it: results of their own
    (`ends_in`), and all else."""
    held: dict[str, Any] = {}
    for i, value in enumerate(results):
        held |= inside(f"result {i}", value) if is_held(value) else {}
    ends: dict[str, Tensor] = {}
    for end in ends_in(results):
        name = next(name for name, value in held.items() if value is end)
        ends[name] = held.pop(name)
    return ends, held


def _needs_gradient(tensor: Tensor) -> bool:
    wanted = torch.is_grad_enabled() and tensor.requires_grad
    return wanted and not isinstance(tensor, nn.Parameter)


def _may_be_loss(tensor: Tensor) -> bool:
    is_number = not tensor.dim() and tensor.is_floating_point()
    return is_number and not isinstance(tensor, nn.Parameter)


def detached(results: Any, but: Tensor | None = None, by: Tensor | None = None) -> Any:
    """Results of a model, of which only one tensor may require a gradient; `by` replaces it."""

    def detach(tensor: Tensor) -> Tensor:
        if tensor is not but:
            return tensor.detach()
        return tensor if by is None else by

    leaves, spec = tree_flatten(results)
    found = [
        detach(leaf)
        if isinstance(leaf, Tensor)
        else rebuilt(leaf, detach)
        if any(_needs_gradient(tensor) for tensor in tensors_in(leaf))
        else leaf
        for leaf in leaves
    ]
    return tree_unflatten(found, spec)


def storage_of(tensor: Tensor) -> int | None:
    """What all views of a tensor have in common."""
    strided = tensor.layout == torch.strided
    return tensor.untyped_storage()._cdata if strided else None


def _parts(what: Any) -> list[tuple[str, Any]] | None:
    """The parts of a container or object with the step to each; None for anything else."""
    parts: list[tuple[str, Any]] = []
    if isinstance(what, Mapping):
        parts += [(f"[{key!r}]", part) for key, part in what.items()]
    elif isinstance(what, (list, tuple, deque)):
        parts += [(f"[{i}]", part) for i, part in enumerate(what)]
    elif not is_held(what):
        return None
    if is_held(what):
        parts += [(f".{key}", part) for key, part in vars(what).items()]
    return parts


def joined(name: str, parts: Sequence[Any]) -> Any:
    """What slices' objects hold in one place, as the batch's object will hold it: tensors put
    together along dimension 0, all else alike."""
    if all(part is parts[0] for part in parts):
        return parts[0]
    batched = [part for part in parts if isinstance(part, Tensor) and part.dim()]
    if len(batched) < len(parts):
        if all(alike(part, parts[0]) for part in parts):
            return parts[0]
        why = f"{', '.join(map(str, parts))} for slices; expected what is alike for all"
    elif len({(part.dtype, part.shape[1:]) for part in batched}) == 1:
        return torch.cat(batched)
    else:
        why = "of shapes that cannot be put together along dimension 0"
    raise OptionError(
        f"slices={len(parts)}: {name} is {why}: leave it out of the results, or register its class "
        "with torch.utils._pytree, so that each tensor has its own dimension of the batch"
    )


def alike(one: Any, other: Any) -> bool:
    """Are these equal?"""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    try:
        return bool(one == other)
    except (RuntimeError, ValueError):  # arrays give an array
        return False


def batch_in_objects(arguments: Any) -> str:
    """The type of an argument that is an object and holds tensors of the batch, which cutting does
    not reach; "" if there is none."""
    sizes = {
        leaf.shape[0] for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor) and leaf.dim()
    } - {1}
    for value in objects_in(arguments):
        held = (what for what in inside("", value).values() if isinstance(what, Tensor))
        if any(tensor.dim() and tensor.shape[0] in sizes for tensor in held):
            return type(value).__name__
    return ""
