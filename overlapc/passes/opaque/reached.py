"""`Reached` finds what code may read beside its arguments: what closures hold, the globals that it
names, and of objects the attributes that it names."""

from __future__ import annotations

import dis
import functools
import sys
import weakref
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from overlapc.core.errors import CaptureError
from overlapc.state.module_state import INTERNAL, contents
from overlapc.state.snapshot import CONTAINERS, PLAIN, generator, is_a, is_looked_into, slots_of

# What a model changes is not in the code and classes of these packages, nor in the standard
# library's objects but for these.
_OTHERS = {*sys.stdlib_module_names, "torch", "numpy", "triton", "overlapc"}
_LOOKED = {"types", "collections", "argparse"}
_ANY = {"getattr", "vars", "__dict__", "eval", "exec", "globals", "locals", "attrgetter"}
_MOST = 200_000  # objects
_LruCache = type(functools.lru_cache(lambda: None))


# Beside what code names, PyTorch calls these, and Python what begins with two underscores.
_CALLED = {"forward", "backward", "setup_context"}
_UNCALLED = {"__init__", "__setstate__"}  # of a module while it runs


class Names(NamedTuple):
    """The names in a function's code: of globals, of attributes, of modules that it imports."""

    globals: frozenset[str]
    attributes: frozenset[str]
    imports: frozenset[str]


class Reached:
    """What the starts reach, but for the containers `but`: objects by id, and globals."""

    def __init__(self, starts: Iterable[Any], but: Iterable[Any] = ()) -> None:
        self.objects: dict[int, Any] = {}
        self.globals: dict[int, tuple[dict[str, Any], set[str]]] = {}  # namespaces, names in them
        self._named = set(_CALLED)
        self._any = False  # may it read any attribute?
        self._unnamed: dict[str, list[Any]] = defaultdict(list)  # attributes
        self._modules: list[ModuleType] = []
        self._but = set(map(id, but))
        self._left = [*starts]
        while self._left:
            self._walk()
            for module in self._modules:
                found = self._named.intersection(vars(module))
                self._left += filter(self._is_new, [vars(module)[name] for name in found])

    def _walk(self) -> None:
        while self._left:
            value = self._left.pop()
            if not self._is_new(value):
                continue
            self.objects[id(value)] = value
            if len(self.objects) > _MOST:
                raise CaptureError(f"it may read more than {_MOST:,} objects")
            self._left += self._parts(value)

    def _is_new(self, value: Any) -> bool:
        known = id(value) in self.objects or id(value) in self._but
        return not known and not is_a(value, PLAIN)

    def _parts(self, value: Any) -> Iterator[Any]:
        if is_a(value, (Tensor, np.ndarray)) or generator(value) is not None:
            return
        if is_a(value, FunctionType):
            yield from self._read_by(value)
        elif is_a(value, CellType):
            yield contents(value)
        elif is_a(value, MethodType):
            yield from (value.__self__, value.__func__)
        elif is_a(value, (staticmethod, classmethod)):
            yield value.__func__
        elif is_a(value, property):
            yield from (value.fget, value.fset)
        elif is_a(value, functools.partial):
            yield from (value.func, value.args, value.keywords)
        elif is_a(value, weakref.ref):
            yield value()
        elif is_a(value, ModuleType):
            if not _is_of(value.__name__):
                self._modules.append(value)
        elif is_a(value, type):
            if not _is_of(value.__module__):
                but = _UNCALLED if issubclass(value, nn.Module) else ()
                yield from value.__bases__
                yield from self._attributes({k: v for k, v in vars(value).items() if k not in but})
        elif is_a(value, _LruCache):
            yield value.__wrapped__
        elif is_a(value, (*CONTAINERS, tuple, frozenset)):
            yield from value.values() if is_a(value, dict) else value
        elif is_a(value, nn.Module) or not _is_of(type(value).__module__, _OTHERS - _LOOKED):
            yield type(value)
            yield from self._attributes(slots_of(value))
            if is_looked_into(value):
                yield from self._attributes(vars(value))

    def _attributes(self, attributes: Any) -> Iterator[Any]:
        """Those that code names, now or later, and those that Python and PyTorch look up."""
        for name, value in attributes.items():
            if self._any or name in self._named or name in INTERNAL or name.startswith("__"):
                yield value
            else:
                self._unnamed[name].append(value)

    def _read_by(self, function: FunctionType) -> Iterator[Any]:
        if _is_of(function.__module__, {"overlapc"}):  # one that stands in for another
            return
        yield from (function.__defaults__, function.__kwdefaults__, vars(function))
        yield from function.__closure__ or ()
        namespace = function.__globals__
        if _is_of(namespace.get("__name__")):
            return
        names = names_in(function.__code__)
        self.globals.setdefault(id(namespace), (namespace, set()))[1].update(names.globals)
        yield from [namespace[name] for name in names.globals if name in namespace]
        yield from [sys.modules[name] for name in names.imports if name in sys.modules]
        self._named |= names.attributes
        self._any |= not _ANY.isdisjoint(names.attributes | names.globals)
        known = self._unnamed.keys()
        for name in [*known] if self._any else known & names.attributes:
            yield from self._unnamed.pop(name)


@functools.lru_cache(maxsize=10_000)
def names_in(code: CodeType) -> Names:
    """Also those of its inner functions; strings may be names for `getattr`."""
    inner = [names_in(each) for each in code.co_consts if is_a(each, CodeType)]
    of_globals = set[str]().union(*(each.globals for each in inner))
    attributes = set[str]().union(*(each.attributes for each in inner))
    imports = set[str]().union(*(each.imports for each in inner))
    for each in dis.get_instructions(code):
        if not isinstance(each.argval, str) or "FAST" in each.opname:
            continue
        if each.opname == "IMPORT_NAME":
            imports.add(each.argval)
        else:
            (of_globals if "GLOBAL" in each.opname else attributes).add(each.argval)
    return Names(frozenset(of_globals), frozenset(attributes), frozenset(imports))


def _is_of(module: Any, packages: Collection[str] = _OTHERS) -> bool:
    return str(module).partition(".")[0] in packages


def memory_of(value: Any) -> tuple[int, int]:
    """Where the memory of a tensor or array begins and ends. (Of one without memory, where PyTorch
    describes it: no other has that.)"""
    if is_a(value, np.ndarray):
        while is_a(value.base, np.ndarray):
            value = value.base
        start = value.__array_interface__["data"][0]
        return start, start + value.nbytes
    if value.layout != torch.strided:
        return id(value), id(value) + 1
    storage = value.untyped_storage()
    if is_a(value, FakeTensor) or value.device.type == "meta" or not storage.data_ptr():
        return storage._cdata, storage._cdata + 1
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()
