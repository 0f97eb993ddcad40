"""`refuse_megatron` raises for Megatron's models, and points to `overlapc.megatron`."""

from __future__ import annotations

from torch import nn

from overlapc.errors import OptionError

_MODELS = ("megatron.core.models.", "megatron.core.transformer.", "megatron.core.ssm.")


def refuse_megatron(door: str, model: nn.Module) -> None:
    """Raise for a model with layers of Megatron's: these share scratch memory, caches and random
    streams, at which Dynamo's graphs break or which they do not see."""
    for name, module in model.named_modules():
        for kind in type(module).__mro__:
            if kind.__module__.startswith(_MODELS):
                where = f" ({name})" if name else ""
                raise OptionError(
                    f"{door} was given Megatron's {kind.__name__}{where}, which shares scratch "
                    "memory and random streams between layers; expected it in Megatron's own "
                    "training loop: call overlapc.megatron.patch() before the first step, as "
                    "docs/megatron.md shows"
                )
