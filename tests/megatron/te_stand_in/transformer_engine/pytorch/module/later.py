"""What release 2.18 has otherwise than 2.9: more arguments, attributes that are set past
`nn.Module`, and sizes of experts as a tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..attention import dot_product_attention as attention
from . import base, linears


class TransformerEngineBaseModule(base.TransformerEngineBaseModule):
    def fast_setattr(self, name: str, value: Any) -> None:
        self.__dict__[name] = value

    def enter(self, inp: Tensor) -> Tensor:
        self.fast_setattr("forwarded_at_least_once", True)
        self.fast_setattr("allow_different_data_and_param_types", False)
        if self.activation_dtype != inp.dtype:
            self.fast_setattr("activation_dtype", inp.dtype)
        fp8 = base.FP8GlobalStateManager
        self.fast_setattr("fp8_parameters", fp8.with_fp8_parameters())
        self.fast_setattr("fp8", fp8.is_fp8_enabled())
        self.fast_setattr("fp8_calibration", fp8.is_fp8_calibration())
        self.fp8_meta["fp8_checkpoint"] = self.fp8 or self.fp8_calibration
        self.fast_setattr("fp8_initialized", False)
        return inp if inp.is_contiguous() else inp.contiguous()

    def need_backward_dw(self) -> bool:
        return self.wgrad_store is not None and self.wgrad_store.delay_wgrad_compute()


class Linear(TransformerEngineBaseModule, linears.Linear): ...


class LayerNormLinear(TransformerEngineBaseModule, linears.LayerNormLinear): ...


class LayerNormMLP(TransformerEngineBaseModule, linears.LayerNormMLP):
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
        activation_params: Any = None,
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
        checkpoint: bool | None = False,
    ) -> None:
        super().__init__(
            hidden_size,
            ffn_hidden_size,
            eps,
            sequence_parallel,
            tp_group=tp_group,
            tp_size=tp_size,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            params_dtype=params_dtype,
            set_parallel_mode=set_parallel_mode,
        )
        self.checkpoint, self.activation_params = checkpoint, activation_params


class GroupedLinear(TransformerEngineBaseModule, linears.GroupedLinear):
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
        single_grouped_weight: bool = False,
        single_grouped_bias: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__(
            num_gemms,
            in_features,
            out_features,
            sequence_parallel,
            fuse_wgrad_accumulation,
            init_method=init_method,
            bias=bias,
            return_bias=return_bias,
            params_dtype=params_dtype,
            parallel_mode=parallel_mode,
            delay_wgrad_compute=delay_wgrad_compute,
        )
        self.single_grouped_weight = single_grouped_weight
        self.single_grouped_bias = single_grouped_bias

    def forward(
        self,
        inp: Tensor,
        m_splits: Any,
        is_first_microbatch: bool | None = None,
        out: Tensor | None = None,
        dgrad_out: Tensor | None = None,
    ) -> Any:
        if not isinstance(m_splits, Tensor):
            m_splits = torch.tensor(m_splits, dtype=torch.int64)
        return self.multiplied(inp, m_splits)


class DotProductAttention(TransformerEngineBaseModule, attention.DotProductAttention):
    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: Any,
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: Any = None,
        bottom_right_diagonal: bool | None = None,
        sequence_parallel: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker: Any = None,
        tp_group: Any = None,
        layer_number: int | None = None,
        attention_type: str = "self",
        cp_group: Any = None,
        cp_global_ranks: Any = None,
        cp_stream: Any = None,
        cp_comm_type: str = "p2p",
        softmax_scale: float | None = None,
        softmax_type: str = "vanilla",
        return_max_logit: bool | None = False,
        name: str | None = None,
    ) -> None:
        super().__init__(
            num_attention_heads,
            kv_channels,
            num_gqa_groups,
            attention_dropout,
            qkv_format,
            attn_mask_type,
            window_size,
            get_rng_state_tracker=get_rng_state_tracker,
            cp_group=cp_group,
            softmax_scale=softmax_scale,
        )
        self.bottom_right_diagonal = bottom_right_diagonal

    def forward(
        self,
        query_layer: Tensor,
        key_layer: Tensor,
        value_layer: Tensor,
        attention_mask: Any = None,
        qkv_format: str | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        cu_seqlens_q_padded: Tensor | None = None,
        cu_seqlens_kv_padded: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str | None = None,
        window_size: Any = None,
        bottom_right_diagonal: bool | None = None,
        checkpoint_core_attention: bool = False,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        fast_zero_fill: bool = True,
        inference_params: Any = None,
        pad_between_seqs: bool | None = None,
        fp8_output: bool | None = False,
        num_splits: int | None = 1,
        score_mod: Any = None,
        score_mod_bprop: Any = None,
        score_mod_tensors: Any = None,
        score_mod_bprop_tensors: Any = None,
    ) -> Tensor:
        layers = query_layer, key_layer, value_layer
        if qkv_format != "thd":
            return self.attended(*layers)
        return self.packed(*layers, cu_seqlens_q, cu_seqlens_q_padded, max_seqlen_q)
