"""Megatron-LM's own pretrain_gpt.py trains bitwise alike with overlapc in it, whatever it is asked.

Needs a checkout of Megatron-LM (core_v0.16.1 or core_v0.19.0) in the folder that
OVERLAPC_MEGATRON_LM names; several are named as in PATH.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
NAMED = os.environ.get("OVERLAPC_MEGATRON_LM", "").split(os.pathsep)
LABS = [Path(lab) for lab in NAMED if (Path(lab) / "pretrain_gpt.py").is_file()]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.multiprocess,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not LABS,
        reason="OVERLAPC_MEGATRON_LM names no checkout of Megatron-LM",
    ),
]

TINY = """
    --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16
    --max-position-embeddings 16 --vocab-size 63 --tokenizer-type NullTokenizer --mock-data
    --num-workers 0 --micro-batch-size 2 --global-batch-size 8 --train-iters 3 --eval-iters 1
    --eval-interval 2 --lr 1e-2 --min-lr 1e-3 --lr-warmup-iters 1 --weight-decay 0.01
    --clip-grad 1.0 --log-interval 1 --transformer-impl local --distributed-backend gloo
    --no-persist-layer-norm --no-gradient-accumulation-fusion --no-masked-softmax-fusion
"""
TP, PP = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
MOE = "--no-bias-gelu-fusion --num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 1e-2"
EP = f"{MOE} --expert-model-parallel-size 2 --moe-token-dispatcher-type"
FULL, BY_MODULE = (
    f"--recompute-granularity {granularity}" for granularity in ("full", "selective")
)
LLAMA = """
    --group-query-attention --num-query-groups 2 --position-embedding-type rope --no-rope-fusion
    --swiglu
    --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights
"""
# What is asked -> how many ranks, and the arguments besides TINY's.
SETS: dict[str, tuple[int, str]] = {
    "dp": (2, ""),
    "tp": (2, TP),
    "tp-sp": (2, f"{TP} --sequence-parallel"),
    "pp": (2, PP),
    "tp-pp": (
        4,
        f"{TP} --sequence-parallel {PP} {FULL} --recompute-method uniform --recompute-num-layers 1",
    ),
    "ep-alltoall": (2, f"{EP} alltoall"),
    "ep-allgather": (2, f"{EP} allgather"),
    "ep-pp": (4, f"{EP} alltoall {PP}"),
    "ep-tp-sp": (2, f"{EP} alltoall {TP} --sequence-parallel --expert-tensor-parallel-size 1"),
    "shared-experts": (
        2,
        f"{EP} alltoall --disable-bias-linear --moe-shared-expert-intermediate-size 32",
    ),
    "capacity": (
        2,
        f"{EP} alltoall --moe-expert-capacity-factor 1.0 --moe-pad-expert-input-to-capacity",
    ),
    "drops": (2, f"{EP} alltoall --moe-expert-capacity-factor 0.5"),
    "distributed-optimizer": (
        2,
        "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    ),
    "full-uniform": (2, f"{TP} {FULL} --recompute-method uniform --recompute-num-layers 1"),
    "full-block": (
        2,
        f"{PP} --num-layers 4 {FULL} --recompute-method block --recompute-num-layers 1",
    ),
    "selective": (2, f"{TP} --sequence-parallel {BY_MODULE} --recompute-modules core_attn"),
    "by-module": (2, f"{TP} {LLAMA} {BY_MODULE} --recompute-modules core_attn mlp layernorm"),
    "moe-layer": (2, f"{EP} alltoall {BY_MODULE} --recompute-modules moe"),
    "bf16": (2, f"{TP} --bf16"),
    "fp16": (2, f"{TP} --fp16 --initial-loss-scale 65536"),
    "fp16-overflow": (2, "--fp16 --initial-loss-scale 262144 --hysteresis 1"),
    "llama": (2, f"{TP} {LLAMA}"),
    "llama-moe-bf16": (
        2,
        f"{EP} alltoall {LLAMA} --bf16 --use-distributed-optimizer --overlap-grad-reduce",
    ),
    "per-token-loss": (2, f"{PP} --calculate-per-token-loss"),
    "mtp": (2, f"{TP} {LLAMA} --mtp-num-layers 1"),
    # Two runs of Megatron alone differ where its messages between stages overlap, over Gloo.
    "interleaved": (
        4,
        "--pipeline-model-parallel-size 4 --num-layers 8 --num-layers-per-virtual-pipeline-stage 1"
        " --no-overlap-p2p-communication",
    ),
}


def pretrain(
    lab: Path, ranks: int, arguments: str, folder: Path, overlapc: str | None = None
) -> list[Any]:
    """What each rank wrote of its run of pretrain_gpt.py; with options for overlapc, through it."""
    folder.mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={ranks}"]
    command += ["--standalone", str(ROOT / "tests/megatron/pretrain.py"), "--out", str(folder)]
    command += [] if overlapc is None else [f"--overlapc={overlapc}"]
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    environment |= {"OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    environment["OVERLAPC_MEGATRON_LM"] = str(lab)
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    with (folder / "log").open("w+") as log:
        process = subprocess.Popen(
            [*command, *TINY.split(), *arguments.split()],
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            process.wait(timeout=1440)
        finally:
            if process.poll() is None:
                os.kill(process.pid, signal.SIGTERM)  # torchrun then ends its ranks
                process.wait(timeout=40)
        log.seek(0)
        assert process.returncode == 0, log.read()[-8000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


@pytest.mark.parametrize("lab", LABS, ids=lambda lab: lab.name)
@pytest.mark.parametrize("asked", SETS)
def test_megatron_trains_bitwise_alike_with_overlapc(asked: str, lab: Path, tmp_path: Path) -> None:
    ranks, arguments = SETS[asked]
    alone = pretrain(lab, ranks, arguments, tmp_path / "alone")
    overlapped = pretrain(
        lab, ranks, arguments, tmp_path / "overlapped", "--profile estimate --solver heu"
    )
    seen = [told.pop("overlapc") for told in overlapped]
    print(seen)
    assert overlapped == alone
    assert all(len(told["steps"]) == 3 for told in alone)
    for ran in (ran for of_rank in seen for ran in of_rank["ran"]):
        assert ran["planned"] > 0
        assert ran["plain"] == 0, ran["why"]
