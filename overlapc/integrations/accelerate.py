"""One line behind Accelerate's `prepare`, for FSDP2, DistributedDataParallel or a lone process:

model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
planned = overlap(model)
...
print(planned.explain())
"""

from __future__ import annotations

from overlapc.integrations.in_place import InPlace
from overlapc.integrations.in_place import in_place as overlap

__all__ = ["InPlace", "overlap"]
