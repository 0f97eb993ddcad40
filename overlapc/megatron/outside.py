"""What a trace leaves outside of the model: `left_outside` takes its tensors out of the script's
caches, or refuses a model that keeps more there than constants.

A trace's tensors have no values. A cache that keeps one hands it to the next trace, or to plain
Megatron, which fails. A graph makes what was cached anew each time, which is the same for
constants alone.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.utils._python_dispatch import _disable_current_modes

from overlapc.core.errors import CaptureError
from overlapc.passes.nodes import is_random
from overlapc.state import known
from overlapc.state.module_state import classes_of, contents, members_of
from overlapc.state.snapshot import CONTAINERS, is_a, is_looked_into, restore_of
from overlapc.state.walk import walk
from overlapc.tools.reach import made_of

# Nothing that a model caches is in these.
_OTHERS = {"torch", "overlapc", "numpy", "sympy", "mpmath", "triton", known.PACKAGE}
_INSTALLED = tuple(
    sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")
)
_LruCache = type(functools.lru_cache(lambda: None))
_LOOKED = (*CONTAINERS, tuple)
_DEEPEST = 5  # containers in containers that are looked into
_MOST = 10_000  # items of a container, things to look at, numbers of a tensor: more are data
_TRACED = (FunctionalTensor, FakeTensor)


@contextlib.contextmanager
def left_outside(model: nn.Module, who: str) -> Iterator[None]:
    """Afterwards take traced tensors that the block put there out of the caches of functions, and
    out of the namespaces of `modules_of` the model and what these hold.

    Raise a CaptureError for a tensor that was there and that the block has changed, and for a
    traced one that is no constant: made of inputs or random numbers, or changed in place. `who`
    runs in the block: "forward", or "the backward", of whose tensors this is not known."""
    outside = _Outside.of(model)
    restores = [(each, put) for each in outside.containers if (put := restore_of(each))]
    names = [(each, _names_in(each)) for each in outside.namespaces]
    with _disable_current_modes():
        values = [put for tensor in outside.tensors if (put := restore_of(tensor))]
    found: list[Any] = []
    try:
        yield
    finally:
        for container, restore in restores:
            if traced := _traced_in(container):
                found += traced
                restore()
        for namespace, restore in names:
            found += [each for each in namespace.values() if is_a(each, _TRACED)]
            restore()
        for cache in _caches():
            if traced := _traced_in(cache):
                found += traced
                cache.cache_clear()
        with _disable_current_modes():
            changed = [restore() for restore in values]
    if any(changed):
        raise CaptureError(f"{who} changes a tensor outside of the model, and a graph would not")
    if found and not (who == "forward" and all(map(_is_constant, found))):
        raise CaptureError(
            f"{who} caches a value of its inputs, parameters or random numbers outside of the "
            "model, or changes it there, and a graph would make it anew"
        )


@dataclass
class _Outside:
    """What the script's and Megatron's modules hold."""

    namespaces: list[dict[str, Any]] = field(default_factory=list)
    containers: list[Any] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)  # small ones: others are data

    @staticmethod
    def of(model: nn.Module) -> _Outside:
        found = _Outside()
        own = [id(each) for each in (*model.parameters(), *model.buffers(), *model.modules())]
        roots: list[Any] = []
        for namespace in _namespaces(model):
            found.namespaces.append(namespace)
            own.append(id(namespace))
            roots += namespace.values()
            for kind in [each for each in namespace.values() if is_a(each, type)]:
                is_own = kind.__module__ == namespace.get("__name__")
                roots += vars(kind).values() if is_own else ()
        for method in _methods(model):
            roots += map(contents, method.__closure__ or ())
        tensors: dict[int, Tensor] = {}
        count = 0
        for _, each, is_opened in walk([("", root) for root in roots], _held, set(own)):
            if type(each) is Tensor:
                tensors[id(each)] = each
            elif is_opened and is_a(each, CONTAINERS):
                found.containers.append(each)
            count += is_opened
            if count + len(tensors) >= _MOST:
                break
        found.tensors = [each for each in tensors.values() if each.numel() < _MOST]
        return found


def _held(value: Any) -> list[tuple[str, Any]] | None:
    """What a container that is no data holds, or an object or function of the script."""
    if is_a(value, _LOOKED):
        return _items(value) if len(value) < _MOST else None
    return [("", vars(value))] if type(value) is not Tensor and _is_scripts(value) else None


def _items(container: Any) -> list[tuple[str, Any]]:
    return [("", part) for part in (container.values() if is_a(container, dict) else container)]


def _namespaces(model: nn.Module) -> list[dict[str, Any]]:
    modules = modules_of(model)
    found = {id(vars(module)): vars(module) for module in modules}
    for method in _methods(model):
        found[id(method.__globals__)] = method.__globals__
    return list(found.values())


def _methods(model: nn.Module) -> list[FunctionType]:
    """Of the model's classes that are neither torch's nor Transformer Engine's."""
    held = [each for kind in classes_of(members_of(model)) for each in vars(kind).values()]
    methods = [each for each in held if isinstance(each, FunctionType)]
    others = ("torch", known.PACKAGE)
    return [each for each in methods if str(each.__module__).partition(".")[0] not in others]


