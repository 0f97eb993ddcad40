"""`TrainStep` trains a model of Megatron's in a loop of one's own, without Megatron's schedules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from overlapc.core.door import Door
from overlapc.core.errors import OptionError
from overlapc.megatron.seams import NAMES
from overlapc.megatron.steps import Steps, innermost
from overlapc.planning.options import Options
from overlapc.ranks import roll
from overlapc.runtime.call import givens
from overlapc.runtime.foreign import untraced
from overlapc.runtime.loss import plainly

_SCHEDULES = ("auto", "plain")


class TrainStep(Door):
    """Adds up the gradients of several microbatches in `.grad`, as plain accumulation does:

        step = overlapc.megatron.TrainStep(model, loss, memory_budget="8GB")
        losses = step([(tokens, places, mask, labels), ...])

    and bitwise the same. `loss(model, *microbatch)` returns the loss; without it the model does.
    With `schedule="plain"` microbatches run one after the other; else they are merged. Options are
    those of `overlapc.megatron.patch`.

    The model's forward is planned as under `patch`; the loss function runs as it is, so that it may
    read anything. All ranks that run the model call this together. The model is whole (no stage of
    a pipeline) and not in Megatron's DDP: those belong to Megatron's own loop, and to `patch`.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[..., Tensor] | None = None,
        *,
        schedule: str = "auto",
        **options: Any,
    ) -> None:
        if schedule not in _SCHEDULES:
            raise OptionError(f"schedule={schedule!r}: expected one of {', '.join(_SCHEDULES)}")
        self.model = model
        self._loss = loss
        _refuse(model)
        parsed = Options.parse(options, "megatron.TrainStep")
        self._steps = Steps(parsed, schedule == "auto", fill=False, schedule="1f1b")
        roll.tell()

    @untraced
    def __call__(self, microbatches: Sequence[Any]) -> list[Any]:
        """Add the gradients of all microbatches to `.grad`; return the results for each,
        detached."""
        each = givens(microbatches)

        def accumulate(**_: Any) -> list[Any]:
            return [plainly(self._whole(*given.args, **given.kwargs)) for given in each]

        given = {"model": self.model, "num_microbatches": len(each), "forward_only": False}
        found: list[Any] = self._steps.run(NAMES[0], accumulate, given)
        return found

    def _whole(self, *args: Any, **kwargs: Any) -> Any:
        if self._loss is None:
            return self.model(*args, **kwargs)
        return self._loss(self.model, *args, **kwargs)

    @property
    def graphs(self) -> list[Any]:
        return self._steps.graphs

    @property
    def fallbacks(self) -> list[str]:
        return self._steps.fallbacks

    def explain(self) -> str:
        """Say what was planned, and what ran as plain Megatron."""
        return self._steps.explain()


def _refuse(model: nn.Module) -> None:
    """Raise for a model that only Megatron's own loop can train."""
    inner, ddp = innermost(model)
    hint = "expected it in Megatron's own loop, with overlapc.megatron.patch()"
    if ddp is not None:
        raise OptionError(f"TrainStep was given a model in {type(ddp).__name__}: {hint}")
    if isinstance(model, DistributedDataParallel):
        raise OptionError(
            "TrainStep was given a model in torch's DistributedDataParallel, whose hooks a planned "
            "model does not run; expected the model itself: reduce `.grad` when a step has run"
        )
    if not hasattr(inner, "config"):
        raise OptionError(
            f"TrainStep was given a {type(inner).__name__} without Megatron's config; expected a "
            "model of Megatron's, such as GPTModel: overlapc.TrainStep takes other models"
        )
    if not (getattr(inner, "pre_process", True) and getattr(inner, "post_process", True)):
        raise OptionError(f"TrainStep was given a stage of a pipeline: {hint}")
