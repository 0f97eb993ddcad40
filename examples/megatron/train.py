"""Train a small GPT of Megatron's, tensor parallel, as Megatron runs it and with overlapc, on CPU.

python examples/megatron/train.py
python examples/megatron/train.py --recompute full --microbatches 8

Both train side by side in the same processes, by Megatron's own schedule and layers. megatron-core
is where `make` puts it (.venv/megatron), or in the folder that OVERLAPC_MEGATRON names.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples import common
from tests.megatron import cpu  # stands in for CUDA, which Megatron asks for


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    common.add_arguments(parser)
    parser.add_argument("--megatron", default="0.16.1", help="version of megatron-core")
    parser.add_argument("--recompute", choices=["none", "full"], default="none")
    parser.set_defaults(steps=10, microbatches=4, variants="megatron,overlapc")
    args = parser.parse_args()
    common.launch(args.ranks)
    cpu.use(args.megatron)
    group = common.connect(args.link, args.link_mbit, args.device)
    args.ranks = group.size()

    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.pipeline_parallel import get_forward_backward_func

    import overlapc.megatron

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=args.ranks)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    schedule = get_forward_backward_func()
    schedules = {"megatron": copied(schedule), "overlapc": schedule}
    overlapc.megatron.patch(memory_budget=args.memory_budget, solver=args.solver)

    def variant(name: str) -> common.Variant:
        model = build(args)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        return common.Variant(name, model, optimizer, add_up=adding_up(schedules[name], args))

    text = common.Text()

    def batch(step: int) -> list[common.Batch]:
        first = step * args.microbatches
        numbers = range(first, first + args.microbatches)
        return [text.batch(n, stream=0, batch=args.batch, seq=args.seq) for n in numbers]

    variants = [variant(name) for name in args.variants.split(",")]
    for other in variants[1:]:  # Megatron draws each model's weights anew
        other.model.load_state_dict(variants[0].model.state_dict())
    common.train(variants, batch, args.steps)
    common.report(variants, batch(0))
    common.say(f"\n{overlapc.megatron.explain()}")
    common.leave()


def build(args: argparse.Namespace) -> nn.Module:
    """A GPT of megatron-core, of bytes."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    recompute = {"granularity": "full", "method": "uniform", "num_layers": 1}
    asked = {f"recompute_{name}": value for name, value in recompute.items()}
    config = TransformerConfig(
        num_layers=args.layers,
        hidden_size=args.width,
        num_attention_heads=args.width // 64,
        tensor_model_parallel_size=args.ranks,
        hidden_dropout=args.dropout,
        attention_dropout=args.dropout,
        **(asked if args.recompute == "full" else {}),
    )
    return GPTModel(config, get_gpt_layer_local_spec(), 256, args.seq)


def copied(schedule: FunctionType) -> FunctionType:
    """A copy of a schedule function that `patch` does not change; it changes the original
    everywhere."""
    globals_, defaults = schedule.__globals__, schedule.__defaults__
    copy = FunctionType(schedule.__code__, globals_, schedule.__name__, defaults)
    copy.__kwdefaults__ = schedule.__kwdefaults__
    return copy


def adding_up(
    schedule: Callable[..., Any], args: argparse.Namespace
) -> Callable[..., list[Tensor]]:
    """Make the function that adds up gradients of all microbatches, by a schedule of Megatron's."""
    mask = torch.ones(1, 1, args.seq, args.seq, dtype=torch.bool).triu(1)
    positions = torch.arange(args.seq)[None]

    def forward_step(batches: Any, model: nn.Module) -> tuple[Tensor, Callable[..., Any]]:
        tokens, targets = next(batches)
        losses = model(tokens, positions.expand_as(tokens), mask, labels=targets)
        return losses, lambda losses: (losses.mean(), {"loss": losses.mean().detach()})

    def add_up(model: nn.Module, microbatches: list[common.Batch]) -> list[Tensor]:
        seen = schedule(
            forward_step_func=forward_step,
            data_iterator=iter(microbatches),
            model=model,
            num_microbatches=len(microbatches),
            seq_length=args.seq,
            micro_batch_size=args.batch,
            forward_only=False,
        )
        return [each["loss"] for each in seen]

    return add_up


if __name__ == "__main__":
    main()
