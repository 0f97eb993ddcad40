"""`PipelineSchedule` replaces one of `torch.distributed.pipelining`'s schedules by a `Pipeline`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage

from overlapc.core.door import Door
from overlapc.core.errors import OptionError
from overlapc.core.schedule import Schedule
from overlapc.planning.report import Report
from overlapc.runtime.pipeline import Pipeline


class PipelineSchedule(Door):
    """Runs `PipelineStage`s as one of PyTorch's schedules does, from the same call:

        schedule = Schedule1F1B(stage, n_microbatches=8, loss_fn=loss)               # before
        schedule = overlapc.PipelineSchedule(stage, n_microbatches=8, loss_fn=loss)  # after
        schedule.step(tokens)                        # on the first rank, as before
        schedule.step(target=targets, losses=losses) # on the last

    `stage` is this rank's stage, or a list of them; `schedule` and all other options are those of
    `overlapc.Pipeline`. Gradients are divided by the number of microbatches unless `scale_grads` is
    False. Outputs of the last stage are not kept, so `step` returns nothing.
    """

    def __init__(
        self,
        stage: PipelineStage | Sequence[PipelineStage],
        n_microbatches: int,
        loss_fn: Callable[..., Tensor] | None = None,
        *,
        schedule: Schedule | str = "1f1b",
        scale_grads: bool = True,
        **options: Any,
    ) -> None:
        stages: list[Any] = list(stage) if isinstance(stage, (list, tuple)) else [stage]
        for each in stages:
            if not isinstance(each, PipelineStage):
                raise OptionError(
                    f"PipelineSchedule was given a {type(each).__name__}, expected PipelineStage "
                    "or a list of them; modules go to overlapc.Pipeline"
                )
        modules = {each.stage_index: each.submod for each in stages}
        last = stages[0].num_stages - 1
        if last in modules and loss_fn is None:
            raise OptionError("loss_fn=None: expected the loss on the rank of the last stage")
        self.pipeline = Pipeline(
            modules,
            schedule,
            n_microbatches,
            loss_fn if last in modules else None,
            group=options.pop("group", stages[0].group),
            **options,
        )
        self._count = n_microbatches
        self._scale = scale_grads
        self._first, self._last = 0 in modules, last in modules

    def step(
        self, *args: Tensor, target: Tensor | None = None, losses: list[Tensor] | None = None
    ) -> None:
        """Run one training step on a whole batch, which is cut along its first dimension. The first
        stage's rank passes `args`, the last stage's rank passes `target` and gets `losses`
        filled."""
        if self._last and target is None:
            raise OptionError("step() without target on the rank of the last stage: pass it")
        inputs = [self._chunks(arg) for arg in args] if self._first else []
        if self._first and not inputs:
            raise OptionError("step() without inputs on the rank of the first stage: pass them")
        targets = self._chunks(target) if self._last else []
        found = self.pipeline(list(zip(*inputs, strict=True)), targets)
        if self._scale:
            modules = self.pipeline.modules.values()
            for parameter in {id(p): p for m in modules for p in m.parameters()}.values():
                if parameter.grad is not None:
                    parameter.grad.div_(self._count)
        if losses is not None and self._last:
            losses[:] = found

    @property
    def graphs(self) -> list[Report]:
        return self.pipeline.graphs

    @property
    def step_ms(self) -> float:
        return self.pipeline.step_ms

    @property
    def peak_bytes(self) -> int:
        return self.pipeline.peak_bytes

    @property
    def differences(self) -> list[str]:
        return self.pipeline.differences

    def explain(self) -> str:
        return self.pipeline.explain()

    def _chunks(self, batch: Tensor | None) -> list[Tensor]:
        if not isinstance(batch, Tensor) or batch.dim() == 0 or len(batch) % self._count:
            shape = tuple(batch.shape) if isinstance(batch, Tensor) else type(batch).__name__
            raise OptionError(
                f"a batch of {shape}: expected a tensor whose first dimension can be divided by "
                f"{self._count} microbatches"
            )
        return [chunk.contiguous() for chunk in torch.tensor_split(batch, self._count)]
