"""Objects that hold tensors, such as a cache of keys and values: among a model's results they are
no lists, tuples or dicts, and PyTorch's pytrees do not open them."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from overlapc.errors import OptionError

_WHOLE = (Tensor, type, ModuleType, FunctionType, MethodType)  # these are not looked into
_TORCHS = ("torch", "builtins", "numpy")  # nor objects of these packages, but for modules


def is_looked_into(value: Any) -> bool:
    """Are this object's attributes a part of what the object holds?"""
    if isinstance(value, nn.Module):
        return True
    package = type(value).__module__.partition(".")[0]
    return hasattr(value, "__dict__") and not isinstance(value, _WHOLE) and package not in _TORCHS


def is_held(leaf: Any) -> bool:
    """Is this leaf of a pytree an object that `inside` opens? (A module's state is the model's.)"""
    return not isinstance(leaf, nn.Module) and is_looked_into(leaf)


def objects_in(values: Any) -> list[Any]:
    """The objects among arguments or results."""
    return [leaf for leaf in tree_leaves(values) if is_held(leaf)]


def inside(name: str, value: Any) -> dict[str, Any]:
    """What an object holds: all that is neither a container nor such an object, each with the way
    to it, `result 1.layers[0].keys`."""
    found: dict[str, Any] = {}
    seen: dict[int, Any] = {}
    left = [(name, value)]
    while left:
        where, what = left.pop()
        if (parts := _parts(what)) is None:
            found[where] = what
        elif id(what) not in seen:
            seen[id(what)] = what
            left += [(where + step, part) for step, part in parts]
    return found


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
