"""The frameworks that are known, each from its sources, and options that a run may add to one. What
a framework fuses decides how often activations cross memory, which is most of what separates
measured steps from the flops of their matrices.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from overlapc.core.errors import OptionError, did_you_mean
from overlapc.search.frameworks.framework import Framework, slowest_of

# What Megatron's optimizer moves for an element, counted op by op: of gradients that are in float32
# the norm 4 and the clipping 8, Adam 28, the weight's copy 6; of those in half precision the copy
# to float32 6, the unscaling 8 and the zeros 2 besides.
_MEGATRON_FLOAT32, _MEGATRON_HALF = 4 + 8 + 28 + 6, 6 + 8 + 4 + 8 + 28 + 6 + 2
# Of all gradients that a rank holds, in float32: zeros 4, and the norm that is looked at for NaNs 4
# (--no-check-for-nan-in-loss-and-grad is not the default); divided by the replicas, 8
# (start_grad_sync of Megatron-LM's param_and_grad_buffer.py).
_MEGATRON_HELD, _MEGATRON_SCALING = 4 + 4, 8
# Of --overlap-grad-reduce (Megatron's DistributedDataParallelConfig, bucket_size).
_MEGATRON_BUCKETS = 40_000_000, 1_000_000
# From one to eight replicas of 280 GPUs a step went from 37.83 to 39.15 s (Korthikanti et al. 2022,
# section 6.3; 54.2% of the peak, as its abstract has it, are 39.1 s); the reduction of gradients in
# half precision is 0.9% of it by our estimate, and the rest, 2.6%, is what the slowest of eight
# takes more than the average.
_STRAGGLERS = 0.026 / slowest_of(8)
# What the host of PyTorch takes without CUDA graphs: calibrated by `vtrain-small-calibration`,
# whose steps were put together of kernels of a layer, traced with the gaps between them; as if they
# recomputed, which they do not (docs/validation.md).
_HOST_NS, _HOST_COLLECTIVE_NS = 46_000, 25_000
# Between a forward and a backward Megatron-LM exchanges with one neighbour, both ways at once
# (send_forward_recv_backward and send_backward_recv_forward), and the next kernels wait for it; in
# interleaved schedules, too, before --overlap-p2p-communication. DeepSpeed's ranks, and Scaling's
# after them, send and then receive (TrainSchedule of runtime/pipe/schedule.py, and p2p.py).
_WAITS_PLAIN, _WAITS_ALWAYS, _WAITS_IN_TURN = (1, 0), (1, 1), (2, 0)
# Schedules that Megatron-LM runs, and DeepSpeed and Scaling
_BY_MEGATRON, _BY_DEEPSPEED = ("1f1b", "interleaved"), ("1f1b",)
# Grouped products: of 108 on B200 and 12 on A100 PCIe (SimuMax 1.2, its system files) that figure
# leaves a median error of 9 to 14% and of 2 to 13%; none, 21 to 37% and 10 to 21%.
# Of Megatron-core 0.16.1's MoELayer, dropless with an auxiliary loss, 37 ops of a forward and 32 of
# a backward are not of experts (benchmarks/expert_ops.py counts them); the search's has 13 and 15.
# Biases of experts (`_apply_bias` of its experts.py), op by op: a bias times a row's weight is
# written in float32 (4), added (2 + 4 + 4), joined (4 + 4) and copied to bf16 (4 + 2). Backward:
# copies (2 + 4 and 4 + 2), the gradients of bias and weight (4 + 4 + 4 each), and what is split
# joined (2 + 2).
_MEGATRON: dict[str, Any] = {
    "expert_ops": (37 - 13, 32 - 15),
    "bias_moves": (28, 40),
    "fused_gate": True,  # --no-bias-swiglu-fusion is not the default
    "uncovered": 0.5,
    "hides_reduction": False,
    "added_moves": 0,
    "optimizer_moves": _MEGATRON_FLOAT32,
    "held_moves": _MEGATRON_HELD,
    "scaling_moves": _MEGATRON_SCALING,
    "schedules": _BY_MEGATRON,
    "waits": _WAITS_PLAIN,
    "stragglers": _STRAGGLERS,
    "host_ns": _HOST_NS,
    "host_collective_ns": _HOST_COLLECTIVE_NS,
}
# Transformer Engine's loss: its kernels move 10 bytes a score, and take as long as 8 bytes at 0.28
# of B200's peak rate (SimuMax 1.2, its system files), where other kernels reach 0.67.
_FUSED_LOSS = 8 / 0.28 / (10 / 0.67)
# Ops are those of Megatron-LM v2.5 (its transformer.py and layers.py, with fused bias and dropout).
# Its mappings.py sums gradients when both products before have ended; since September 2021 (commit
# 16c90445e7, behind v2.6) the sum starts before the weight's gradient.
# Attention: selective recompute of the core adds 1.3 ms to a layer of 22B (Korthikanti et al. 2022,
# table 4), and its two products, softmax and dropout take 1.20 at the rates of other kernels.
_MEGATRON_2021: dict[str, Any] = {
    "unfused": "attention loss bias",
    "schedules": _BY_MEGATRON,
    "waits": _WAITS_ALWAYS,
    "attention": 1.08,
    "dropout": True,
    "shards_optimizer": False,
    "gradient_bytes": 2,
    "hides_reduction": False,
    "added_moves": 6,
    "stragglers": _STRAGGLERS,
    "host_ns": _HOST_NS,
    "host_collective_ns": _HOST_COLLECTIVE_NS,
}
# As its public sources have it (github.com/Aleph-Alpha/scaling): gradients are copied to a bucket,
# divided, copied to float32, summed on all replicas, and copied back twice (24 bytes an element).
# Its column-parallel layers, of which a gate is one, sum their inputs' gradients one by one, and
# wait for each sum. How much slower: by the median of `layouts-13b`, whose mean follows a few runs
# on two stages that take up to 63% longer than with an older attention.
# The loss: calibrated by `layouts-13b`, where eight sequences at a time are at the edge of memory
# on two stages, and with two tensor-parallel ranks.
_SCALING: dict[str, Any] = {
    "loss_bytes": 20,
    "summed_bytes": 4,
    "sums_all": True,
    "summing_moves": 4 + 4 + 6 + 6 + 4,
    "added_moves": 6,
    "optimizer_moves": _MEGATRON_HALF,
    "scatters": False,
    "schedules": _BY_DEEPSPEED,
    "waits": _WAITS_IN_TURN,
    "ends": (1, 2),
    "stragglers": _STRAGGLERS,
    "slower": 1.075,
    "host_ns": _HOST_NS,
    "host_collective_ns": _HOST_COLLECTIVE_NS,
}
# PyTorch's FSDP (its version of 2023) as MosaicML's llm-foundry runs it with Composer: parameters
# of a layer are one flat tensor, to which their gradients are joined (2 + 2 bytes an element),
# copied to float32 (2 + 4) and divided (4 + 4). Composer's DecoupledAdamW is eight kernels for a
# tensor (80), behind the norm (4) and clipping (8). FlashAttention's loss reads the scores (2), and
# then reads them and writes their gradient (2 + 2), where the search's op for it moves 10. Behind
# each backward two metrics (use_train_metrics, which is the default; _eval_train_metrics of its
# trainer.py) take the loss of all scores again, in float32: a cast (2 + 4) and a softmax (4 + 4).
_LLM_FOUNDRY: dict[str, Any] = {
    "pytorch": "eager",
    "of_2023": True,
    "unfused": "bias replaced",
    "loss": (2 + 2 + 2 + 2 * (2 + 4 + 4 + 4)) / (2 + 2 + 2 + 2 + 2),
    "loss_bytes": 2 + 2,
    "gathers": "twice",
    "slower": 1.05,
    "added_moves": 4 + 6 + 8,
    "half_moves": 4 + 4,
    "optimizer_moves": 80 + 12,
    "stragglers": _STRAGGLERS,
    "host_ns": _HOST_NS,
    "host_collective_ns": _HOST_COLLECTIVE_NS,
}
# PyTorch's FSDP2: weights are copied from where they are gathered (2 + 2 bytes an element), and
# gradients to where they are summed in float32 (2 + 4). Fused AdamW in float32 (28) behind the norm
# (4) and clipping (8). A compiled loss reads the scores twice and writes their gradient (2 + 2 +
# 2 + 2), where the search's op for it moves 10.
_FSDP: dict[str, Any] = {
    "pytorch": "compiled",
    "fused_gate": True,
    "unfused": "replaced",
    "loss": (2 + 2 + 2 + 2) / (2 + 2 + 2 + 2 + 2),
    "loss_bytes": 2 + 2,
    "gathers": "twice",
    "gather_moves": 2 + 2,
    "added_moves": 2 + 4,
    "half_moves": 2 + 2,
    "optimizer_moves": 28 + 12,
    "stragglers": _STRAGGLERS,
    "host_ns": _HOST_NS,
    "host_collective_ns": _HOST_COLLECTIVE_NS,
}

FRAMEWORKS = {
    each.name: each
    for each in (
        Framework("overlapc", "this project", pytorch="eager"),
        Framework(
            "megatron",
            "Megatron-LM with its defaults and a distributed optimizer: kernels of Transformer "
            "Engine, weight gradients added up in float32 by the matrix product itself, a loss op "
            "by op (--cross-entropy-loss-fusion is not the default)",
            unfused="loss",
            **_MEGATRON,
        ),
        Framework(
            "megatron-fused-loss",
            "the same with --cross-entropy-loss-fusion and --cross-entropy-fusion-impl te",
            unfused="replaced",
            loss=_FUSED_LOSS,
            **_MEGATRON,
        ),
        Framework(
            "megatron-overlap",
            "Megatron-LM with --overlap-grad-reduce, --overlap-param-gather and "
            "--cross-entropy-loss-fusion",
            buckets=_MEGATRON_BUCKETS,
            **_MEGATRON,
        ),
        Framework(
            "megatron-2021",
            "Megatron-LM before FlashAttention: fused softmax, dropout, gradients in half "
            "precision that are summed when all are there, an optimizer on every replica",
            optimizer_moves=_MEGATRON_HALF,
            hides_sums=False,
            **_MEGATRON_2021,
        ),
        Framework(
            "megatron-2022",
            "the same with asynchronous sums of gradients of tensor-parallel ranks",
            optimizer_moves=_MEGATRON_HALF,
            **_MEGATRON_2021,
        ),
        Framework(
            "megatron-deepspeed",
            "Megatron-DeepSpeed of the same time, whose optimizer moves less",
            optimizer_moves=34,
            hides_sums=False,
            **_MEGATRON_2021 | {"waits": _WAITS_IN_TURN, "schedules": _BY_DEEPSPEED},
        ),
        Framework(
            "fsdp",
            "PyTorch's FSDP2 around layers that are compiled, as torchtitan runs it",
            **_FSDP,
        ),
        Framework(
            "llm-foundry",
            "MosaicML's llm-foundry of 2024: PyTorch's FSDP, which sums gradients in float32, with "
            "FlashAttention 2",
            **_LLM_FOUNDRY,
        ),
        Framework(
            "llm-foundry-triton",
            "the same in 2023, with FlashAttention in Triton",
            attention=1.8,
            **_LLM_FOUNDRY,
        ),
        *(
            Framework(
                f"scaling{kind}",
                "Aleph Alpha's Scaling, as Hagemann et al. (2023) ran it" + what,
                unfused=unfused,
                attention=attention,
                gradient_bytes=2,
                hides_reduction=False,
                hides_sums=False,
                **_SCALING,
            )
            for kind, what, unfused, attention in (
                ("", ", with FlashAttention 2 and a fused norm", "rotary gate scores", 1.0),
                ("-unfused-norm", ", with FlashAttention 2", "norm rotary gate scores", 1.0),
                ("-flash-1", ", with FlashAttention 1", "norm rotary gate scores", 2.0),
                (
                    "-fused-softmax",
                    ", with Megatron's softmax",
                    "norm attention rotary gate scores",
                    1.08,
                ),
                ("-torch", ", op by op", "norm attention softmax rotary gate scores", 1.0),
            )
        ),
    )
}

# What a run may add to a framework: `megatron-overlap+bf16-gradients`.
OPTIONS: dict[str, dict[str, Any]] = {
    "dropout": {"dropout": True},
    # --cross-entropy-loss-fusion and --cross-entropy-fusion-impl te, as in megatron-fused-loss
    "te-loss": {"unfused": "replaced", "loss": _FUSED_LOSS},
    # Megatron's --tp-comm-overlap
    "tp-overlap": {"beside": True},
    # Transformer Engine's FP8 with scales of earlier steps (Megatron's --fp8-recipe delayed)
    "delayed-scaling": {"delayed": True},
    # Megatron's --moe-token-dispatcher-type flex, with DeepEP or with HybridEP
    "deepep": {"dispatcher": "deepep"},
    "hybridep": {"dispatcher": "hybridep"},
    # A whole step in a CUDA graph (Megatron's --cuda-graph-scope full_iteration): its host launches
    # nothing
    "cuda-graphs": {
        "graphs": True,
        "host_ns": 0,
        "host_collective_ns": 0,
        "expert_ops": (0, 0),
        "bias_moves": (0, 0),
    },
    # CUDA_LAUNCH_BLOCKING=1
    "blocking": {"blocking": True},
    # Megatron's --grad-reduce-in-bf16: of all gradients zeros 2, and what looks for NaNs 2; of a
    # rank's part the copy to float32 6, and then as Megatron in float32.
    "bf16-gradients": {
        "gradient_bytes": 2,
        "optimizer_moves": 6 + _MEGATRON_FLOAT32,
        "held_moves": 2 + 2,
        "scaling_moves": 2 + 2,
    },
    # Megatron in fp16, whose gradients are scaled: they are unscaled, which looks for NaNs.
    "fp16": {
        "fp16": True,
        "gradient_bytes": 2,
        "optimizer_moves": _MEGATRON_HALF,
        "held_moves": 0,
        "scaling_moves": 2 + 2,
    },
    # Megatron-FSDP (--use-megatron-fsdp) with optim_grads_params: weights are divided, too
    "fsdp": {"gathers": "twice"},
    # FSDP's SHARD_GRAD_OP: what is gathered for a forward is kept for its backward
    "kept-weights": {"gathers": "once"},
    # FSDP's HYBRID_SHARD: over the replicas of a node, whose sums are summed over the nodes
    "hybrid": {"in_node": True},
    # FSDP's reduce_dtype bf16 (Composer's mixed_precision PURE): sums of gradients are in it
    "bf16-sums": {"summed_bytes": 2},
    # Before PyTorch 2.1, whose checkpoints stop when all is there that the backward needs
    "whole-layers": {"whole_layers": True},
    # Libraries of 2023 and early 2024 (CUDA 12.1), which were written for Ampere
    "of-2023": {"of_2023": True},
    # Of DeepSpeed: an optimizer that is divided over the replicas
    "zero-1": {"shards_optimizer": True},
    # DeepSpeed's bf16_optimizer.py of February 2022, and _bf16_reduce_grads of its pipe/engine.py:
    # beside gradients in bf16 there are those in float32, to which they are added as copies (reads
    # 2, 4 and 4; writes 4 and 4); all replicas sum them whole, divided (8), by way of a flat
    # buffer (16).
    "bf16-optimizer": {
        "shards_optimizer": True,
        "gradient_bytes": 2 + 4,
        "summed_bytes": 4,
        "sums_all": True,
        "summing_moves": 8 + 16,
        "added_moves": 2 + 4 + 4 + 4 + 4,
        "optimizer_moves": _MEGATRON_FLOAT32,
    },
}
# Options that mean something for frameworks of one kind alone.
MEGATRONS = "megatron", "megatron-fused-loss", "megatron-overlap"
_FSDPS = "fsdp", "llm-foundry", "llm-foundry-triton"
ONLY: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("fsdp", "te-loss", "tp-overlap", "deepep", "hybridep"), MEGATRONS),
    **dict.fromkeys(("fp16", "cuda-graphs"), MEGATRONS),
    "delayed-scaling": (*MEGATRONS, *_FSDPS),
    "bf16-gradients": MEGATRONS,
    "zero-1": ("megatron-deepspeed",),
    "bf16-optimizer": ("megatron-deepspeed",),
    **dict.fromkeys(("kept-weights", "hybrid", "bf16-sums", "whole-layers"), _FSDPS),
    "of-2023": ("fsdp",),
}
# Options of which one undoes the other.
_APART = ("deepep", "hybridep"), ("fp16", "bf16-gradients"), ("blocking", "cuda-graphs")
OURS = FRAMEWORKS["overlapc"]
# What people call one of them.
_CALLED = {
    "torchtitan": "fsdp",
    "fsdp2": "fsdp",
    "pytorch-fsdp": "fsdp",
    "megatron-lm": "megatron",
    "megatron-core": "megatron",
    "mcore": "megatron",
    "megatron-bridge": "megatron-overlap",
    "nemo": "megatron-overlap",
    "composer": "llm-foundry",
    "llmfoundry": "llm-foundry",
}


def find_framework(name: str) -> Framework:
    """The framework of that name, with the options behind each `+`."""
    given, *options = name.split("+")
    first = _CALLED.get(given.lower().replace("_", "-"), given.lower())
    name = "+".join([first, *options])
    wrong = [option for option in options if option not in OPTIONS]
    if first not in FRAMEWORKS or wrong:
        known = OPTIONS if wrong and first in FRAMEWORKS else [*FRAMEWORKS, *_CALLED]
        raise OptionError(
            f"framework {name!r}: expected one of {', '.join(FRAMEWORKS)}; behind it, if anything, "
            f"+ and one of {', '.join(OPTIONS)}{did_you_mean((*wrong, first)[0], known)}"
        )
    found = FRAMEWORKS[first]
    for option, named in ONLY.items():
        if option in options and first not in named:
            raise OptionError(
                f"framework {name!r}: found +{option} with {first}; expected one of "
                f"{', '.join(named)} before the first +"
            )
    for both in _APART:
        if set(both) <= set(options):
            raise OptionError(f"framework {name!r}: expected one of +{both[0]} and +{both[1]}")
    for option in options:
        found = replace(found, name=name, **OPTIONS[option])
    if found.gathers and found.summed_bytes == 2:
        found = replace(found, added_moves=found.half_moves)
    return found
