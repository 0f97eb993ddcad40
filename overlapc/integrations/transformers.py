"""One line for HuggingFace's Trainer, with FSDP2, DistributedDataParallel or a lone process:

    trainer = Trainer(model, arguments, train_dataset=texts)
    planned = overlap(trainer)
    trainer.train()
    print(planned.explain())

The Trainer's model is planned in place when training begins, behind Accelerate's `prepare`, and is
its own again when training ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers import Trainer, TrainerCallback

from overlapc.core.errors import OptionError, OverlapcError
from overlapc.integrations.in_place import InPlace, in_place
from overlapc.planning.options import Options
from overlapc.runtime.call import alike, givens
from overlapc.runtime.train_step import TrainStep
from overlapc.tools.told import warn

_COMPILED = (
    "overlapc plans nothing of a model that TrainingArguments(torch_compile=True) compiles: leave "
    "torch_compile out"
)


class Overlap(TrainerCallback):  # type: ignore[misc]  # transformers may be absent
    """Plans a Trainer's model while it trains."""

    def __init__(self, **options: Any) -> None:
        Options.parse(options)  # an error now, not when training begins
        self.options = options
        self.planned: InPlace | None = None
        self.merged: MergedAccumulation | None = None
        self.compiled = False  # by the Trainer itself

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        model = given["model"]
        if args.torch_compile:
            self.compiled = True
            warn(_COMPILED)
            return
        if self.planned is None or self.planned.model is not model:
            self.planned = in_place(model, **self.options)
        self.planned.begin()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.planned is not None:
            self.planned.restore()

    def __getattr__(self, name: str) -> Any:
        """What the model's twin says: `graphs`, `fallbacks`, `differences`, `step_ms` …"""
        if name.startswith("_") or name in ("planned", "merged", "options", "compiled"):
            raise AttributeError(name)
        if self.planned is None and self.compiled:
            if name == "fallbacks":
                return [_COMPILED]
            raise AttributeError(f"{_COMPILED}; found no .{name}")
        if self.planned is None:
            raise AttributeError(
                f"nothing is planned yet: expected trainer.train() before .{name} is read"
            )
        return getattr(self.planned, name)

    def explain(self) -> str:
        """What is hidden, and what is not."""
        if self.planned is None and self.compiled:
            return _COMPILED
        if self.planned is None:
            raise OverlapcError("nothing is planned yet: expected trainer.train() before explain()")
        step = None if self.merged is None else self.merged.step
        parts = [] if step is None else [step.explain()]
        if self.planned.graphs or not parts:
            parts.append(self.planned.explain())
        return "\n\n".join(parts)


class MergedAccumulation:
    """Runs the microbatches of one accumulation as one `TrainStep`: when the Trainer comes to the
    first. It is given the losses of the others when it comes to them."""

    def __init__(self, trainer: Trainer, plans: Overlap) -> None:
        self.trainer, self.plans = trainer, plans
        self.step: TrainStep | None = None
        self._batches: Sequence[Any] = ()
        self._losses: Iterator[Tensor] = iter(())
        self._get_batches, self._one_step = trainer.get_batch_samples, trainer.training_step
        trainer.get_batch_samples = self.get_batch_samples
        trainer.training_step = self.training_step

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        found = self._get_batches(*args, **kwargs)
        self._batches, self._losses = found[0], iter(())  # an interrupted one's are nobody's
        return found

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        for loss in self._losses:
            return loss
        planned, each = self.plans.planned, self._batches
        if planned is None or len(each) < 2 or inputs is not each[0]:
            return self._one_step(model, inputs, num_items_in_batch)
        model.train()
        if self.step is None or self.step.model is not model:
            self.step = TrainStep(model, self._loss, reduce="last", **self.plans.options)
        each = [(self.trainer._prepare_inputs(one), num_items_in_batch) for one in each]
        self._refuse_ragged(each)
        planned.restore()  # the step calls the model itself
        try:
            with self.trainer.compute_loss_context_manager():
                self._losses = iter(self.step(each))
        finally:
            planned.begin()
        return next(self._losses)

    def _refuse_ragged(self, each: Sequence[Any]) -> None:
        try:
            alike(givens(each))
        except OptionError:
            shapes = [
                [list(v.shape) for v in one.values() if hasattr(v, "shape")] for one, _ in each
            ]
            raise OptionError(
                "overlap(trainer, merge=True): the batches of an accumulation have shapes "
                f"{'; '.join(map(str, shapes))}; expected one shape, on all ranks: pad all "
                "batches to one length (padding='max_length'), pack them, or leave merge out"
            ) from None

    def _loss(self, model: Any, inputs: Mapping[str, Any], num_items_in_batch: Any) -> Tensor:
        """As `Trainer.training_step` has it."""
        trainer = self.trainer
        given = dict(inputs)
        loss: Tensor = trainer.compute_loss(model, given, num_items_in_batch=num_items_in_batch)
        scaled = trainer.loss_is_scaled_for_ga
        if scaled is None:
            by_model = trainer.model_accepts_loss_kwargs and num_items_in_batch is not None
            scaled = by_model or trainer.compute_loss_func is not None
        return loss if scaled else loss / trainer.current_gradient_accumulation_steps


def overlap(trainer: Trainer, *, merge: bool = False, **options: Any) -> Overlap:
    """Plan what a Trainer trains; `options` are those of `overlapc.optimize`.

    `merge=True`: the microbatches of an accumulation hide each other's communication, as in
    `TrainStep`. This is for FSDP2, and for batches of one shape on all ranks (packed, or padded to
    one length).
    """
    planned = Overlap(**options)
    trainer.add_callback(planned)
    if merge and (why := _unmerged(trainer)):
        warn(f"overlapc merges no microbatches: {why}; they are planned one by one")
    elif merge:
        Options.parse(options, "TrainStep")  # which has fewer
        planned.merged = MergedAccumulation(trainer, planned)
    return planned


def _unmerged(trainer: Trainer) -> str:
    """Why the microbatches of this Trainer cannot be merged, or ""."""
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)  # a lone process has none
    version = getattr(plugin, "fsdp_version", 1)
    by_fsdp2 = trainer.is_fsdp_enabled and version == 2
    if not (by_fsdp2 or isinstance(trainer.model, FSDPModule)):
        return "the Trainer does not shard its model by FSDP2"
    if type(trainer).training_step is not Trainer.training_step:
        return f"{type(trainer).__name__} has a training_step of its own"
    accumulation = trainer.accelerator.gradient_state.plugin_kwargs
    if accumulation.get("sync_each_batch", False):
        return "the Trainer reduces gradients of each microbatch (sync_each_batch)"
    if trainer.accelerator.scaler is not None:
        return "the loss is scaled (fp16)"
    return ""
