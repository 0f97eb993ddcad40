"""Loops of HuggingFace's Trainer, Accelerate, PEFT and Lightning. Models are made of small
configurations, with random weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

from tests.loops.loop import Door, Net, State, batches, loop, sgd, state_of
from tests.vision_ops import declare

declare()  # some of these libraries import torchvision

HF, ACCELERATE, LIGHTNING = ("transformers", "accelerate"), ("accelerate",), ("lightning",)


def llama(**options: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    config = {"vocab_size": 32, "max_position_embeddings": 32, "use_cache": False}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, **config, **options))


def texts(rows: int = 8) -> list[dict[str, Tensor]]:
    made = torch.Generator().manual_seed(1)
    drawn = [torch.randint(0, 32, (8,), generator=made) for _ in range(rows)]
    return [{"input_ids": words, "labels": words} for words in drawn]


def batch_of(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


# --------------------------------------------------------------------------- Trainer


def by_trainer(door: Door, model: Any, resumes: bool = False, **settings: Any) -> State:
    """Two steps of the Trainer. One that `resumes` takes the second in a Trainer of its own."""
    from transformers import Trainer, TrainingArguments

    quiet = {"report_to": [], "disable_tqdm": True, "logging_steps": 1, "use_cpu": True}
    saves = {"save_strategy": "steps" if resumes else "no", "save_steps": 1}
    steps = {"max_steps": 2, "per_device_train_batch_size": 2, "learning_rate": 1e-2}
    folder, first = str(door.folder / "out"), {"max_steps": 1} if resumes else {}
    twin = door.optimize(model)

    def trainer(**more: Any) -> Trainer:
        arguments = TrainingArguments(folder, **(quiet | saves | steps | settings | more))
        return Trainer(twin, arguments, train_dataset=texts(), eval_dataset=texts(2))

    run = trainer(**first)
    run.train()
    if resumes:
        run = trainer()
        run.train(resume_from_checkpoint=True)
    losses = [each["loss"] for each in run.state.log_history if "loss" in each]
    return state_of(model, *losses)


@loop(*HF)
def hf_trainer(door: Door) -> State:
    return by_trainer(door, llama())


@loop(*HF)
def hf_trainer_in_bfloat16(door: Door) -> State:
    return by_trainer(door, llama(), bf16=True)


@loop(*HF)
def hf_trainer_that_accumulates(door: Door) -> State:
    return by_trainer(door, llama(), gradient_accumulation_steps=2)


@loop(*HF)
def hf_trainer_with_checkpointing(door: Door) -> State:
    return by_trainer(door, llama(), gradient_checkpointing=True)


@loop(*HF)
def hf_trainer_with_smoothed_labels(door: Door) -> State:
    return by_trainer(door, llama(), label_smoothing_factor=0.1)


@loop(*HF)
def hf_trainer_with_adafactor_and_warmup(door: Door) -> State:
    return by_trainer(door, llama(), optim="adafactor", warmup_steps=1, max_grad_norm=0.1)


@loop(*HF)
def hf_trainer_that_evaluates(door: Door) -> State:
    return by_trainer(door, llama(), eval_strategy="steps", eval_steps=1)


@loop(*HF)
def hf_trainer_that_resumes(door: Door) -> State:
    return by_trainer(door, llama(), resumes=True)


@loop(*HF, "peft")
def hf_trainer_with_lora(door: Door) -> State:
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.1)
    return by_trainer(door, get_peft_model(llama(), lora))


@loop(*HF)
def hf_with_hidden_states_in_a_step(door: Door) -> State:
    model = llama()
    step, optimizer, losses = door.step(model), sgd(model), []
    asked = batch_of(texts(2)) | {"output_hidden_states": True}
    for _ in range(2):
        losses += step([asked, asked])
        optimizer.step()
        optimizer.zero_grad()
    return state_of(model, *losses)


# --------------------------------------------------------------------------- Accelerate


def by_accelerate(door: Door, saves: bool = False, **settings: Any) -> State:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, GradientState, PartialState):  # of the process, kept by it
        state._reset_state()
    accelerator = Accelerator(cpu=True, **settings)
    model = door.optimize(Net())
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    losses = []
    for x, y in batches(4):
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss)
        if saves:
            accelerator.save_state(str(door.folder / "state"))
            accelerator.load_state(str(door.folder / "state"))
    return state_of(accelerator.unwrap_model(model), *losses)


@loop(*ACCELERATE)
def accelerate_as_it_is(door: Door) -> State:
    return by_accelerate(door)


@loop(*ACCELERATE)
def accelerate_in_bfloat16(door: Door) -> State:
    return by_accelerate(door, mixed_precision="bf16")


@loop(*ACCELERATE)
def accelerate_that_accumulates(door: Door) -> State:
    return by_accelerate(door, gradient_accumulation_steps=2)


@loop(*ACCELERATE)
def accelerate_that_saves_and_loads(door: Door) -> State:
    return by_accelerate(door, saves=True)


# --------------------------------------------------------------------------- Lightning


def lit(make: Callable[[], Any] = Net, by_hand: bool = False, goes_round: bool = False) -> Any:
    import lightning

    class Lit(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = make()
            self.automatic_optimization = not by_hand

        def forward(self, x: Tensor) -> Tensor:
            return self.network(x)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            loss = F.cross_entropy(self.network(x) if goes_round else self(x), y)
            self.log("loss", loss)
            if by_hand:
                optimizer = self.optimizers()
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("validation", F.cross_entropy(self(batch[0]), batch[1]))

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    return Lit()


def by_lightning(door: Door, model: Any, twin: Any, **settings: Any) -> State:
    import lightning

    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(door.folder),
        **settings,
    )
    rows = batches(2 * settings.get("accumulate_grad_batches", 1))
    loaders = [DataLoader(each, batch_size=None) for each in (rows, batches(1))]
    trainer.fit(twin, *loaders)
    return state_of(model, trainer.callback_metrics["loss"], trainer.callback_metrics["validation"])


@loop(*LIGHTNING)
def lightning_as_it_is(door: Door) -> State:
    model = lit()
    return by_lightning(door, model, door.optimize(model))


@loop(*LIGHTNING)
def lightning_with_its_network_optimized(door: Door) -> State:
    model = lit(lambda: door.optimize(Net()), goes_round=True)
    return by_lightning(door, model, model, gradient_clip_val=0.1)


@loop(*LIGHTNING)
def lightning_by_hand(door: Door) -> State:
    model = lit(by_hand=True)
    return by_lightning(door, model, door.optimize(model))


@loop(*LIGHTNING)
def lightning_that_accumulates_in_bfloat16(door: Door) -> State:
    model = lit()
    settings: dict[str, Any] = {"accumulate_grad_batches": 2, "precision": "bf16-mixed"}
    return by_lightning(door, model, door.optimize(model), **settings)
