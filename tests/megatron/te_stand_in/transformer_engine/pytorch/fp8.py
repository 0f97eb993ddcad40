from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


class FP8GlobalStateManager:
    enabled = False

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        return cls.enabled

    @classmethod
    def is_fp8_calibration(cls) -> bool:
        return False

    @classmethod
    def with_fp8_parameters(cls) -> bool:
        return False

    @classmethod
    def reset(cls) -> None:
        cls.enabled = False


@contextlib.contextmanager
def fp8_autocast(enabled: bool = True, *_: Any, **__: Any) -> Iterator[None]:
    before, FP8GlobalStateManager.enabled = FP8GlobalStateManager.enabled, enabled
    try:
        yield
    finally:
        FP8GlobalStateManager.enabled = before


@contextlib.contextmanager
def fp8_model_init(*_: Any, **__: Any) -> Iterator[None]:
    yield
