"""`mend_gathers` keeps PyTorch's gloo from damaging the heap where plans let all-gathers overlap.

`ProcessGroupGloo` writes down the name of the collective that it completed last, and its threads do
so without a lock (`lastCompletedWorkName`, up to torch 2.13 at least). A name of more than 15
characters lies on the heap: two threads that write one at once free the name before it twice. Of
functional collectives only all-gathers have so long a name (ALLGATHER_COALESCED).
"""

from __future__ import annotations

from functools import cache
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

_CPU = torch.device("cpu")


@cache
def mend_gathers() -> torch.library.Library | None:
    """From now on functional all-gathers over gloo are run as `_ALLGATHER_BASE`: the same bytes
    under a short name, and without the copies of the other."""
    if not (dist.is_available() and dist.is_gloo_available()):
        return None
    library = torch.library.Library("_c10d_functional", "IMPL")
    library.impl("all_gather_into_tensor", _all_gather, "CPU")
    return library


def _all_gather(part: Tensor, ranks: int, name: Any) -> Tensor:
    group = dist.distributed_c10d._resolve_process_group(name)
    if part.dim() == 0 or part.is_complex() or not _is_gloo(group):
        own = torch._C.DispatchKey.CompositeExplicitAutograd
        op = torch.ops._c10d_functional.all_gather_into_tensor.default
        return cast(Tensor, op._op_dk(own, part, ranks, name))
    whole = part.new_empty((part.shape[0] * ranks, *part.shape[1:]))
    work = group._allgather_base(whole, part.contiguous())
    torch._C._distributed_c10d._register_work(whole, work)
    return whole


def _is_gloo(group: dist.ProcessGroup) -> bool:
    return _CPU in group._device_types and isinstance(
        group._get_backend(_CPU), dist.ProcessGroupGloo
    )
