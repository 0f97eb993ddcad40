"""`OverlapcCallback` runs the training steps of Megatron-Bridge planned.

    from megatron.bridge.training.pretrain import pretrain
    from overlapc.megatron.bridge import OverlapcCallback

    pretrain(config, forward_step, callbacks=[OverlapcCallback(memory_budget="40GB")])

Bridge's `CallbackManager` registers the methods that are called like its events, whatever class
they are of: nothing of Bridge is imported here.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from overlapc.megatron import explain, patch

_TOLD_AFTER = 2  # steps: the first plans, the second shows that it stays planned


class OverlapcCallback:
    """A callback of Megatron-Bridge: patches Megatron when training starts, and rank 0 prints
    `explain()` after the second step, or at the end if there is none. Options are those of
    `overlapc.megatron.patch`. All ranks must pass it."""

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._steps = 0

    def on_train_start(self, context: Any) -> None:
        self._steps = 0
        patch(**self._options)

    def on_train_step_end(self, context: Any) -> None:
        self._steps += 1
        if self._steps == _TOLD_AFTER:
            _tell()

    def on_train_end(self, context: Any) -> None:
        if 0 < self._steps < _TOLD_AFTER:
            _tell()


def _tell() -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(f"overlapc, on rank 0:\n{explain()}", flush=True)
