"""`reason` names the feature for which overlapc leaves a model to Megatron."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from overlapc.core.errors import OptionError
from overlapc.runtime.slicing.auto import SLICES
from overlapc.state.module_state import hooks_of_all

_DDP = "megatron.core.distributed"
_OFF: tuple[Any, ...] = (None, False, 0, "none", "", (), [])


@dataclass(frozen=True)
class _Feature:
    """A feature, the settings of Megatron's configs that turn it on, and why a planned chunk cannot
    have it."""

    name: str
    why: str
    fields: tuple[str, ...] = ()
    wrappers: tuple[str, ...] = ()  # wrapper classes of the model that also show it
    sizes: tuple[str, ...] = ()  # settings that turn it on from 2
    values: tuple[tuple[str, Any], ...] = ()  # settings that turn it on by one of their values


_FEATURES = (
    _Feature(
        "FP8 and FP4 recipes",
        "their kernels keep scales from step to step, which a captured graph would freeze",
        ("fp8", "fp4", "quant_recipe"),
    ),
    _Feature(
        "CUDA graphs",
        "they replay the order of ops that a plan changes",
        ("enable_cuda_graph", "external_cuda_graph", "cuda_graph_impl"),
    ),
    _Feature(
        "Megatron-FSDP and FSDP2",
        "their hooks gather and free parameters around modules that no longer run one by one",
        ("use_megatron_fsdp", "use_custom_fsdp"),
        ("FullyShardedDataParallel", "TorchFullyShardedDataParallel", "MegatronFSDP"),
    ),
    _Feature(
        "CPU offloading of activations",
        "what is kept, and where, is the plan's",
        ("cpu_offloading",),
    ),
    _Feature(
        "fine-grained offloading of activations",
        "what is kept, and where, is the plan's",
        ("fine_grained_activation_offloading", "moe_paged_stash"),
    ),
    _Feature(
        "hybrid context parallelism",
        "each microbatch has another group of ranks, and a graph has one",
        ("hybrid_context_parallel",),
    ),
    _Feature(
        "NCCL EP",
        "its kernels write to buffers that all layers share, and a plan changes the layers' order; "
        "expected another --moe-flex-dispatcher-backend",
        values=(("moe_flex_dispatcher_backend", "ncclep"),),
    ),
    _Feature(
        "a budget of tokens for each rank of experts",
        "what is over it is noted in a tensor of the dispatcher, also when a plan runs it again",
        ("moe_expert_rank_capacity_factor",),
    ),
    _Feature(
        "the op fuser of Transformer Engine",
        "it fuses several layers into kernels that no trace enters, and that are not known",
        ("use_transformer_engine_op_fuser",),
    ),
    _Feature(
        "userbuffers",
        "they communicate inside of kernels, where no plan can hide it",
        ("tp_comm_overlap",),
    ),
    _Feature(
        "weights in shards (generalized tensor parallelism)",
        "weights reduce their gradients themselves, and a planned chunk gives theirs to DDP",
        sizes=("gtp_weight_remat_size", "expert_gtp_weight_remat_size"),
    ),
    _Feature(
        "weight gradients of experts beside their dispatch",
        "Megatron runs them from a hook that a planned chunk does not call; leave it out to have "
        "overlapc hide the all-to-alls",
        ("overlap_dispatch_backward_with_experts_wgrad",),
    ),
    _Feature(
        "combined 1F1B of expert parallelism",
        "it goes round the forward of the model, whose place a planned chunk takes; leave it out "
        "to have overlapc hide the all-to-alls",
        ("overlap_moe_expert_parallel_comm", "delay_wgrad_compute"),
    ),
    _Feature(
        "deferred weight gradients of the embedding",
        "the model's forward lays activations by for them in a list",
        ("defer_embedding_wgrad_compute",),
    ),
)


def slices_of(asked: Any, config: Any, batch: int | None) -> tuple[int, ...]:
    """The numbers of slices that a microbatch of so many samples may run in. OptionError if it
    cannot run in those that were asked for."""
    if asked == 1:
        return (1,)
    why = _sees_whole_microbatch(config)
    if asked == "auto":
        return (1,) if why else tuple(n for n in SLICES if not batch or batch % n == 0)
    if why:
        raise OptionError(f"slices={asked}: {why}; expected it off, or slices left out")
    if batch and batch % asked:
        raise OptionError(
            f"slices={asked}: found --micro-batch-size {batch}; expected a multiple of {asked}, as "
            "each microbatch is cut along its samples"
        )
    return (asked,)


def _sees_whole_microbatch(config: Any) -> str:
    """The setting of the model with which a slice would give something else than its part of the
    microbatch; the comparison before the first step could miss that. "" if there is none."""
    if getattr(config, "num_moe_experts", None):
        if getattr(config, "moe_expert_capacity_factor", None) is not None:
            return (
                "found --moe-expert-capacity-factor, with which experts drop other tokens of a "
                "slice than of the whole microbatch"
            )
        kinds, scale = config.moe_router_load_balancing_type, config.moe_aux_loss_coeff
        kinds = kinds if isinstance(kinds, (list, tuple)) else [kinds]
        scales = scale if isinstance(scale, (list, tuple)) else [scale] * len(kinds)
        for kind, coefficient in zip(kinds, scales, strict=True):
            if kind == "seq_aux_loss" and coefficient and config.calculate_per_token_loss:
                return (
                    "found --moe-router-load-balancing-type seq_aux_loss with "
                    "--calculate-per-token-loss, which counts more in small microbatches"
                )
            if kind == "sinkhorn" or (kind in ("aux_loss", "global_aux_loss") and coefficient):
                return (
                    f"found --moe-router-load-balancing-type {kind}, which balances the whole "
                    "microbatch; seq_aux_loss balances each sample"
                )
    if getattr(config, "mtp_num_layers", None):
        return (
            "found --mtp-num-layers: its loss is a mean over the counted tokens of the microbatch"
        )
    return ""


def reason(model: Any) -> str:
    """Say why a model chunk, as passed to a schedule, must run as plain Megatron; "" if it need
    not."""
    around = list(_wrapped(model))
    inner = around[-1]
    configs = [inner.config, *(getattr(each, "ddp_config", None) for each in around)]
    wrappers = {kind.__name__ for each in around[:-1] for kind in type(each).__mro__}
    for feature in _FEATURES:
        found = [
            f"{name}={getattr(config, name)!r}"
            for config in configs
            for name in feature.fields + feature.sizes
            if (value := getattr(config, name, None)) not in _OFF
            and not (name in feature.sizes and value == 1)
        ]
        found += [
            f"{name}={value!r}"
            for config in configs
            for name, value in feature.values
            if getattr(config, name, None) == value
        ] + sorted(wrappers.intersection(feature.wrappers))
        if found:
            return f"{feature.name} ({', '.join(found)}): {feature.why}"
    if any(isinstance(each, DistributedDataParallel) for each in around):
        return (
            "torch's DistributedDataParallel: it reduces gradients from hooks on autograd's nodes, "
            "which a planned chunk does not run; Megatron's own is served"
        )
    hook = next(foreign_hooks(inner), "")
    return hook and (
        f"a hook that is not Megatron's ({hook}): modules no longer run one by one, nor do "
        "gradients come in autograd's order"
    )


def _wrapped(model: Any) -> Iterator[Any]:
    """The model and the modules that it wraps, down to the one whose forward is replaced."""
    yield model
    while hasattr(model, "module"):
        model = model.module
        yield model


def foreign_hooks(model: Any) -> Iterator[str]:
    """The names of hooks on modules and parameters that are not Megatron's data parallelism's. A
    hook on a gradient runs when that is delivered, in the plan's order: Megatron's and Bridge's
    read nothing else, and add the gradients of adapters up over ranks."""
    kinds = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    for kind, on_all in hooks_of_all().items():
        yield from _named(on_all, f"all modules' {kind.removeprefix('_global_')}")
    for path, module in model.named_modules():
        for kind in kinds:
            yield from _named(getattr(module, kind), f"{path or 'model'}.{kind.strip('_')}")
    for path, parameter in model.named_parameters():
        for kind, own in (("_backward_hooks", "megatron"), ("_post_accumulate_grad_hooks", _DDP)):
            hooks: Mapping[int, Any] | None = getattr(parameter, kind, None)
            yield from _named(hooks or {}, f"{path}.{kind.strip('_')}", own)


def _named(hooks: Mapping[int, Any], where: str, own: str = _DDP) -> Iterator[str]:
    for hook in hooks.values():
        function = inspect.unwrap(getattr(hook, "func", hook))  # of a functools.partial
        module = getattr(function, "__module__", None) or type(function).__module__
        if not f"{module}.".startswith(f"{own}."):
            name = getattr(function, "__qualname__", type(function).__qualname__)
            yield f"{module}.{name} in {where}"
