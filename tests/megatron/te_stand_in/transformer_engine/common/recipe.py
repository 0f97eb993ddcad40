from __future__ import annotations

from typing import Any


class Recipe:
    def __init__(self, *_: Any, **given: Any) -> None:
        vars(self).update(given)


class DelayedScaling(Recipe): ...


class Float8CurrentScaling(Recipe): ...


class Float8BlockScaling(Recipe): ...


class MXFP8BlockScaling(Recipe): ...


class NVFP4BlockScaling(Recipe): ...


class CustomRecipe(Recipe): ...


class Format:
    E4M3 = "E4M3"
    HYBRID = "HYBRID"
