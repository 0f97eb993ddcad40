"""Two process groups pretend to have a fast network, so that overlap can be tried anywhere.

`emulated link` (`overlapc.emulate.link`)
    Real processes on one machine, real data through gloo, and a wait that ends no earlier
    than an alpha-beta link would have delivered. For tests and honest small measurements.

`fabric` (`overlapc.emulate.fabric`)
    One process that believes it is one of N ranks. Values are those of N ranks holding the
    same data; the time of a collective is modelled (CPU) or enqueued on a side stream (GPU).
    For sweeps over N, and for one GPU.

`clock="virtual"` of both measures in virtual time (`overlapc.tools.timing`), for machines that are
busy or have fewer cores than ranks.

Importing this package does not import torch; touching `init_link` or `init_fabric` does.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from overlapc.emulate.model import Link
from overlapc.tools.timing import now_ns, virtual_clock

if TYPE_CHECKING:
    from overlapc.emulate.fabric import Fabric, init_fabric
    from overlapc.emulate.link import init_link

__all__ = ["Fabric", "Link", "init_fabric", "init_link", "now_ns", "virtual_clock"]

_NEEDS_TORCH = {
    "Fabric": "overlapc.emulate.fabric",
    "init_fabric": "overlapc.emulate.fabric",
    "init_link": "overlapc.emulate.link",
}


def __getattr__(name: str) -> Any:
    if name in _NEEDS_TORCH:
        return getattr(import_module(_NEEDS_TORCH[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
