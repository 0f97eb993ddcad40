from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..kernels import GatherFunction, GroupedFunction, How, LinearFunction, NormFunction
from ._common import WeightGradStore
from .base import TransformerEngineBaseModule


class Linear(TransformerEngineBaseModule):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Any = None,
        rng_tracker_name: str | None = None,
        init_method: Any = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        parameters_split: Any = None,
        device: Any = "cuda",
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        save_original_input: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__()
        self.name = name
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.return_bias, self.use_bias = return_bias, bias
        self.apply_bias = bias and not return_bias
        self.wgrad_store = WeightGradStore(delay_wgrad_compute, ub_bulk_wgrad)
        self.set_tensor_parallel_group(tp_group)
        self.tp_size, self.parallel_mode = tp_size, parallel_mode
        self.sequence_parallel = tp_size > 1 and sequence_parallel
        if parallel_mode == "column":
            out_features //= tp_size
        elif parallel_mode == "row":
            in_features //= tp_size
        self.in_features, self.out_features = in_features, out_features
        self.weight: Any = nn.Parameter(torch.empty(out_features, in_features, dtype=params_dtype))
        if init_method is not None:
            init_method(self.weight)
        if parallel_mode is not None:
            self.weight.tensor_model_parallel = True
            self.weight.partition_dim = int(parallel_mode == "row")
            self.weight.partition_stride = 1
        self.bias: Any = torch.Tensor()
        if bias:
            self.bias = nn.Parameter(torch.zeros(out_features, dtype=params_dtype))
            if parallel_mode == "row":
                self.bias.sequence_parallel = self.sequence_parallel
            elif parallel_mode == "column":
                self.bias.tensor_model_parallel, self.bias.partition_dim = True, 0

    def forward(
        self,
        inp: Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool | None = False,
        fp8_grad: bool | None = False,
    ) -> Any:
        return self.multiplied(self.enter(inp))

    def multiplied(self, given: Tensor) -> Any:
        how = How(
            self.parallel_mode,
            self.tp_group,
            self.tp_size,
            self.sequence_parallel,
            self.fuse_wgrad_accumulation,
            self.wgrad_store,
        )
        bias = self.bias if self.apply_bias else None
        out = LinearFunction.apply(self.weight, given, bias, how)
        return (out, self.bias) if self.return_bias else out


class LayerNormLinear(Linear):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Any = None,
        init_method: Any = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        parameters_split: Any = None,
        zero_centered_gamma: bool = False,
        device: Any = "cuda",
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(
            in_features,
            out_features,
            sequence_parallel,
            fuse_wgrad_accumulation,
            tp_group,
            tp_size,
            init_method=init_method,
            bias=bias,
            return_bias=return_bias,
            params_dtype=params_dtype,
            parallel_mode=parallel_mode,
            delay_wgrad_compute=delay_wgrad_compute,
            name=name,
        )
        self.eps, self.normalization = eps, normalization
        self.return_layernorm_output = return_layernorm_output
        self.return_layernorm_output_gathered = return_layernorm_output_gathered
        self.zero_centered_gamma = zero_centered_gamma
        centred = normalization == "LayerNorm"
        self.layer_norm_weight: Any = nn.Parameter(torch.ones(in_features, dtype=params_dtype))
        self.layer_norm_bias: Any = None
        if centred:
            self.layer_norm_bias = nn.Parameter(torch.zeros(in_features, dtype=params_dtype))
            self.layer_norm_bias.sequence_parallel = self.sequence_parallel
        self.layer_norm_weight.sequence_parallel = self.sequence_parallel

    def forward(
        self,
        inp: Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool | None = False,
        fp8_grad: bool | None = False,
    ) -> Any:
        given = self.enter(inp)
        normal = NormFunction.apply(given, self.layer_norm_weight, self.layer_norm_bias, self.eps)
        out = self.multiplied(normal)
        if not self.return_layernorm_output:
            return out
        if self.return_layernorm_output_gathered and self.sequence_parallel:
            normal = GatherFunction.apply(normal, self.tp_group)
        return (*out, normal) if self.return_bias else (out, normal)


