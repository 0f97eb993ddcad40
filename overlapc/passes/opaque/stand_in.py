"""`Opaques` finds the modules that cannot be traced, and makes them opaque.

When a trace fails, the innermost module that was running gets another `forward`, which calls the
module as an opaque op, and the model is traced again.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
)
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils._pytree import tree_leaves

from overlapc.core.errors import CaptureError
from overlapc.passes.capture.untraced import said_of
from overlapc.passes.nodes import module_of
from overlapc.passes.opaque.calls import tensors_of
from overlapc.passes.opaque.op import begin_trace, called
from overlapc.passes.opaque.reached import Reached, memory_of
from overlapc.state.known import known_of, settled_by
from overlapc.state.module_state import INTERNAL, Members, hooks_of, members_of
from overlapc.state.snapshot import is_a
from overlapc.tools.told import warn

T = TypeVar("T")
Forward = Callable[..., Any]
Attributes = list[tuple[dict[str, Any], str, Tensor]]  # owner, name, tensor

# Code that depends on values may behave differently on noise and on data.
_OF_VALUES = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    GuardOnDataDependentSymNode,
)
# Dynamo's words for functions unknown to it; everything else that stops it is the model's code.
_DISABLED = "torch.compiler.disable()"
_FOREIGN = (
    _DISABLED,
    "likely a C extension",
    "no fake impl registered",  # of an op, so that nothing says which shapes it returns
    "does not support running with fake tensors",
)
_COMPILED = "trace a dynamo-optimized function"  # torch's words for what torch.compile made
_COMPILED_CALL = "_compiled_call_impl"  # of a module whose method `compile` was called
_keys = map(str, itertools.count())  # ints would be symbols, where Dynamo traces again


@dataclass
class _Standing:
    """What a trace needs of a module that has a stand-in."""

    module: nn.Module
    original: Forward
    stand_in: Forward
    compiled: bool  # by its method `compile`? It is called in the place of `forward` then
    lasting: dict[str, Tensor]  # parameters and buffers
    attributes: Attributes  # plain ones of its modules
    entered: bool = False


_standing: dict[str, _Standing] = {}  # by key, during a trace


@torch._dynamo.allow_in_graph
def _entered(key: str, kind: str, named: dict[str, Tensor], args: Any, kwargs: Any) -> Any:
    """(Dynamo guards the `kind`.)"""
    one = _standing[key]
    tensors = [*tree_leaves((args, kwargs)), *named.values()]
    if not any(isinstance(t, (FunctionalTensor, FakeTensor)) for t in tensors):
        return one.original(*args, **kwargs)
    one.entered = True
    for owner, name, _ in one.attributes:
        if isinstance(owner[name], FunctionalTensor) and owner[name]._version:
            raise CaptureError(f"it has a tensor {name!r}, which the model changes")
    with placed(one.attributes):  # where a trace may have put others
        function = _Original(key, one.compiled)
        return called(one.module, function, one.lasting, named, args, kwargs, one.original)


class _Watch:
    """`kind` tells what opaque modules consist of, which no trace sees. Another makes a new trace;
    attributes that change do not, for an op runs the module as it is."""

    def __init__(self) -> None:
        self.kind = ""
        self._kinds: dict[Any, tuple[str, Any]] = {}

    def look(self, modules: Iterable[nn.Module]) -> None:
        members = [members_of(each) for each in modules]
        parts = [each for one in members for each in one.modules]
        forwards = [vars(each).get("forward") for each in parts]
        found = (
            tuple([id(type(each)) for each in parts]),
            tuple(map(id, forwards)),
            tuple([_switches_of(each) for each in parts]),
            tuple([tuple(hooks_of(each)) for each in members]),
        )
        # What is described by its id is kept, so that ids stay unique.
        self.kind, _ = self._kinds.setdefault(found, (str(len(self._kinds)), forwards))


def _switches_of(module: nn.Module) -> tuple[Any, ...]:
    switches, others = vars(module).items(), INTERNAL | settled_by(module)
    return tuple([item for item in switches if type(item[1]) is bool and item[0] not in others])


@dataclass(frozen=True)
class _Original:
    """The forward that a module has without its stand-in, as a function of the module."""

    key: str
    compiled: bool

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        standing = _standing.get(self.key)
        if standing is None:
            compiled = vars(module).get(_COMPILED_CALL) if self.compiled else None
            return (compiled or module.forward)(*args, **kwargs)
        if not self.compiled:
            return standing.original(*args, **kwargs)
        del vars(module)["forward"]  # which the compiled code calls
        try:
            return standing.original(*args, **kwargs)
        finally:
            vars(module)["forward"] = standing.stand_in


class Opaques:
    """The modules of a model that no trace enters: those that are known, and those that could not
    be traced, with the reasons."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._forwards: dict[nn.Module, tuple[str, Forward, bool]] = {}
        self._watch = _Watch()
        self._reasons: dict[nn.Module, str] = {}
        self._entered: dict[nn.Module, None] = {}
        for module in model.modules():
            if module is not model and known_of(module) is not None:
                self._stand_in_for(module, compiled=False)

    @property
    def reasons(self) -> list[str]:
        """Those of the modules that run."""
        return [reason for module, reason in self._reasons.items() if module in self._entered]

    def traced(self, trace: Callable[[], T]) -> T:
        """Return what `trace` returns, which traces the model. A module that cannot be traced is
        opaque from then on."""
        begin_trace()
        told, before = self.reasons, len(self._reasons)
        while True:
            try:
                with self._standing_in():
                    traced = trace()
                    self._note_entered()
                if fresh := [reason for reason in self.reasons if reason not in told]:
                    named = "; ".join(_summed(fresh))
                    what = f"overlapc runs as one op, by its own autograd, {named}"
                    warn(what)
                return traced
            except CaptureError as error:
                found = _entered_last(self._model, error, self._forwards)
                if not found:
                    if reasons := list(self._reasons.values())[before:]:
                        raise _after(reasons, error) from error
                    raise
                cause = _reason_of(error)
                own = _by_dynamo(error) or cause is None
                reason = error.reason if own or cause is None else said_of(cause)
                compiled = _COMPILED in reason
                if compiled:
                    reason = "it runs what torch.compile made"
                for module in found:
                    self._add(module, reason.strip().splitlines()[0], compiled)

    def refuse_changes(
        self, tensors: Iterable[Tensor], objects: Collection[int | str] = ()
    ) -> None:
        """While modules are traced, raise if an opaque one may read, beside its parameters and
        buffers, a tensor that the model changes, an object with one of these ids or a global with
        one of these names: it would not see the change."""
        changed = [memory_of(tensor) for tensor in tensors]
        for module, (key, *_) in self._forwards.items() if changed or objects else ():
            if known_of(module) is not None:  # it reads what it is given
                continue
            own = [at for each in module.modules() for at in (each._parameters, each._buffers)]
            found = Reached([module, _standing[key].original], own)
            read = [memory_of(o) for o in found.objects.values() if is_a(o, (Tensor, np.ndarray))]
            names = {name for _, each in found.globals.values() for name in each}
            for what, is_read in (
                ("a tensor", any(_overlap(one, other) for one in read for other in changed)),
                ("an object", not (found.objects.keys() | names).isdisjoint(objects)),
            ):
                if is_read:
                    name = type(module).__name__
                    raise CaptureError(
                        f"a {name}, which runs as one op, may read {what} that the model changes; "
                        "expected its own parameters and buffers alone"
                    )

    @contextlib.contextmanager
    def _standing_in(self) -> Iterator[None]:
        self._watch.look(self._forwards)
        with contextlib.ExitStack() as stack:
            for module, each in self._forwards.items():
                stack.enter_context(_stood_in(module, *each))
            yield

    def _note_entered(self) -> None:
        for module, (key, *_) in self._forwards.items():
            if _standing[key].entered:
                self._entered[module] = None

    def _add(self, module: nn.Module, reason: str, compiled: bool) -> None:
        members = Members([module], [""], [], [])
        compiled &= bool(vars(module).get(_COMPILED_CALL)) and not any(hooks_of(members))
        self._stand_in_for(module, compiled)
        name = next(name for name, each in self._model.named_modules() if each is module)
        self._reasons[module] = f"{name} ({type(module).__name__}): {reason}"

    def _stand_in_for(self, module: nn.Module, compiled: bool) -> None:
        key = next(_keys)
        self._forwards[module] = key, _forward_of(module, key, self._watch), compiled


