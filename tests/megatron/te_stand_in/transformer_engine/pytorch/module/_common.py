from __future__ import annotations

import queue
from typing import Any


class WeightGradStore:
    """Weight gradients laid by until `backward_dw` asks for them."""

    def __init__(self, delay_wgrad_compute: bool = False, ub_bulk_wgrad: bool = False) -> None:
        self.context: Any = queue.Queue() if delay_wgrad_compute else None
        self.enabled = delay_wgrad_compute

    def delay_wgrad_compute(self) -> bool:
        return self.enabled

    def put(self, tensor_list: list[Any], func: Any) -> None:
        self.context.put([tensor_list, func])

    def pop(self) -> Any:
        tensors, function = self.context.get()
        return function(*tensors), tensors
