from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..fp8 import FP8GlobalStateManager
from ._common import WeightGradStore

_dummy_wgrads: dict[tuple[int, int, torch.dtype], Tensor] = {}


def get_dummy_wgrad(shape: list[int], dtype: torch.dtype, zero: bool = False) -> Tensor:
    """One tensor for all weights of a shape; it has the numbers that memory had."""
    key = (shape[0], shape[1], dtype)
    if key not in _dummy_wgrads:
        _dummy_wgrads[key] = torch.full(shape, 7.0, dtype=dtype)
    if zero:
        _dummy_wgrads[key].fill_(0)
    return _dummy_wgrads[key].detach()


class TransformerEngineBaseModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fp8_initialized = self.fp8 = self.fp8_calibration = False
        self.fp8_meta: dict[str, Any] = {"fp8_checkpoint": False, "fp8_group": None}
        self.quantizers: dict[str, list[Any]] = {"scaling_fwd": [], "scaling_bwd": []}
        self.tp_group: Any = None
        self.tp_size = 1
        self.sequence_parallel = False
        self._fp8_workspaces: dict[str, Any] = {}
        self.activation_dtype: torch.dtype | None = None
        self.wgrad_accumulation_and_reduce_hooks: list[Any] = []
        self.wgrad_store: WeightGradStore | None = None

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        self.tp_group = tp_group
        self.tp_group_initialized = True

    def enter(self, inp: Tensor) -> Tensor:
        """What TE's `prepare_forward` leaves in the module."""
        self.allow_different_data_and_param_types = False
        if self.activation_dtype != inp.dtype:
            self.activation_dtype = inp.dtype
        self.fp8_parameters = FP8GlobalStateManager.with_fp8_parameters()
        self.fp8 = FP8GlobalStateManager.is_fp8_enabled()
        self.fp8_calibration = FP8GlobalStateManager.is_fp8_calibration()
        self.fp8_meta["fp8_checkpoint"] = self.fp8 or self.fp8_calibration
        self.fp8_initialized = False
        return inp if inp.is_contiguous() else inp.contiguous()

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Any) -> None:
        self.wgrad_accumulation_and_reduce_hooks.append(hook)

    def backward_dw(self) -> None:
        store = self.wgrad_store
        if store is None or not store.delay_wgrad_compute():
            return
        found, (weight, *_) = store.pop()
        if not weight.grad_added_to_main_grad:
            weight.grad = found
        for hook in self.wgrad_accumulation_and_reduce_hooks:
            hook()
