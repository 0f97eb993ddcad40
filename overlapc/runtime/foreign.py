"""Models that a front door does not plan: `refuse_foreign` says what to pass instead, `unmade`
finds those whose parameters the first call makes. And front doors that an outer `torch.compile`
meets: `untraced` keeps it out."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import chain
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import nn
from torch._dynamo.eval_frame import OptimizedModule
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from overlapc.core.errors import CaptureError, OptionError

FIRST_CALL = "as plain PyTorch, and plans at the next"
TWIN = "_overlapc_engine"  # the slot of what `optimize` returns, beside its model's __dict__
_Door = TypeVar("_Door", bound=Callable[..., Any])
_MODELS = ("megatron.core.models.", "megatron.core.transformer.", "megatron.core.ssm.")


def untraced(door: _Door) -> _Door:
    """A function that `torch.compile` around it calls and does not trace. What the function itself
    compiles is compiled."""
    reason = "overlapc plans and runs it itself; expected torch.compile without fullgraph around it"
    kept: _Door = torch.compiler.disable(door, reason=reason)
    return kept


def refuse_foreign(door: str, model: nn.Module) -> None:
    """Raise for a scripted module, for one that is optimized already, and for a model with layers
    of Megatron's: these share scratch memory, caches and random streams, at which Dynamo's graphs
    break or which they do not see."""
    if isinstance(model, torch.jit.ScriptModule):
        raise OptionError(
            f"{door} expects a module of Python code, found a ScriptModule, which torch.compile "
            "does not trace; pass the module that it was scripted from"
        )
    if door == "optimize" and isinstance(model, DistributedDataParallel):
        raise OptionError(
            "optimize was given a DistributedDataParallel, whose forward no trace enters; expected "
            "the model inside: DistributedDataParallel(overlapc.optimize(model))"
        )
    if door == "optimize" and (how := _compiled_by(model)):
        raise OptionError(
            f"optimize was given a model that {how} compiles, so that none of it would be planned; "
            'expected the model itself: overlapc.optimize(model, backend="inductor") compiles what '
            "it plans"
        )
    for name, module in model.named_modules():
        where = f" ({name})" if name else ""
        if hasattr(type(module), TWIN):
            raise OptionError(
                f"{door} was given what overlapc.optimize returned{where}, which is optimized "
                "already; expected the model that was passed to it"
            )
        for kind in type(module).__mro__:
            if kind.__module__.startswith(_MODELS):
                raise OptionError(
                    f"{door} was given Megatron's {kind.__name__}{where}, which shares scratch "
                    "memory and random streams between layers; expected it in Megatron's own "
                    "training loop: call overlapc.megatron.patch() before the first step, or in "
                    "overlapc.megatron.TrainStep, as docs/megatron.md shows"
                )


def _compiled_by(model: nn.Module) -> str:
    """What compiles all calls of the model, or "". One that FSDP2 shards runs as it is."""
    if isinstance(model, OptimizedModule):
        return "torch.compile(model)"
    own = isinstance(model._compiled_call_impl, FunctionType) and not sharded_by(model)
    return "model.compile()" if own else ""


_SHARDING = {"torch.distributed.fsdp.": "FSDP1", "deepspeed.": "DeepSpeed"}


def sharded_by(model: nn.Module) -> str:
    """The framework that shards the model's parameters and gathers them in hooks; "" if none does.
    No graph holds what such hooks do."""
    for module in model.modules():
        for hook in module._forward_pre_hooks.values():
            if str(getattr(hook, "__module__", "")).startswith("torch.distributed.fsdp."):
                return "FSDP2"
        for kind in type(module).__mro__:
            for prefix, name in _SHARDING.items():
                # FSDP2 gives modules a class of its own, and its hooks tell it.
                if kind.__module__.startswith(prefix) and kind.__name__ != "FSDPModule":
                    return name
    return ""


def refuse_sharded(model: nn.Module) -> None:
    """Raise for a model whose step no graph holds, since hooks gather its parameters."""
    if by := sharded_by(model):
        raise CaptureError(
            f"{by} shards this model; expected each block as overlapc.optimize(block), sharded "
            "afterwards: that plans what is between gathers"
        )


def refuse_sharded_twin(twin: nn.Module, model: nn.Module) -> None:
    """Raise for what `optimize` returned if FSDP2 shards it and not the model."""
    fsdp = sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_state")
    if fsdp is None or fsdp._get_module_fsdp_state(model) is not None:
        return
    if fsdp._get_module_fsdp_state(twin) is not None:
        raise OptionError(
            "fully_shard was called on what overlapc.optimize returned; expected it on the model: "
            "fully_shard(model), then overlapc.optimize(model)"
        )


def refuse_slices(model: nn.Module, slices: int | str) -> None:
    """Raise for slices of a model that FSDP2 shards."""
    if slices != 1 and sharded_by(model) == "FSDP2":
        raise OptionError(
            f"slices={slices!r}: found a model that FSDP2 shards, whose parameters each slice "
            "would gather; expected slices left out: microbatches hide each other's gathers"
        )


def unmade(model: nn.Module) -> str:
    """Say which parameters and buffers the first call will make (those of `nn.LazyLinear`, say);
    "" if all are there. Eager draws their values; a trace would draw others."""
    named = chain(model.named_parameters(), model.named_buffers())
    names = [name for name, tensor in named if is_lazy(tensor)]
    if not names:
        return ""
    more = f" and {len(names) - 1} more" if names[1:] else ""
    return f"the first call makes {names[0]}{more}"


def refuse_unmade(door: str, model: nn.Module) -> None:
    if what := unmade(model):
        raise OptionError(
            f"{door}: {what}; expected a model that was called once, under torch.no_grad() say"
        )
