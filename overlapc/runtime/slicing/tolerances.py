"""How far what a batch gives in slices is from what it gives uncut, and how far it may be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from overlapc.passes.trace import Captured
from overlapc.state.objects import alike

# How far slices may be from the uncut batch, relative to a tensor's largest number, by the coarsest
# type that the graph works with.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.05}
TOLERANCE |= {torch.complex128: TOLERANCE[torch.float64], torch.complex64: TOLERANCE[torch.float32]}
_NOISE = 0.01  # of the largest number of all gradients: what is smaller is compared with that


def tolerance_of(captured: Captured) -> float:
    """How far slices of this graph may be from the batch."""
    nodes = captured.joint.graph.nodes
    kinds = {n.meta["val"].dtype for n in nodes if isinstance(n.meta.get("val"), Tensor)}
    if torch.get_float32_matmul_precision() != "highest":
        kinds.add(torch.float16)
    return max([TOLERANCE[kind] for kind in kinds if kind in TOLERANCE], default=0.0)


def farthest(
    expected: Mapping[str, Any], found: Mapping[str, Any], tolerance: float
) -> tuple[float, str]:
    """How far the farthest of all is from what is expected, relative to its largest number, and
    which of them is farther than the tolerance; "" if none is."""
    gradients = [g for name, g in expected.items() if "gradient" in name and g is not None]
    least = _NOISE * max([_largest(gradient) for gradient in gradients], default=0.0)
    farthest, different = 0.0, ""
    for name, value in expected.items():
        far, how = distance(value, found[name], least if "gradient" in name else 0.0)
        farthest = max(farthest, far)
        if not far <= tolerance and not different:
            more = f"{how}, expected at most {tolerance:g}"
            different = f"{name} is another in slices ({more})"
    return farthest, different


def distance(one: Any, other: Any, least: float = 0.0) -> tuple[float, str]:
    """How far the two are apart, relative to the largest number of `one`, or to `least` if that is
    larger; infinite if they cannot be compared. And the same in words."""
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        said = [
            f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else repr(x) for x in (one, other)
        ]
        return (0.0 if alike(one, other) else float("inf")), f"{said[1]} for {said[0]}"
    if one.shape != other.shape:
        return float("inf"), f"of shape {tuple(other.shape)} for {tuple(one.shape)}"
    if torch.equal(one, other):  # which nan does not
        return 0.0, ""
    if not one.is_floating_point() and not one.is_complex():
        return float("inf"), "other numbers"
    one, other = _numbers(one), _numbers(other)
    if not one.isfinite().any():
        return float("inf"), "no number in the uncut batch, so they cannot be compared"
    same = (one == other) | (one.isnan() & other.isnan())
    far = _largest((one - other)[~same]) / (max(_largest(one[one.isfinite()]), least) or 1.0)
    return far, f"{far:.2g} of its largest number apart"


def _numbers(tensor: Tensor) -> Tensor:
    real = torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor
    return real.detach().double()


def _largest(tensor: Tensor) -> float:
    return float(tensor.detach().abs().max()) if tensor.numel() else 0.0


def dense(gradient: Tensor | None) -> Tensor | None:
    """A gradient that can be compared."""
    return gradient.to_dense() if gradient is not None and gradient.is_sparse else gradient
