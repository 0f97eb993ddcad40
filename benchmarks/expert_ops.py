"""Ops of Megatron's mixture of experts beside those of its experts: what its host has to launch.

    python benchmarks/expert_ops.py

Of megatron-core 0.16.1, as the Makefile installs it. A layer of two, four and
eight experts runs once on the CPU, dropless, with an auxiliary loss; ops that make tensors are
counted, views and allocations are not. Experts run one by one, each with as many ops, so that a
line through the three counts begins at what the router and the dispatcher have. The figures are
`expert_ops` of Megatron in `overlapc/search/frameworks/known.py`.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from tests.megatron import cpu

_FREE = {
    "view", "_unsafe_view", "t", "transpose", "permute", "unsqueeze", "squeeze", "slice", "select",
    "expand", "detach", "alias", "as_strided", "split", "split_with_sizes", "unbind", "reshape",
    "empty", "empty_like", "new_empty", "empty_strided", "_local_scalar_dense", "lift_fresh",
}  # fmt: skip
_WIDTH, _TOKENS = 64, 64


class _Counted(TorchDispatchMode):
    """Counts ops by name."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: Counter[str] = Counter()

    def __torch_dispatch__(self, op: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = op.overloadpacket.__name__
        self.ops[name] += name not in _FREE
        return op(*args, **(kwargs or {}))


def counted(experts: int) -> tuple[int, int]:
    """Count the ops of a forward and a backward of a layer with so many experts."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=1,
        hidden_size=_WIDTH,
        num_attention_heads=4,
        num_moe_experts=experts,
        moe_router_topk=2,
        moe_token_dispatcher_type="alltoall",
        moe_router_load_balancing_type="aux_loss",
        moe_aux_loss_coeff=1e-2,
        moe_ffn_hidden_size=_WIDTH,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bf16=True,
        params_dtype=torch.bfloat16,
    )
    spec = get_gpt_layer_local_spec(num_experts=experts, moe_grouped_gemm=False)
    layer = MoELayer(config, spec.submodules.mlp.submodules)
    x = torch.randn(_TOKENS, 1, _WIDTH, dtype=torch.bfloat16, requires_grad=True)
    for _ in range(2):  # the second is without what happens once
        with _Counted() as forward:
            out, _ = layer(x)
        with _Counted() as backward:
            out.float().sum().backward()
    return sum(forward.ops.values()), sum(backward.ops.values())


def main() -> None:
    cpu.use("0.16.1")
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    found = {experts: counted(experts) for experts in (2, 4, 8)}
    for experts, (forward, backward) in found.items():
        print(f"{experts} experts: {forward} ops of a forward, {backward} of a backward")
    two, four = found[2], found[4]
    beside = [few - (many - few) for few, many in zip(two, four, strict=True)]
    print(f"beside experts: {beside[0]} and {beside[1]}")


if __name__ == "__main__":
    main()