def _summed(reasons: list[str]) -> list[str]:
    """The reasons, those that differ in the module's name alone as one."""
    names: dict[tuple[str, str], list[str]] = {}
    for reason in reasons:
        (name, _, kind), why = reason.partition(": ")[0].partition(" "), reason.partition(": ")[2]
        names.setdefault((kind, why), []).append(name)
    return [
        f"{first} {kind}{f' and {len(others)} more' if others else ''}: {why}"
        for (kind, why), (first, *others) in names.items()
    ]


def _overlap(one: tuple[int, int], other: tuple[int, int]) -> bool:
    return one[0] < other[1] and other[0] < one[1]


def _after(reasons: list[str], error: CaptureError) -> CaptureError:
    """The error of a trace, with the reasons for which modules had been made opaque."""
    why = "; ".join(reasons)
    return CaptureError(f"no trace enters {why}; nor does it run as one op: {error.reason}")


def _forward_of(module: nn.Module, key: str, watch: _Watch) -> Forward:
    def forward(*args: Any, **kwargs: Any) -> Any:
        return _entered(key, watch.kind, tensors_of(module), args, kwargs)

    return forward


@contextlib.contextmanager
def _stood_in(module: nn.Module, key: str, forward: Forward, compiled: bool) -> Iterator[None]:
    names = ("forward", _COMPILED_CALL) if compiled else ("forward",)
    own = {name: vars(module).get(name) for name in names}
    attributes = [
        (vars(each), name, value)
        for each in module.modules()
        for name, value in vars(each).items()
        if isinstance(value, Tensor)
    ]
    lasting = tensors_of(module)
    original = own[_COMPILED_CALL] if compiled else module.forward
    assert original is not None
    _standing[key] = _Standing(module, original, forward, compiled, lasting, attributes)
    vars(module).update(dict.fromkeys(names), forward=forward)
    try:
        yield
    finally:
        del _standing[key]
        for name, value in own.items():
            del vars(module)[name]
            if value is not None:
                vars(module)[name] = value


