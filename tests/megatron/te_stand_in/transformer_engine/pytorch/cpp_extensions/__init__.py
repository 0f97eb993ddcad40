from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..kernels import kernel


def general_gemm(
    A: Tensor, B: Tensor, out_dtype: torch.dtype | None = None, layout: str = "TN", **given: Any
) -> tuple[Tensor, None, None, None]:
    """The product of matrices as columns lie in memory: T turns the first or second one."""
    kernel(A, B)
    one = A.float() if layout[0] == "N" else A.float().t()
    other = B.float() if layout[1] == "N" else B.float().t()
    product = other @ one
    if given.get("bias") is not None and not given.get("grad"):
        product = product + given["bias"].float()
    return product.to(out_dtype or A.dtype), None, None, None
