"""HuggingFace's Trainer on several processes, with FSDP2 through Accelerate or with
DistributedDataParallel: how it ends, planned in place or not."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from examples.hf.train import let_cpus_shard
from tests.vision_ops import declare

declare()  # transformers' Trainer imports torchvision

VOCAB = 64
_HEADS = {"num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": VOCAB}
_SIZES = {**_HEADS, "hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 64}
_GROUPED = {"num_key_value_heads": 2, "use_cache": False}


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_SIZES, **_GROUPED))


def qwen3_with_experts() -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    experts = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**_SIZES, **_GROUPED, **experts, head_dim=8))


def bert() -> Any:
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(BertConfig(**_SIZES, num_labels=5))


def vit() -> Any:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {name: _SIZES[name] for name in ("hidden_size", "intermediate_size")}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 4}
    pictures = {"image_size": 16, "patch_size": 4, "num_labels": 5}
    return ViTForImageClassification(ViTConfig(**sizes, **layers, **pictures))


def t5() -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    return T5ForConditionalGeneration(
        T5Config(**sizes, vocab_size=VOCAB, use_cache=False, decoder_start_token_id=0)
    )


# How a model is made, and its blocks.
MODELS: Mapping[str, tuple[Callable[[], Any], str]] = {
    "llama": (llama, "LlamaDecoderLayer"),
    "qwen3 with experts": (qwen3_with_experts, "Qwen3MoeDecoderLayer"),
    "bert": (bert, "BertLayer"),
    "vit": (vit, "ViTLayer"),
    "t5": (t5, "T5Block"),
}


def rows_for(name: str, count: int, ragged: bool = False) -> list[dict[str, Tensor]]:
    made = torch.Generator().manual_seed(1)
    rows = []
    for i in range(count):
        label = torch.tensor(i % 5)
        length = int(torch.randint(4, 40, (1,), generator=made)) if ragged else 16
        words = torch.randint(0, VOCAB, (length,), generator=made)
        if name == "vit":
            rows.append({"pixel_values": torch.rand(3, 16, 16, generator=made), "labels": label})
        else:
            rows.append({"input_ids": words, "labels": label if name == "bert" else words})
    return rows


def padded(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """A batch as long as its longest row."""

    def beside(name: str, fill: int) -> Tensor:
        each = [row[name] for row in rows]
        return pad_sequence(each, batch_first=True, padding_value=fill)

    return {"input_ids": beside("input_ids", 0), "labels": beside("labels", -100)}


@dataclass
class Ended:
    """What a training leaves behind."""

    said: list[Mapping[str, Any]]  # losses and norms, as the Trainer logs them
    state: dict[str, Tensor]
    planned: int = 0  # graphs
    unchanged: list[str] = field(default_factory=list)
    warned: list[str] = field(default_factory=list)

    def differs(self, other: Ended) -> str:
        if self.said[-len(other.said) :] != other.said:
            return f"{self.said} and {other.said}"
        pairs = ((name, value, other.state[name]) for name, value in self.state.items())
        return next((name for name, one, two in pairs if not torch.equal(one, two)), "")


def trained(
    name: str,
    folder: str,
    planned: bool,
    sharded: bool = True,
    steps: int = 3,
    resumes: str = "",
    merge: bool = False,
    wraps: bool = False,
    ragged: bool = False,
    adapters: bool = False,
    **settings: Any,
) -> Ended:
    """Train a tiny model for some steps, `planned` or not, or from where it `resumes`."""
    from transformers import Trainer, TrainingArguments, set_seed

    from overlapc.integrations.transformers import overlap

    make, block = MODELS[name]
    set_seed(0)
    config = {"version": 2, "transformer_layer_cls_to_wrap": [block], "reshard_after_forward": True}
    config |= {"activation_checkpointing": wraps}
    shards = {"fsdp": True, "fsdp_config": config} if sharded else {}
    quiet = {"report_to": [], "disable_tqdm": True, "logging_steps": 1, "use_cpu": True}
    usual = {"gradient_accumulation_steps": 4, "max_grad_norm": 0.5, "learning_rate": 1e-2}
    sizes = {"max_steps": steps, "per_device_train_batch_size": 2, "save_strategy": "no"}
    arguments = TrainingArguments(folder, **(shards | quiet | usual | sizes | settings))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rows = rows_for(name, 64, ragged)
        model = make()
        if adapters:
            from peft import LoraConfig, get_peft_model

            model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
        data = {"train_dataset": rows, "eval_dataset": rows[:4]}
        trainer = Trainer(model, arguments, data_collator=padded if ragged else None, **data)
        plans: Any = None
        if planned:
            plans = overlap(trainer, merge=merge, profile="estimate", solver="heu")
        trainer.train(resume_from_checkpoint=resumes or None)
    kept = ("loss", "eval_loss", "grad_norm", "step")
    said = [{k: each[k] for k in kept if k in each} for each in trainer.state.log_history]
    tensors = {n: getattr(p, "_local_tensor", p) for n, p in trainer.model.named_parameters()}
    ended = Ended(said, {n: p.detach().clone() for n, p in tensors.items()})
    if plans is not None:
        step = plans.merged and plans.merged.step
        ended.planned = len(plans.planned.graphs) if step is None else int(step.report is not None)
        ended.fallbacks = plans.planned.fallbacks + (step.fallbacks if step else [])
    ended.warned = [text for w in caught if (text := str(w.message)).startswith("overlapc")]
    return ended


def pairs(
    rank: int, _ranks: int, folder: str, cases: list[tuple[str, dict[str, Any]]], sharded: bool
) -> list[tuple[str, Ended, Ended]]:
    """For each case, how training ends as it is, and how it ends planned."""
    os.environ.update(ACCELERATE_USE_CPU="true", LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2")
    if sharded:
        os.environ["ACCELERATE_USE_FSDP"] = "true"
        let_cpus_shard()
    found = []
    for i, (name, settings) in enumerate(cases):
        torch.compiler.reset()
        each = [
            trained(name, f"{folder}/{i} {way}", way, sharded, **settings) for way in (False, True)
        ]
        found.append((name, *each))
    return found


def resumed(rank: int, ranks: int, folder: str) -> list[tuple[str, Ended, Ended]]:
    """Save with and go on without overlapc, and the other way round."""
    case = {"steps": 4, "save_strategy": "steps", "save_steps": 2}
    (_, plain, planned), *_ = pairs(rank, ranks, folder, [("llama", case)], True)
    found = [("whole", plain, planned)]
    for by in (False, True):
        saved = f"{folder}/0 {by}/checkpoint-2"
        ended = trained("llama", f"{folder}/{by}", not by, steps=4, resumes=saved)
        found.append((f"saved by overlapc: {by}", plain, ended))
    return found


def accelerated(rank: int, _ranks: int) -> tuple[list[Tensor], list[Tensor], int, list[str]]:
    """A loop of one's own with Accelerate's FSDP2 and its accumulation, without and planned."""
    os.environ.update(ACCELERATE_USE_CPU="true", LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2")
    let_cpus_shard()
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.utils import set_seed
    from torch.utils.data import DataLoader

    from overlapc.integrations.accelerate import overlap

    def run(planned: bool) -> tuple[list[Tensor], Any]:
        set_seed(0)
        shards = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
            cpu_ram_efficient_loading=False,
        )
        accelerator = Accelerator(gradient_accumulation_steps=2, fsdp_plugin=shards)
        model = llama()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        loader = DataLoader(rows_for("llama", 32), batch_size=2)  # type: ignore[arg-type]
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        plans = overlap(model, profile="estimate", solver="heu") if planned else None
        losses = []
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
        kept = [getattr(p, "_local_tensor", p).detach().clone() for p in model.parameters()]
        return [*losses, *kept], plans

    (expected, _), (found, plans) = run(False), run(True)
    return expected, found, len(plans.graphs), plans.fallbacks
