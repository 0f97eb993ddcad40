from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from ...kernels import AttentionFunction
from ...module.base import TransformerEngineBaseModule

# TE chooses a backend when the parameters of attention are others than the last time.
_attention_backends: dict[str, Any] = {
    "attention_params": None,
    "backend_selection_requires_update": False,
}


class DotProductAttention(TransformerEngineBaseModule):
    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: Any,
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: Any = None,
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
        return_max_logit: bool = False,
    ) -> None:
        super().__init__()
        channels = kv_channels[0] if isinstance(kv_channels, tuple) else kv_channels
        self.qkv_format, self.attn_mask_type = qkv_format, attn_mask_type
        self.attention_dropout, self.cp_group = attention_dropout, cp_group
        self.get_rng_state_tracker = get_rng_state_tracker
        self.fused_attention = FusedAttention(softmax_scale or channels**-0.5, attention_dropout)

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
        checkpoint_core_attention: bool = False,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        fast_zero_fill: bool = True,
        inference_params: Any = None,
        pad_between_seqs: bool | None = None,
        fp8_output: bool | None = False,
    ) -> Tensor:
        layers = query_layer, key_layer, value_layer
        if qkv_format != "thd":
            return self.attended(*layers)
        return self.packed(*layers, cu_seqlens_q, cu_seqlens_q_padded, max_seqlen_q)

    def packed(
        self, q: Tensor, k: Tensor, v: Tensor, ends: Any, padded: Any, longest: Any
    ) -> Tensor:
        """Each sequence by itself; what pads is zero, whatever is there."""
        lengths = [b - a for a, b in pairwise(ends.tolist())]
        starts = (ends if padded is None else padded).tolist()
        assert max(lengths) <= longest, "max_seqlen_q is not that of these sequences"
        out = q.new_zeros(q.shape[0], q.shape[1] * v.shape[2])
        for start, length in zip(starts, lengths, strict=False):
            rows = slice(start, start + length)
            alone = [each[rows].unsqueeze(1) for each in (q, k, v)]
            out = out.index_copy(
                0, torch.arange(start, start + length), self.attended(*alone).squeeze(1)
            )
        return out

    def attended(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.enter(q)
        asked = (q.dtype, tuple(q.shape), tuple(k.shape), tuple(v.shape))
        if _attention_backends["attention_params"] != asked:
            _attention_backends["attention_params"] = asked
            _attention_backends["backend_selection_requires_update"] = True
        if _attention_backends["backend_selection_requires_update"]:
            _attention_backends["use_fused_attention"] = True
            _attention_backends["backend_selection_requires_update"] = False
        if not (self.attention_dropout and self.training and self.get_rng_state_tracker):
            return self.fused_attention(q, k, v)
        with self.get_rng_state_tracker().fork():
            return self.fused_attention(q, k, v)


class FusedAttention(nn.Module):
    def __init__(self, softmax_scale: float, attention_dropout: float) -> None:
        super().__init__()
        self.softmax_scale, self.attention_dropout = softmax_scale, attention_dropout

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        drop = self.attention_dropout if self.training else 0.0
        out: Tensor = AttentionFunction.apply(q, k, v, self.softmax_scale, drop)
        return out
