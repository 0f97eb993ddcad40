"""What the first step costs: `overlapc.optimize` beside plain `torch.compile(backend="aot_eager")`.

    python benchmarks/first_step.py [--layers 12,24,48] [--ranks 1,2] [--model llama]

CPU seconds of one forward and backward that compiles, each in a process of its own that has
compiled a model of one layer before, so that imports are not counted. With 2 ranks the model is
tensor parallel, and the other rank is a fake one. `llama` is HuggingFace's (needs transformers).
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", default="12,24,48")
    parser.add_argument("--ranks", default="1,2")
    parser.add_argument("--solvers", default="overlap")
    parser.add_argument("--model", default="gpt", choices=("gpt", "llama"))
    parser.add_argument(
        "--budget", type=float, default=None, help="fraction of eager's activation memory"
    )
    parser.add_argument("--reps", type=int, default=1)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        layers, ranks, how = args.one.split(",")
        print(first_step(args.model, int(layers), int(ranks), how, args.budget))
        return
    for ranks in args.ranks.split(","):
        for layers in args.layers.split(","):
            found: dict[str, list[float]] = {}
            for _ in range(args.reps):
                for how in ("aot_eager", *args.solvers.split(",")):
                    command = [sys.executable, __file__, "--one", f"{layers},{ranks},{how}"]
                    command += ["--model", args.model]
                    command += ["--budget", str(args.budget)] if args.budget else []
                    out = subprocess.run(command, check=True, capture_output=True, text=True)
                    found.setdefault(how, []).append(float(out.stdout.split()[-1]))
            plain = statistics.median(found["aot_eager"])
            for how, taken in found.items():
                seconds = statistics.median(taken)
                print(
                    f"{args.model}, {layers} layers, TP {ranks}: {how} {seconds:.1f} s of CPU, "
                    f"{seconds / plain:.2f} x aot_eager",
                    flush=True,
                )


def first_step(model: str, layers: int, ranks: int, how: str, budget: float | None) -> float:
    import torch
    import torch.distributed as dist

    import overlapc

    torch.set_num_threads(1)
    group = None
    if ranks > 1:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
        group = dist.group.WORLD
    made = {"gpt": gpt, "llama": llama}[model]

    def step(layers: int) -> float:
        module, inputs = made(layers, group)
        if how == "aot_eager":
            run: Any = torch.compile(module, backend="aot_eager")
        else:
            # A fake rank's links take no time: their costs are looked up.
            costs = {"profile": "estimate", "hardware": "a100-sxm-80"} if group else {}
            run = overlapc.optimize(module, memory_budget=budget, solver=how, **costs)
        begin = time.process_time()
        loss = run(**inputs)
        (loss if torch.is_tensor(loss) else loss.loss).backward()
        return time.process_time() - begin

    step(1)
    torch._dynamo.reset()
    return step(layers)


def gpt(layers: int, group: Any) -> tuple[Any, dict[str, Any]]:
    import torch

    from examples.gpt.model import GPT, GPTConfig

    tokens = torch.randint(0, 96, (2, 16))
    config = GPTConfig(vocab=96, layers=layers, width=32, heads=4, max_seq=64)
    return GPT(config, group), {"tokens": tokens, "targets": tokens}


def llama(layers: int, group: Any) -> tuple[Any, dict[str, Any]]:
    import torch

    from tests.vision_ops import declare

    declare()
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        max_position_embeddings=64,
        use_cache=False,
    )
    model = LlamaForCausalLM._from_config(config, attn_implementation="sdpa").train()
    if group is not None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            RowwiseParallel,
            parallelize_module,
        )

        column, row = ColwiseParallel, RowwiseParallel
        names = [f"self_attn.{x}_proj" for x in "qkv"] + ["mlp.gate_proj", "mlp.up_proj"]
        plan = {name: column() for name in names}
        plan |= {"self_attn.o_proj": row(), "mlp.down_proj": row()}
        mesh = init_device_mesh("cpu", (group.size(),))
        for layer in model.model.layers:
            parallelize_module(layer, mesh, plan)
    tokens = torch.randint(3, 96, (2, 16))
    return model, {"input_ids": tokens, "labels": tokens}


if __name__ == "__main__":
    main()
