"""`reached` finds what code may read beside its arguments: attributes, containers, closures, and
the globals that it names."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor

from overlapc.passes.held import CONTAINERS, is_a, is_looked_into

# Nothing that a model changes is in the code and classes of these packages.
_OTHERS = {*sys.stdlib_module_names, "torch", "numpy", "triton", "overlapc"} - {"__main__"}
_MOST = 20_000  # objects, and items of a container: more are data


def reached(starts: Iterable[Any]) -> dict[int, Any]:
    """By id, all that these objects and functions may reach."""
    seen: dict[int, Any] = {}
    left = [*starts]
    while left and len(seen) < _MOST:
        value = left.pop()
        if id(value) in seen or is_a(value, (str, int, float, complex, type(None))):
            continue
        seen[id(value)] = value
        left += _parts(value)
    return seen


def _parts(value: Any) -> Iterator[Any]:
    if is_a(value, Tensor):
        return
    if is_a(value, FunctionType):
        yield from _read_by(value)
    elif is_a(value, MethodType):
        yield from (value.__self__, value.__func__)
    elif is_a(value, (staticmethod, classmethod)):
        yield value.__func__
    elif is_a(value, property):
        yield from (value.fget, value.fset)
    elif is_a(value, functools.partial):
        yield from (value.func, value.args, value.keywords)
    elif is_a(value, type):
        if not _is_of(value.__module__):
            yield from (*vars(value).values(), *value.__bases__)
    elif is_a(value, (*CONTAINERS, tuple)):
        if len(value) < _MOST:
            yield from value.values() if is_a(value, dict) else value
    elif is_looked_into(value) and not _is_of(type(value).__module__, {"overlapc"}):
        yield from (type(value), vars(value))


def _read_by(function: FunctionType) -> Iterator[Any]:
    """What a function's closure and defaults hold, and the globals that its code names."""
    if _is_of(function.__module__, {"overlapc"}):  # one that stands in for another
        return
    yield from (function.__defaults__ or (), function.__kwdefaults__ or {})
    yield from map(contents, function.__closure__ or ())
    if _is_of(function.__globals__.get("__name__")):
        return
    names = _names_in(function.__code__)
    namespaces, seen = [function.__globals__], set()
    while namespaces:
        namespace = namespaces.pop()
        if id(namespace) in seen or _is_of(namespace.get("__name__")):
            continue
        seen.add(id(namespace))
        for value in [namespace[name] for name in names if name in namespace]:
            if is_a(value, ModuleType):
                namespaces.append(vars(value))
            else:
                yield value


def _names_in(code: CodeType) -> set[str]:
    """The names of globals and attributes in the code and in that of its inner functions."""
    inner = [_names_in(each) for each in code.co_consts if is_a(each, CodeType)]
    return set(code.co_names).union(*inner)


def _is_of(module: Any, packages: set[str] = _OTHERS) -> bool:
    return str(module).partition(".")[0] in packages


def contents(cell: Any) -> Any:
    """What a cell of a closure holds; None if it is empty."""
    try:
        return cell.cell_contents
    except ValueError:
        return None
