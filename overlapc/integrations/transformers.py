"""One line for HuggingFace's Trainer, with FSDP2, DistributedDataParallel or a lone process:

    trainer = Trainer(model, arguments, train_dataset=texts)
    planned = overlap(trainer)
    trainer.train()
    print(planned.explain())

The Trainer's model is planned in place when training begins, behind Accelerate's `prepare`, and is
its own again when training ends.
"""

from __future__ import annotations

from typing import Any

from transformers import Trainer, TrainerCallback

from overlapc.errors import OverlapcError
from overlapc.integrations.in_place import InPlace, in_place
from overlapc.planning.options import Options


class Overlap(TrainerCallback):  # type: ignore[misc]  # transformers may be absent
    """Plans a Trainer's model while it trains."""

    def __init__(self, **options: Any) -> None:
        Options.parse(options)  # an error now, not when training begins
        self.options = options
        self.planned: InPlace | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        model = given["model"]
        if self.planned is None or self.planned.model is not model:
            self.planned = in_place(model, **self.options)
        self.planned.begin()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.planned is not None:
            self.planned.restore()

    def explain(self) -> str:
        """What is hidden, and what is not."""
        if self.planned is None:
            raise OverlapcError("nothing is planned yet: expected trainer.train() before explain()")
        said: str = self.planned.explain()
        return said


def overlap(trainer: Trainer, **options: Any) -> Overlap:
    """Plan what a Trainer trains; `options` are those of `overlapc.optimize`."""
    planned = Overlap(**options)
    trainer.add_callback(planned)
    return planned
