"""`known_of` knows the layers of Transformer Engine by name: one table for what they do in Python.

No trace enters them, since their kernels ask for the addresses of tensors. Each is one op from the
first trace on, without a search for what it might change, because this is known:

- What they set in a forward (`settles`, caches of workspaces, of dummy gradients and of the backend
  of attention) depends on the kind of their inputs, not on values. So they may run again.
- A linear that was made with `fuse_wgrad_accumulation` adds its weight's gradient to `main_grad` in
  its backward (`passes/summed.py`), which a graph runs once.
- With `delay_wgrad_compute` a linear lays that by until `backward_dw()`. It is refused.
- In FP8 they keep scales and histories of maxima from call to call. They are refused.
- With tensor parallelism they communicate within. The collectives are counted when a layer is
  tried out (`Learned.collectives`), and explain() says so.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from types import FunctionType, MethodType
from typing import Any

from torch import nn

from overlapc.core.errors import CaptureError

PACKAGE, MAMBA = "transformer_engine", "mamba_ssm"
_OF_FP8 = ("fp8", "fp8_calibration", "fp8_parameters", "primary_weights_in_fp8")
_OF_ALL = {
    *_OF_FP8,
    *("activation_dtype", "allow_different_data_and_param_types", "forwarded_at_least_once"),
    *("fp8_initialized", "fp8_meta", "fp8_meta_tensors_initialized", "_fp8_workspaces"),
    *("debug_last_iteration", "debug_enabled_in_this_iteration", "_is_fsdp2", "name"),
}
# All but the first are Megatron's.
_OF_ATTENTION = {"attention_type", "current_max_attn_logits", "kept_packed_seq_params"}
_OF_OPS = {"_fp8_metas", "_quantizers"}


@dataclass(frozen=True)
class Known:
    """What is known of a class, and of those that inherit from it."""

    name: str
    settles: frozenset[str]  # attributes that it sets in a forward, to what they were or will stay
    splits: bool = False  # it is told how many rows of its input go to each product


TABLE = {
    each.name: each
    for each in (
        Known("Linear", frozenset(_OF_ALL)),
        Known("LayerNormLinear", frozenset(_OF_ALL)),
        Known("LayerNormMLP", frozenset(_OF_ALL | {"bias_gelu_nvfusion"})),
        Known("GroupedLinear", frozenset(_OF_ALL), splits=True),
        Known("DotProductAttention", frozenset(_OF_ALL | _OF_ATTENTION)),
        Known("LayerNorm", frozenset(_OF_OPS)),
        Known("RMSNorm", frozenset(_OF_OPS)),
    )
}

# Functions of Transformer Engine, by Python module, and one of Megatron's that calls its kernels.
# What one is given and returns is all that it reads and writes, but for those that write to their
# first argument, unseen by autograd.
_FUNCTIONS = {
    f"{PACKAGE}.pytorch.attention.rope": {"apply_rotary_pos_emb"},
    f"{PACKAGE}.pytorch.cross_entropy": {"parallel_cross_entropy", "CrossEntropyFunction"},
    f"{PACKAGE}.pytorch.permutation": {
        *("moe_permute", "moe_permute_with_probs", "moe_unpermute"),
        *("moe_sort_chunks_by_index", "moe_sort_chunks_by_index_with_probs"),
    },
    f"{PACKAGE}.pytorch.router": {
        *("fused_topk_with_score_function", "fused_compute_score_for_moe_aux_loss"),
        "fused_moe_aux_loss",
    },
    f"{MAMBA}.ops.triton.ssd_combined": {"mamba_split_conv1d_scan_combined"},
    "megatron.core.transformer.moe.moe_utils": {"router_gating_linear"},
}
_WRITE_TO_FIRST = _FUNCTIONS[f"{PACKAGE}.pytorch.cross_entropy"]


def is_known(function: Any) -> bool:
    """Is this a function of Transformer Engine that may be one op?"""
    if not isinstance(function, (FunctionType, MethodType)):
        return False
    where, name = name_of(function)
    if name not in _FUNCTIONS.get(where, ()):
        return False
    names = getattr(function, "__globals__", {})
    return where.startswith((PACKAGE, MAMBA)) or names.get("te_general_gemm") is not None


def writes_to_first(function: Any) -> bool:
    return is_known(function) and name_of(function)[1] in _WRITE_TO_FIRST


def name_of(function: Any) -> tuple[str, str]:
    """(Python module, name); of an autograd Function's `apply` that of the Function."""
    owner = getattr(function, "__self__", None)
    named = owner if isinstance(owner, type) else function
    return str(getattr(named, "__module__", "")), str(getattr(named, "__name__", ""))


def known_of(module: nn.Module) -> Known | None:
    """What is known of a layer; None of a module that is not Transformer Engine's."""
    kind: Any = type(module)
    return _of_class(kind)


def settled_by(module: nn.Module) -> frozenset[str]:
    """The attributes of a module on which no trace depends, as they settle in a forward."""
    known = known_of(module)
    return frozenset() if known is None else known.settles


@cache
def _of_class(kind: Any) -> Known | None:
    for each in kind.__mro__:
        if each.__name__ in TABLE and each.__module__.partition(".")[0] in (PACKAGE, MAMBA):
            return TABLE[each.__name__]
    return None


def in_fp8(module: nn.Module) -> str:
    """The attribute by which a layer says that it runs in FP8; "" if it does not."""
    parts = (vars(each) for each in module.modules())
    return next((name for part in parts for name in _OF_FP8 if part.get(name)), "")


def refuse_unserved(module: nn.Module) -> None:
    """Raise for a layer that keeps more from call to call than a planned call may."""
    if name := in_fp8(module):
        raise CaptureError(
            f"it runs in FP8 ({name}): its kernels keep scales from step to step, which a plan "
            "that runs a layer again would change twice; expected bf16"
        )
    parts = [vars(each) for each in module.modules()]
    stores: list[Any] = [store for part in parts if (store := part.get("wgrad_store"))]
    if any(store.delay_wgrad_compute() for store in stores):
        raise CaptureError(
            "it lays weight gradients by until backward_dw() (delay_wgrad_compute), which a "
            "planned chunk does not call; expected that off"
        )
    fuses = any(part.get("fuse_wgrad_accumulation") for part in parts)
    unmarked = [
        name
        for name, parameter in module.named_parameters()
        if hasattr(parameter, "main_grad") and not hasattr(parameter, "grad_added_to_main_grad")
    ]
    if fuses and unmarked:
        raise CaptureError(
            f"it adds the gradient of {unmarked[0]} to main_grad (fuse_wgrad_accumulation), and "
            "does not say so for want of an attribute grad_added_to_main_grad; expected Megatron's "
            "DistributedDataParallel, which sets it"
        )


@contextlib.contextmanager
def restoring(module: nn.Module) -> Iterator[None]:
    """Try a layer out in the block: afterwards it has the attributes that it had. Raise for a layer
    that is not served."""
    refuse_unserved(module)
    attributes = {each: dict(vars(each)) for each in module.modules()}
    try:
        yield
        refuse_unserved(module)
    finally:
        for each, before in attributes.items():
            vars(each).clear()
            vars(each).update(before)
