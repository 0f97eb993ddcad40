"""Functions that torch 2.13 renamed, by one name."""

from __future__ import annotations

import torch.distributed._functional_collectives as funcol

_KIND = "single" if hasattr(funcol, "reduce_scatter_single_autograd") else "tensor"
scatter_single = getattr(funcol, f"reduce_scatter_{_KIND}_autograd")
gather_single = getattr(funcol, f"all_gather_{_KIND}_autograd")
