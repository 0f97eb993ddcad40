"""`InPlace` has a model's own calls planned, for loops that hold the model and take no twin.

A call of the model goes to its twin, as `module.compile()` has calls go to compiled code. Its
parameters, hooks, class and state dict stay what they are.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from overlapc.api import optimize
from overlapc.core.errors import OptionError
from overlapc.planning.options import Options


class InPlace:
    """The planned calls of a model, until `restore()`."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        self.model = model
        self.options = Options.parse(options)
        self.twin: Any = optimize(model, **options)
        self.begin()

    def begin(self) -> None:
        """Have the model's calls planned; again, after `restore`, with the plans that are there."""
        if self.model._compiled_call_impl not in (None, self):
            raise OptionError(
                "the model's calls are compiled or planned already (module.compile(), or overlapc "
                "in place); expected a model whose calls are its own"
            )
        self.model._compiled_call_impl = self

    def restore(self) -> None:
        """Give the model its own calls back."""
        if self.model._compiled_call_impl is self:
            self.model._compiled_call_impl = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.model._compiled_call_impl = None
        try:
            return self.twin(*args, **kwargs)
        finally:
            self.model._compiled_call_impl = self

    def __getattr__(self, name: str) -> Any:
        """What the twin says: `graphs`, `plan`, `explain()`, `fallbacks`, `differences`."""
        if name in ("twin", "model"):
            raise AttributeError(name)
        return getattr(self.twin, name)


def in_place(model: nn.Module, **options: Any) -> InPlace:
    """Plan the calls of a model that a loop holds; those of the model in it, if it is a
    DistributedDataParallel. Called again with the same options it returns what is there."""
    inner = getattr(model, "module", model) if _is_ddp(model) else model
    found = inner._compiled_call_impl
    if isinstance(found, InPlace):
        if found.options == Options.parse(options):
            return found
        found.restore()
    return InPlace(inner, **options)


def _is_ddp(model: nn.Module) -> bool:
    return isinstance(model, nn.parallel.DistributedDataParallel)
