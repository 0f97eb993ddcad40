"""A stand-in for DeepEP on CPU and gloo, for tests alone: names and signatures of its `Buffer` and
`HybridEPBuffer` (held against DeepEP's own sources by `stand_in_sources.py`), what they return, and
a handle that their backward reads. Like DeepEP's, its kernels ask for the addresses of tensors."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .utils import EventOverlap


class Config:
    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return hidden_bytes * num_ranks

    get_rdma_buffer_size_hint = get_nvl_buffer_size_hint


class _Sent:
    """Which of a rank's tokens went to which rank, and how many came from each."""

    def __init__(self, group: Any, sent: Tensor) -> None:
        self.group, self.sent = group, sent
        counts = sent.sum(0)
        came = torch.empty_like(counts)
        dist.all_to_all_single(came, counts, group=group)
        self.went, self.came = counts.tolist(), came.tolist()

    def out(self, rows: Tensor) -> Tensor:
        rows.data_ptr()
        given = torch.cat([rows[to] for to in self.sent.t()])
        made = given.new_empty(sum(self.came), *rows.shape[1:])
        dist.all_to_all_single(made, given, self.came, self.went, group=self.group)
        return made

    def back(self, rows: Tensor) -> Tensor:
        rows.data_ptr()
        made = rows.new_empty(sum(self.went), *rows.shape[1:])
        dist.all_to_all_single(made, rows.contiguous(), self.went, self.came, group=self.group)
        total = made.new_zeros(len(self.sent), *rows.shape[1:], dtype=torch.float32)
        for to, part in zip(self.sent.t(), made.split(self.went), strict=True):
            total[to] += part.float()
        return total.to(rows.dtype)


class Buffer:
    num_sms = 20

    def __init__(
        self,
        group: Any,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
    ) -> None:
        self.group = group
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        Buffer.num_sms = new_num_sms

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        return Config()

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(
        self,
        topk_idx: Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, None, Tensor, Tensor, EventOverlap]:
        ranks = self.group.size()
        chosen = _chosen(topk_idx, num_experts)
        sent = chosen.view(-1, ranks, num_experts // ranks).any(-1)
        return sent.sum(0), None, chosen.sum(0), sent, EventOverlap()

    def dispatch(
        self,
        x: Tensor,
        handle: tuple[Any, ...] | None = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Any, ...]:
        if handle is not None:
            return handle[0].out(x), None, None, None, None, EventOverlap()
        assert is_token_in_rank is not None
        assert num_tokens_per_expert is not None
        assert topk_idx is not None
        assert topk_weights is not None
        assert topk_weights.dtype == torch.float32
        sent, own = _Sent(self.group, is_token_in_rank), len(num_tokens_per_expert)
        own //= self.group.size()
        chosen = sent.out(topk_idx) - self.group.rank() * own
        weights = sent.out(topk_weights)
        away = (chosen < 0) | (chosen >= own)
        chosen, weights = chosen.masked_fill(away, -1), weights.masked_fill(away, 0.0)
        counts = _chosen(chosen, own).sum(0).tolist()
        return sent.out(x), chosen, weights, counts, (sent,), EventOverlap()

    def combine(
        self,
        x: Tensor,
        handle: tuple[Any, ...],
        topk_weights: Tensor | None = None,
        bias: Tensor | None = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        weights = None if topk_weights is None else handle[0].back(topk_weights)
        return handle[0].back(x), weights, EventOverlap()


def _chosen(topk_idx: Tensor, experts: int) -> Tensor:
    """[tokens, experts]: which are chosen; -1 chooses none."""
    found = torch.zeros(len(topk_idx), experts + 1, dtype=torch.long)
    return found.scatter(1, topk_idx.where(topk_idx >= 0, experts), 1)[:, :experts]


class HybridEPBuffer:
    def __init__(
        self,
        group: Any,
        hidden_dim: int,
        max_num_of_tokens_per_rank: int,
        num_local_experts: int,
        use_fp8: bool = False,
        num_sms_dispatch_api: int | None = None,
        num_sms_combine_api: int | None = None,
        num_sms_preprocessing_api: int | None = None,
        num_blocks_permute: int | None = None,
        num_blocks_unpermute: int | None = None,
    ) -> None:
        self.group = group

    def dispatch_with_permute(
        self,
        *,
        hidden: Tensor,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        num_of_experts_per_rank: int | None = None,
        num_of_experts: int | None = None,
        use_fp8: bool | None = None,
        routing_map: Tensor | None = None,
        probs: Tensor | None = None,
        scaling_factor: Tensor | None = None,
        num_permuted_tokens: Any = None,
        pad_multiple: int | None = None,
        handle: tuple[Any, ...] | None = None,
        non_blocking: bool = False,
        num_dispatched_tokens: Any = None,
        use_host_meta: bool | None = None,
    ) -> tuple[Any, ...]:
        if handle is not None:
            sent, rows, _, counts, *_ = handle
            return sent.out(hidden)[rows], None, None, counts, handle
        assert routing_map is not None
        assert routing_map.dtype == torch.bool
        assert probs is not None
        own, ranks = num_of_experts_per_rank or 1, self.group.size()
        sent = _Sent(self.group, routing_map.view(-1, ranks, own).any(-1))
        mine = slice(self.group.rank() * own, (self.group.rank() + 1) * own)
        came, weights = sent.out(routing_map.long())[:, mine], sent.out(probs)[:, mine]
        experts, rows = came.t().nonzero(as_tuple=True)
        made, counts = sent.out(hidden)[rows], came.sum(0)
        flag = torch.zeros(1, dtype=torch.int32)
        return made, weights[rows, experts], None, counts, (sent, rows, experts, counts, own, flag)

    def combine_with_unpermute(
        self,
        *,
        hidden: Tensor,
        probs: Tensor | None = None,
        handle: tuple[Any, ...] | None = None,
        pad_multiple: int | None = None,
        num_dispatched_tokens: Any = None,
    ) -> tuple[Tensor, Tensor | None]:
        assert handle is not None
        sent, rows, experts, _, own, _ = handle
        count = sum(sent.came)
        summed = hidden.new_zeros(count, hidden.shape[1], dtype=torch.float32)
        summed = summed.index_add(0, rows, hidden.float()).to(hidden.dtype)
        if probs is None:
            return sent.back(summed), None
        weights = probs.new_zeros(count, own * self.group.size())
        weights[rows, experts + self.group.rank() * own] = probs
        return sent.back(summed), sent.back(weights)
