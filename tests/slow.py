"""Hardware made up for tests: what is planned on it does not depend on what a machine measures."""

from __future__ import annotations

from pathlib import Path

# Work takes as long as its bytes (half of it, half as long), and so does traffic, at a third of
# the rate.
SLOW = """
name = "slow"
status = "made up"
base = "v100-sxm2-32"
memory.bytes_per_s = { value = 1e8, source = "made up" }
compute.launch_ns = { value = 10, source = "made up" }
intra.alpha_ns = { value = 10, source = "made up" }
intra.bytes_per_s = { value = 3e7, source = "made up" }
"""
# Work as on a CPU, and a link on which slices pay.
LINK = """
name = "slow"
status = "made up"
base = "cpu-gloo"
intra.alpha_ns = { value = 10, source = "made up" }
intra.bytes_per_s = { value = RATE, source = "made up" }
intra.slowdown.compute_permille = { value = 1000, source = "made up" }
"""


def slow_hardware(folder: Path) -> str:
    """A file of hardware on which slices pay, and steps in pairs."""
    path = folder / "slow.toml"
    path.write_text(SLOW)
    return str(path)


def slow_link(folder: Path, rate: str = "3e7") -> str:
    """A file of hardware with a link of so many bytes a second."""
    path = folder / "slow.toml"
    path.write_text(LINK.replace("RATE", rate))
    return str(path)