def _is_scripts(value: Any) -> bool:
    """Is this an object or function of a module that is not installed?"""
    if is_a(value, nn.Module) or not (is_a(value, FunctionType) or is_looked_into(value)):
        return False
    where = value.__module__ if is_a(value, FunctionType) else type(value).__module__
    if where == "types":  # a SimpleNamespace
        return True
    file = getattr(sys.modules.get(where), "__file__", None) or ""
    scripts = where == "__main__" or (file and not file.startswith(_INSTALLED))
    return bool(scripts) and where.partition(".")[0] not in (*_OTHERS, "megatron")


def _names_in(namespace: dict[str, Any]) -> Callable[[], bool]:
    """What puts back the names that were given to traced tensors."""
    before = dict(namespace)

    def restore() -> bool:
        given = [name for name, value in namespace.items() if is_a(value, _TRACED)]
        for name in given:
            if name in before:
                namespace[name] = before[name]
            else:
                del namespace[name]
        return bool(given)

    return restore


def _caches() -> list[Any]:
    """The functions with a `functools.lru_cache`: each refers to its type."""
    return [each for each in gc.get_referrers(_LruCache) if type(each) is _LruCache]


def modules_of(model: nn.Module) -> list[ModuleType]:
    """Megatron's Python modules, those that define the model's classes, and those of the script:
    neither installed nor torch's or overlapc's."""
    names = {kind.__module__ for kind in classes_of(members_of(model))}
    found = []
    for name, module in list(sys.modules.items()):
        top, file = name.partition(".")[0], getattr(module, "__file__", None) or ""
        scripts = file and not file.startswith(_INSTALLED)
        if top == "megatron" or (top not in _OTHERS and (name in names or scripts)):
            found.append(module)
    return found


def _traced_in(container: Any) -> list[Any]:
    """The tensors of a trace in this container or cache."""

    def referents(value: Any) -> list[tuple[str, Any]] | None:
        looked = value is container or (is_a(value, _LOOKED) and len(value) < _MOST)
        return [("", each) for each in gc.get_referents(value)] if looked else None

    visited = walk([("", container)], referents, deepest=_DEEPEST)
    return [value for _, value, _ in visited if is_a(value, _TRACED)]


def _is_constant(tensor: Any) -> bool:
    """Does the graph that is being traced make it of nothing? (The first pass has no graph yet.)"""
    mode = get_proxy_mode()
    if mode is None:
        return True
    if tensor._version:
        return False
    inner = torch._from_functional_tensor(tensor.elem) if hasattr(tensor, "elem") else tensor
    proxy = get_proxy_slot(inner, mode.tracer, None)
    node = getattr(getattr(proxy, "proxy", None), "node", None)
    if node is None:
        return False
    return not any(each.op == "placeholder" or is_random(each) for each in made_of([node]))
