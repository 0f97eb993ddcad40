"""Train a tiny Llama with HuggingFace's Trainer, sharded by FSDP2, without and with overlapc.

pip install transformers accelerate
python examples/hf/train.py --ranks 2
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples import common

SEQ, ROWS, VOCAB = 128, 512, 256


def let_cpus_shard() -> None:
    """Accelerate shards on GPUs alone; with this it takes processes on a CPU for them."""
    from accelerate import state
    from accelerate.utils import DistributedType

    make = state.AcceleratorState.__init__

    def made(self: Any, *args: Any, **options: Any) -> None:
        state.PartialState(cpu=True)
        shared = state.PartialState._shared_state
        if shared["distributed_type"] == DistributedType.MULTI_CPU:
            shared["distributed_type"] = DistributedType.MULTI_GPU
        make(self, *args, **options)

    state.AcceleratorState.__init__ = made


def rows() -> list[dict[str, Tensor]]:
    made = torch.Generator().manual_seed(1)
    drawn = [torch.randint(0, VOCAB, (SEQ,), generator=made) for _ in range(ROWS)]
    return [{"input_ids": words, "labels": words} for words in drawn]


def train(args: argparse.Namespace, planned: bool) -> tuple[list[float], list[Tensor], float, Any]:
    """Losses, parameters, the median seconds of a step, and what overlapc says."""
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

    from overlapc.integrations.transformers import overlap

    set_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "use_cache": False}
    sizes = {"hidden_size": args.width, "intermediate_size": 4 * args.width}
    config = LlamaConfig(**heads, **sizes, num_hidden_layers=args.layers, vocab_size=VOCAB)
    arguments = TrainingArguments(
        tempfile.mkdtemp(),
        max_steps=args.steps,
        per_device_train_batch_size=args.batch,
        gradient_accumulation_steps=args.microbatches,
        **({"gradient_checkpointing": True} if args.checkpointing else {}),
        fsdp=True,
        fsdp_config={"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
        use_cpu=args.device == "cpu",
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
    )
    times = [time.monotonic()]

    class Timed(Trainer):  # type: ignore[misc]
        def log(self, logs: dict[str, float], *_: Any, **__: Any) -> None:
            times.append(time.monotonic())
            self.state.log_history.append(logs)

    trainer = Timed(LlamaForCausalLM(config), arguments, train_dataset=rows())
    plans = overlap(trainer) if planned else None  # the one line
    trainer.train()
    losses = [each["loss"] for each in trainer.state.log_history if "loss" in each]
    kept = [getattr(p, "_local_tensor", p).detach().clone() for p in trainer.model.parameters()]
    steps = [end - begin for begin, end in pairwise(times[2:])]
    return losses, kept, statistics.median(steps[:-1] or [0.0]), plans and plans.explain()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--batch", type=int, default=2, help="texts in a microbatch")
    parser.add_argument("--microbatches", type=int, default=4, help="of a step")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--link", choices=("none", "emulated"), default="none")
    parser.add_argument("--link-mbit", type=float, default=1000.0)
    args = parser.parse_args()
    common.launch(args.ranks)
    os.environ["ACCELERATE_USE_FSDP"] = "true"
    if args.device == "cpu":
        os.environ["ACCELERATE_USE_CPU"] = "true"
        let_cpus_shard()
    common.connect(args.link, args.link_mbit, args.device)
    losses, expected, before_s, _ = train(args, planned=False)
    found, parameters, after_s, said = train(args, planned=True)
    same = found == losses and all(map(torch.equal, expected, parameters))
    common.say(str(said))
    common.say(f"losses {losses[0]:.4f} … {losses[-1]:.4f}")
    common.say(f"a step takes {before_s * 1e3:.0f} ms, planned {after_s * 1e3:.0f} ms (measured)")
    common.leave_if(same)


if __name__ == "__main__":
    main()