@contextlib.contextmanager
def placed(attributes: Attributes) -> Iterator[None]:
    """While the block runs, modules have these attributes."""
    before = [(owner, name, owner[name]) for owner, name, _ in attributes]
    for owner, name, value in attributes:
        owner[name] = value
    try:
        yield
    finally:
        for owner, name, value in before:
            owner[name] = value


def _entered_last(
    model: nn.Module, error: CaptureError, known: Collection[nn.Module]
) -> list[nn.Module]:
    """The innermost module that was running when the error came up, if it is a small part of the
    model and is not `known`. From Dynamo only its code is known, which several modules may share.
    Where Dynamo's graph is traced, the node that runs names the module."""
    foreign = not _by_dynamo(error) or any(words in error.reason for words in _FOREIGN)
    if isinstance(_reason_of(error), _OF_VALUES) or not foreign:
        return []
    named = dict(model.named_modules(remove_duplicate=False))
    counts = {each: sum(p.numel() for p in each.parameters()) for each in named.values()}
    cause: BaseException | None = error
    in_graph = isinstance(error.__cause__, BackendCompilerFailed)
    found: list[nn.Module] = []
    while cause is not None:
        step = cause.__traceback__
        while step is not None:
            running = step.tb_frame.f_locals.get("self")
            if isinstance(running, nn.Module) and running in counts:
                found = [running]
            elif in_graph and isinstance(node := step.tb_frame.f_locals.get("node"), fx.Node):
                found = [module for name, module in named.items() if name == module_of(node)]
            step = step.tb_next
        for frame in getattr(cause, "real_stack", None) or ():
            found = [module for module in counts if _runs(module, frame)] or found
        cause = cause.__cause__
    if _DISABLED in error.reason:  # a function that is called in the last frame: a forward?
        disabled = [module for module in counts if _is_disabled(module, error.reason)]
        found = [module for module in disabled if module not in known] or found
    small = [module for module in found if 2 * counts[module] <= counts[model]]
    return [module for module in small if module not in known]


def _is_disabled(module: nn.Module, reason: str) -> bool:
    """Whether this module's forward is the disabled function that Dynamo names."""
    disabled = getattr(module.forward, "_torchdynamo_disable", False)
    name = re.escape(module.forward.__qualname__) if disabled else ""
    return disabled and re.search(rf"<function {name}(>| at )", reason) is not None


def _reason_of(error: CaptureError) -> BaseException | None:
    cause = error.__cause__
    return cause.inner_exception if isinstance(cause, BackendCompilerFailed) else cause


def _by_dynamo(error: CaptureError) -> bool:
    return hasattr(_reason_of(error), "real_stack")


def _runs(module: nn.Module, frame: traceback.FrameSummary) -> bool:
    code = getattr(module.forward, "__code__", None)
    if code is None or (code.co_filename, code.co_name) != (frame.filename, frame.name):
        return False
    return any(line == frame.lineno for *_, line in code.co_lines())
