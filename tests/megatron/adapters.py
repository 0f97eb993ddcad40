"""Adapters of low rank around Megatron's linears, as Megatron-Bridge's LoRA makes them: what they
adapt is frozen."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

RANK, ALPHA = 4, 8
ADAPTED = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")


class Adapter(nn.Module):
    """linear_in -> linear_out, cut over ranks as the linear is that they adapt."""

    def __init__(self, given: int, made: int, config: Any, is_row: bool, dropout: float) -> None:
        super().__init__()
        from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

        self.is_row, self.in_parts = is_row, config.sequence_parallel
        config.sequence_parallel = False
        plain: Any = {"config": config, "init_method": nn.init.xavier_normal_, "bias": False}
        if is_row:
            first = RowParallelLinear(
                given, RANK, input_is_parallel=True, skip_bias_add=True, **plain
            )
        else:
            reduces = {"disable_grad_reduce": self.in_parts}
            first = ColumnParallelLinear(given, RANK, gather_output=True, **reduces, **plain)
        self.linear_in = first
        self.linear_out = ColumnParallelLinear(RANK, made, gather_output=is_row, **plain)
        config.sequence_parallel = self.in_parts
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        from megatron.core.tensor_parallel import scatter_to_sequence_parallel_region

        x, _ = self.linear_in(self.dropout(x))
        x, _ = self.linear_out(x)
        if self.is_row and self.in_parts:
            x = scatter_to_sequence_parallel_region(x)
        return x * (ALPHA / RANK)


class Adapted(nn.Module):
    def __init__(self, to_wrap: Any, adapter: Adapter) -> None:
        super().__init__()
        self.to_wrap, self.adapter = to_wrap, adapter

    def forward(self, x: Tensor) -> Any:
        out = self.to_wrap(x)
        bias, normal = None, x
        if len(out) == 3:
            out, bias, normal = out
        else:
            out, bias = out
            if isinstance(out, tuple):
                out, normal = out
        return out + self.adapter(normal.contiguous()).reshape(out.shape), bias


class OfExperts(nn.Module):
    """One adapter for all experts of a rank, whose gradients hooks add up over ranks."""

    def __init__(self, to_wrap: Any, group: Any) -> None:
        super().__init__()
        rows, columns = to_wrap.weight0.shape
        self.to_wrap = to_wrap
        self.linear_in = nn.Linear(columns, RANK, bias=False)
        self.linear_out = nn.Linear(RANK, rows, bias=False)
        for linear in (self.linear_in, self.linear_out):
            weight: Any = linear.weight
            weight.allreduce = False  # of experts, to Megatron
            weight.register_hook(partial(summed, group))

    def forward(self, x: Tensor, splits: Any) -> Any:
        out, bias = self.to_wrap(x, splits)
        return out + self.linear_out(self.linear_in(x)) * (ALPHA / RANK), bias


def summed(group: Any, gradient: Tensor) -> Tensor:
    dist.all_reduce(gradient, group=group)
    return gradient


summed.__module__ = "megatron.bridge.peft.utils"  # as Bridge's is


def adapt(model: nn.Module, config: Any, dropout: float) -> None:
    """Freeze a model, and give its linears adapters."""
    from megatron.core import parallel_state

    for parameter in model.parameters():
        parameter.requires_grad_(False)
    ranks = config.tensor_model_parallel_size
    for name, module in [*model.named_modules()]:
        owner, _, last = name.rpartition(".")
        if last not in ADAPTED:
            continue
        if hasattr(module, "num_gemms"):
            group = parallel_state.get_expert_model_parallel_group()
            setattr(model.get_submodule(owner), last, OfExperts(module, group))
            continue
        rows, columns = module.weight.shape
        is_row = last in ("linear_proj", "linear_fc2")
        if hasattr(module, "return_layernorm_output"):
            module.return_layernorm_output = True
            module.return_layernorm_output_gathered = config.sequence_parallel
        given, made = (columns * ranks, rows) if is_row else (columns, rows * ranks)
        adapter = Adapter(given, made, config, is_row, dropout)
        setattr(model.get_submodule(owner), last, Adapted(module, adapter))
