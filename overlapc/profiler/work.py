"""`OpWork` is what an op has to do, whatever machine does it; `work_ns` how long one takes for it.

time of an op = launch + the longer of: flops / reachable flops · bytes moved / reachable rate

Where kernels were measured, a product's writing hides less of its flops (`Kernels.writing`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from overlapc.emulate.model import Kind
from overlapc.profiler.hardware import FP8, Hardware

# Of a number, in bytes: as kernels of the matrix units load it, all others by themselves; and as
# a product writes it, FP8's in half precision.
_LOADED = {"tf32": 4, FP8: 1, "float32": 16, "float64": 16}
_WRITTEN = {"tf32": 4, "float32": 4, "float64": 8}
WorkKind = Literal["free", "collective", "matmul", "attention", "stream"]


@dataclass(frozen=True)
class Product:
    """A product of matrices of m by k and of k by n, or of a batch of them; its layout is BLAS's:
    TN, NN or NT."""

    m: int
    n: int
    k: int
    layout: str
    batch: int = 1


@dataclass(frozen=True)
class AttentionWork:
    """Fused attention of so many queries in each of all sequences' heads, to so many keys (0: as
    many). `beside` the diagonal: a part of causal attention all of whose scores are made."""

    heads: int
    seq: int
    causal: bool
    backward: bool
    keys: int = 0
    beside: bool = False


@dataclass(frozen=True)
class OpWork:
    """What an op has to do. `smallest` is the smallest of the matrices' dimensions, for machines
    whose kernels nobody measured."""

    kind: WorkKind
    flops: float = 0.0
    dtype: str = "float32"
    moved_bytes: int = 0
    smallest: int = 1
    product: Product | None = None
    attention: AttentionWork | None = None
    traffic: tuple[Kind, int] | None = None  # of a collective: its kind and its bytes
    stream: str = ""  # the kernel that streams its bytes, where it has a rate of its own


def work_ns(machine: Hardware, work: OpWork, attention: float = 1.0) -> int:
    """How long the op occupies the device. Fused attention takes `attention` times as long as the
    machine's best kernels. A collective only has to be launched."""
    if work.kind == "free":
        return 0
    if work.kind == "collective":
        return machine.launch_ns
    flops_ns = _flops_ns(machine, work, attention) if work.flops else 0.0
    moves_ns = machine.stream_ns(work.moved_bytes, work.stream)
    return round(machine.launch_ns + max(flops_ns, moves_ns))


def _flops_ns(machine: Hardware, work: OpWork, attention: float) -> float:
    flops, kernels, mixed, product = work.flops, machine.kernels, work.attention, work.product
    dtype = work.dtype
    if dtype == "tf32" and dtype not in machine.peak_flops:
        dtype = "float32"
    if mixed is not None:
        flops *= attention
        part = machine.attention_efficiency
        if kernels is not None and (mixed.causal or mixed.beside):
            # Formulas count all scores.
            flops /= 2 if mixed.causal else 1
            kind = "attention_backward" if mixed.backward else "attention_forward"
            keys = mixed.keys or mixed.seq
            part = kernels.attention_part(mixed.heads, mixed.seq, keys, kind, mixed.causal)
        elif mixed.beside:
            flops *= 2  # the figure is of causal attention, half of whose scores are made
    elif kernels is not None and product is not None:
        if 1 in (product.m, product.n):
            return 0.0  # a matrix and a vector: memory decides
        loaded = _LOADED.get(dtype, 2)
        part = kernels.matmul_part(
            product.m, product.n, product.k, product.layout, product.batch, loaded
        )
        made = product.batch * product.m * product.n
        writes_ns = machine.memory_ns(_WRITTEN.get(dtype, 2) * made)
        return kernels.product_ns(machine.flops_ns(flops, dtype, part), writes_ns)
    else:
        part = machine.matmul_part(work.smallest)
    return machine.flops_ns(flops, dtype, part)