class LayerNormMLP(TransformerEngineBaseModule):
    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        return_bias: bool = False,
        get_rng_state_tracker: Any = None,
        tp_group: Any = None,
        tp_size: int = 1,
        init_method: Any = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        activation: str = "gelu",
        output_layer_init_method: Any = None,
        fuse_wgrad_accumulation: bool = False,
        params_dtype: torch.dtype | None = None,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        set_parallel_mode: bool = False,
        zero_centered_gamma: bool = False,
        device: Any = "cuda",
        ub_overlap_ag: bool = False,
        name: str | None = None,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
    ) -> None:
        super().__init__()
        self.name, self.eps, self.normalization = name, eps, normalization
        self.fuse_wgrad_accumulation, self.use_bias = fuse_wgrad_accumulation, bias
        self.activation, self.return_bias = activation, return_bias
        self.set_tensor_parallel_group(tp_group)
        self.tp_size, self.set_parallel_mode = tp_size, set_parallel_mode
        self.sequence_parallel = tp_size > 1 and sequence_parallel
        self.wgrad_store = WeightGradStore(delay_wgrad_compute, ub_bulk_wgrad)
        inner = ffn_hidden_size // (tp_size if set_parallel_mode else 1)

        def made(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, dtype=params_dtype).normal_(0, 0.05))

        self.layer_norm_weight = nn.Parameter(torch.ones(hidden_size, dtype=params_dtype))
        self.layer_norm_bias = nn.Parameter(torch.zeros(hidden_size, dtype=params_dtype))
        self.fc1_weight, self.fc1_bias = made(inner, hidden_size), made(inner)
        self.fc2_weight, self.fc2_bias = made(hidden_size, inner), made(hidden_size)

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        def how(mode: str) -> How:
            return How(
                mode if self.set_parallel_mode else None,
                self.tp_group,
                self.tp_size,
                self.sequence_parallel,
                self.fuse_wgrad_accumulation,
                None,
            )

        x = NormFunction.apply(
            self.enter(inp), self.layer_norm_weight, self.layer_norm_bias, self.eps
        )
        x = LinearFunction.apply(self.fc1_weight, x, self.fc1_bias, how("column"))
        x = nn.functional.gelu(x)
        out: Tensor = LinearFunction.apply(self.fc2_weight, x, self.fc2_bias, how("row"))
        return out


class GroupedLinear(TransformerEngineBaseModule):
    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Any = None,
        rng_tracker_name: str | None = None,
        init_method: Any = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        device: Any = "cuda",
        ub_overlap_rs: bool = False,
        ub_overlap_ag: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
    ) -> None:
        super().__init__()
        self.num_gemms, self.in_features, self.out_features = num_gemms, in_features, out_features
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.use_bias, self.return_bias = bias, return_bias
        self.apply_bias = bias and not return_bias
        self.wgrad_store = WeightGradStore(delay_wgrad_compute)
        for i in range(num_gemms):
            weight = nn.Parameter(torch.empty(out_features, in_features, dtype=params_dtype))
            if init_method is not None:
                init_method(weight)
            self.register_parameter(f"weight{i}", weight)
            if bias:
                zeros = nn.Parameter(torch.zeros(out_features, dtype=params_dtype))
                self.register_parameter(f"bias{i}", zeros)

    def forward(self, inp: Tensor, m_splits: Any, is_first_microbatch: bool | None = None) -> Any:
        return self.multiplied(inp, m_splits)

    def multiplied(self, inp: Tensor, splits: Any) -> Any:
        assert len(splits) == self.num_gemms, "expected a split for each product"
        splits = splits.tolist() if isinstance(splits, Tensor) else list(splits)
        assert all(type(each) is int for each in splits)
        weights = [getattr(self, f"weight{i}") for i in range(self.num_gemms)]
        biases = [getattr(self, f"bias{i}") for i in range(self.num_gemms) if self.use_bias]
        given = biases if self.apply_bias else []
        out = GroupedFunction.apply(
            self.enter(inp), splits, self.fuse_wgrad_accumulation, self.num_gemms, *weights, *given
        )
        return (out, biases) if self.return_bias else out
