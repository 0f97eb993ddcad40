"""This program reads arguments as Megatron-LM's own scripts read them, and prints what they say.

    python tests/megatron/parse.py FOLDER < RUNS

FOLDER is a checkout of Megatron-LM. RUNS is a JSON list of [ranks, [argument, ...]]; printed is a
JSON list with what each run has: the layout, the layers of each stage, the batch, the recompute.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import typing
from pathlib import Path
from typing import Any

# What has nothing to do with the layout, and what Transformer Engine would be needed for.
OTHERS = """
    --mock-data --tokenizer-type NullTokenizer --vocab-size 511 --train-iters 1 --lr 1e-4
    --no-rope-fusion --no-gradient-accumulation-fusion
"""
KEPT = """
    tensor_model_parallel_size pipeline_model_parallel_size virtual_pipeline_model_parallel_size
    context_parallel_size data_parallel_size expert_model_parallel_size expert_tensor_parallel_size
    sequence_parallel micro_batch_size global_batch_size recompute_granularity recompute_method
    recompute_num_layers recompute_modules num_layers hidden_size ffn_hidden_size
    num_attention_heads seq_length num_experts moe_router_topk use_distributed_optimizer
    overlap_grad_reduce overlap_param_gather bf16 fp16 attention_dropout hidden_dropout
    moe_token_dispatcher_type
"""


def main() -> None:
    here = Path(__file__).parent
    sys.path[0] = sys.argv[1]
    sys.path += [str(here), str(here.parents[1])]  # behind Megatron's own package `tests`
    if not hasattr(typing, "override"):  # Megatron-LM of 0.19 wants Python 3.12
        typing.override = lambda function: function  # type: ignore[attr-defined]
    import cpu
    import pretrain

    pretrain.pretend()
    os.environ |= {"RANK": "0", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    runs = json.load(sys.stdin)
    with contextlib.redirect_stdout(sys.stderr):
        cpu.stand_in()
        found = [read(ranks, arguments) for ranks, arguments in runs]
    print(json.dumps(found, default=str))


def read(ranks: int, arguments: list[str]) -> dict[str, Any]:
    """What Megatron makes of the arguments, or why it refuses them."""
    from megatron.training import arguments as megatron

    os.environ["WORLD_SIZE"] = str(ranks)
    sys.argv = ["pretrain_gpt.py", *arguments, *OTHERS.split()]
    try:
        parsed = megatron.parse_args()
        megatron.validate_args(parsed)
        config = megatron.core_transformer_config_from_args(parsed)
    except (Exception, SystemExit) as error:
        return {"refused": f"{type(error).__name__}: {error}"}
    from overlapc.megatron.searched import layers_of

    told = {name: getattr(parsed, name) for name in KEPT.split()}
    return {**told, "recompute_modules": config.recompute_modules, "layers": layers_of(config)}


if __name__ == "__main__":
    main()
