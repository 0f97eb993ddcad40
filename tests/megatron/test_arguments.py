"""The arguments that a search prints, read by Megatron-LM's own parser, are the predicted run.

Needs a checkout of Megatron-LM (core_v0.16.1 or core_v0.19.0), in the folder that
OVERLAPC_MEGATRON_LM names.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from overlapc.profiler.hardware import load_hardware
from overlapc.report.answer import Answer
from overlapc.search.alone import alone
from overlapc.search.captures import UnitKey
from overlapc.search.evaluate import evaluate
from overlapc.search.frameworks.known import find_framework
from overlapc.search.layouts import Cluster, Fixed, Layout, expert_ranks
from overlapc.search.memory import most_bytes
from overlapc.search.models.transformer import Transformer
from overlapc.search.search import Result, search
from overlapc.search.units import make_unit
from overlapc.search.weights import held_bytes
from overlapc.solvers import PREFIX

LAB = os.environ.get("OVERLAPC_MEGATRON_LM", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(
        not (Path(LAB) / "megatron/training/arguments.py").is_file(),
        reason="OVERLAPC_MEGATRON_LM names no checkout of Megatron-LM",
    ),
]

GPT = Transformer("gpt", layers=8, width=512, heads=8, ffn=2048, vocab=1024, seq=1024)
LLAMA = replace(GPT, name="llama", gated=True, kv_heads=4)
MOE = replace(LLAMA, name="moe", experts=8, top_k=2, expert_width=512, dense_first=2)
EVERY = replace(GPT, name="every", experts=8, top_k=2, expert_width=512, moe_every=2)
LATENT = replace(
    MOE, name="latent", kv_heads=0, head_width=64, q_rank=96, kv_rank=128, rope_width=32,
    value_width=64, shared_width=512,
)  # fmt: skip
MEGATRON, OVERLAP = "megatron", "megatron-overlap"
# model, framework, the memory that a run may take, what is fixed; with less memory recompute is due
WINNERS: list[tuple[Transformer, str, float, Fixed]] = [
    (GPT, MEGATRON, 79.0, Fixed(tp=1, pp=1)),
    (GPT, OVERLAP, 1.9, Fixed(tp=2, pp=1, microbatch=4)),
    (LLAMA, OVERLAP, 2.1, Fixed(tp=2, pp=2, microbatch=4)),
    (LLAMA, MEGATRON, 79.0, Fixed(tp=1, pp=4, schedule="interleaved", microbatch=1)),
    (LLAMA, "megatron+fp16", 79.0, Fixed(tp=4, pp=1, microbatch=2)),
    (LLAMA, "megatron-overlap+bf16-gradients+tp-overlap", 79.0, Fixed(tp=2, pp=1, microbatch=2)),
    (MOE, OVERLAP, 79.0, Fixed(tp=1, pp=2, microbatch=2)),
    (MOE, MEGATRON, 2.2, Fixed(tp=2, pp=1, microbatch=4)),
    (EVERY, OVERLAP, 79.0, Fixed(tp=2, pp=2, microbatch=1)),
    (LATENT, MEGATRON, 2.3, Fixed(tp=1, pp=2, microbatch=4)),
]


def found(model: Transformer, framework: str, gigabytes: float, fixed: Fixed) -> Any:
    """The headline of a search, and the cluster that it was asked for."""
    usable = int(gigabytes * 1e9)
    cluster = Cluster("h100-sxm", 8, 8, usable, 64, framework=framework, of_run=True)
    itself = alone(find_framework(framework), model)
    result = search(model, cluster, fixed, itself[0], alone=itself, shown=1, workers=1)
    assert result.best is not None
    return cluster, result


def solver_of(read: dict[str, Any]) -> str:
    """The baseline that plans as a run with these arguments recomputes."""
    if read["recompute_granularity"] is None:
        return "megatron-none"
    if read["recompute_granularity"] == "full":
        assert (read["recompute_method"], read["recompute_num_layers"]) == ("uniform", 1)
        return "megatron-full"
    modules = read["recompute_modules"]
    return "megatron-selective" if modules == ["core_attn"] else PREFIX + "+".join(modules)


def layout_of(read: dict[str, Any]) -> Layout:
    """The layout that Megatron runs with these arguments."""
    chunks = read["virtual_pipeline_model_parallel_size"]
    return Layout(
        read["tensor_model_parallel_size"],
        read["pipeline_model_parallel_size"],
        read["data_parallel_size"],
        read["micro_batch_size"],
        "interleaved" if chunks else "1f1b",
        read["sequence_parallel"],
        chunks or 2,
        ep=read["expert_model_parallel_size"] if read["num_experts"] else 0,
    )


def check(
    model: Transformer, cluster: Cluster, result: Result, arguments: str, read: dict[str, Any]
) -> str:
    """What is wrong with what Megatron reads; nothing if it is the predicted run, and fits."""
    best = result.best
    assert best is not None
    if "refused" in read:
        return f"{arguments}: {read['refused']}"
    layout, solver, layers = layout_of(read), solver_of(read), tuple(read["layers"])
    unit = make_unit(UnitKey.of(model, cluster, layout))
    again = evaluate(model, cluster, layout, unit, solver, layers=layers).found
    static = held_bytes(model, cluster, layout, layers)
    ran = {
        "step": (again.step_ns, best.step_ns),
        "recompute": (solver, best.solver),
        "layers": (layers, best.layers),
        "batch": (read["global_batch_size"], cluster.global_batch),
        "experts": (read["expert_model_parallel_size"], expert_ranks(model, best.layout)),
        "shapes": (
            [read[name] for name in ("num_layers", "hidden_size", "ffn_hidden_size", "seq_length")],
            [model.layers, model.width, model.ffn, model.seq],
        ),
        "half": (read["fp16"], "fp16" in cluster.framework),
        "dropout": (read["hidden_dropout"], 0.0),
        "overlap": (bool(read["overlap_param_gather"]), "--overlap-param-gather" in arguments),
    }
    wrong = [f"{what}: {a} is not {b}" for what, (a, b) in ran.items() if a != b]
    if not again.fits or most_bytes(cluster, layout, static, again.peak_bytes) > (
        cluster.memory_bytes
    ):
        wrong.append("does not fit")
    return f"{arguments}: {', '.join(wrong)}" if wrong else ""


def test_pasted_arguments_are_the_run_that_the_headline_predicts() -> None:
    machine = load_hardware("h100-sxm")
    asked, runs = [], []
    for model, framework, gigabytes, fixed in WINNERS:
        cluster, result = found(model, framework, gigabytes, fixed)
        said = Answer.of(model, cluster, machine, result)
        assert said is not None
        assert f"that {framework} runs by itself" in said.headline
        assert said.script == "pretrain_gpt.py"
        asked.append((model, cluster, result, said.arguments))
        runs.append([cluster.gpus, shlex.split(said.arguments)])
    program = Path(__file__).with_name("parse.py")
    done = subprocess.run(
        [sys.executable, str(program), LAB],
        input=json.dumps(runs),
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    read = json.loads(done.stdout)
    wrong = [check(*each, told) for each, told in zip(asked, read, strict=True)]
    assert list(filter(None, wrong)) == []
    solvers = {result.best.solver for _, _, result, _ in asked if result.best}
    assert {"megatron-none", "megatron-full"} <= solvers  # some recompute
