"""`changes` makes what Megatron fuses by `torch.compile` one op of a graph each: functions of its
modules, methods of the model's classes, and functions that modules or their configurations hold.

A fused kernel rounds less often than the ops that a trace would find in it, and no trace enters it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from overlapc.megatron.state import classes_of, members_of
from overlapc.passes.opaque import called
from overlapc.runtime.objects import answers, is_a

_UNFUSED = "_torchdynamo_orig_callable"  # torch.compile's attribute for what it was given
# Methods that count: a sum of whole numbers is the same however it is made. They are traced, since
# an op of its own may not write to its module's buffers.
_COUNTS = {"_apply_expert_bias"}


def changes(model: nn.Module, modules: Iterable[ModuleType]) -> Iterator[tuple[Any, str, Any]]:
    """For each of what is fused: who has it, as what, and what stands for it in a trace. `modules`
    are Megatron's."""
    for owner in modules:
        yield from _functions(owner)
    members = members_of(model)
    lasting = {
        each: {**dict(each.named_parameters()), **dict(each.named_buffers())}
        for each in members.modules
        if any(map(_methods, type(each).__mro__))
    }
    for kind in classes_of(members):
        for name, method in _methods(kind).items():
            counts = name in _COUNTS
            yield kind, name, getattr(method, _UNFUSED) if counts else _as_method(method, lasting)
    for each in members.modules:
        yield from _functions(each)
        if (config := vars(each).get("config")) is not None and answers(config, "__dict__"):
            yield from _functions(config)


def _functions(owner: Any) -> Iterator[tuple[Any, str, Any]]:
    for name, value in list(vars(owner).items()):
        if _is_fused(value):
            yield owner, name, _as_one_op(value)


def _methods(kind: type) -> dict[str, Callable[..., Any]]:
    """The fused ones that the class defines, but for `forward`: then the module is one op."""
    found = vars(kind).items()
    return {name: value for name, value in found if name != "forward" and _is_fused(value)}


def _is_fused(value: Any) -> bool:
    return not is_a(value, nn.Module) and answers(value, _UNFUSED)


@functools.cache
def _as_one_op(fused: Callable[..., Any]) -> Callable[..., Any]:
    """The same for the same function: Megatron compares them."""
    holder = nn.Module()

    def whole(_: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return fused(*args, **kwargs)

    def run(*args: Any, **kwargs: Any) -> Any:
        return called(holder, whole, {}, {}, args, kwargs)

    return run


def _as_method(
    fused: Callable[..., Any], lasting: Mapping[nn.Module, Mapping[str, Tensor]]
) -> Callable[..., Any]:
    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        named = dict(self.named_parameters())
        return called(self, fused, lasting[self], named, args, kwargs)

    return run
