from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


class CudaRNGStatesTracker:
    def __init__(self) -> None:
        self.states_: dict[str, torch.Tensor] = {}
        self.seeds_: set[int] = set()

    def reset(self) -> None:
        self.states_, self.seeds_ = {}, set()

    def get_states(self) -> dict[str, torch.Tensor]:
        return dict(self.states_)

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        self.states_ = states

    @contextlib.contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        yield


def checkpoint(*_: Any, **__: Any) -> Any:
    raise NotImplementedError


def is_fp8_activation_recompute_enabled() -> bool:
    return False


def in_fp8_activation_recompute_phase() -> bool:
    return False


@contextlib.contextmanager
def activation_recompute_forward(*_: Any, **__: Any) -> Iterator[None]:
    yield
