"""The hardware that is described here, by its names: `known_hardware`, `hardware_name`."""

from __future__ import annotations

from functools import cache
from pathlib import Path

FOLDER = Path(__file__).with_name("hardware")
# What people call a machine of which there is one kind, or one that is meant
CALLED = {
    "a100": "a100-sxm-80",
    "a100-80gb": "a100-sxm-80",
    "a100-sxm": "a100-sxm-80",
    "a100-sxm4-80gb": "a100-sxm-80",
    "a100-40gb": "a100-sxm-40",
    "a100-sxm4-40gb": "a100-sxm-40",
    "a100-pcie": "a100-pcie-80",
    "a800": "a800-sxm-80",
    "h100": "h100-sxm",
    "h100-80gb": "h100-sxm",
    "h100-sxm5": "h100-sxm",
    "h100-sxm-80": "h100-sxm",
    "h200": "h200-sxm",
    "h200-sxm5": "h200-sxm",
    "b200-sxm": "b200",
    "v100": "v100-sxm2-32",
    "v100-sxm2": "v100-sxm2-32",
    "4090": "rtx4090",
    "rtx-4090": "rtx4090",
}


@cache
def known_hardware() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in FOLDER.glob("*.toml")))


def hardware_name(name: str) -> str:
    """The name under which this hardware is known here; the name itself, if it is not."""
    plain = name.lower().replace("_", "-").removeprefix("nvidia-")
    plain = CALLED.get(plain, plain)
    return plain if plain in known_hardware() else name
