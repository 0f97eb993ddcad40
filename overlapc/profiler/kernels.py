"""`fit` says how fast a GPU's kernels are by their shapes, from times measured on it.

`time_products` and `time_attention` measure them. Each figure is the one whose times are nearest to
those measured, by the median of their errors.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

from overlapc.profiler.shapes import Kernels

Timer = Callable[[Callable[[], Any]], float]

# Tokens, width of what comes in, width of what goes out: of layers 1024 to 12288 wide, whole and
# divided among tensor-parallel ranks.
_LAYERS = (
    (8192, 1024, 4096),
    (4096, 2048, 2048),
    (8192, 2048, 8192),
    (2048, 4096, 1536),
    (8192, 4096, 4096),
    (8192, 4096, 12288),
    (8192, 5120, 5120),
    (4096, 8192, 3584),
    (4096, 8192, 8192),
    (8192, 6144, 2304),
    (2048, 12288, 6144),
)
# Heads of all sequences, tokens of each.
_ATTENTION = ((8, 2048), (64, 2048), (128, 2048), (4, 4096), (64, 4096), (8, 8192), (32, 8192))
_WIDTH = 128  # of a head
_STREAMED = (16384, 4096)  # of what passes through a norm; 134 MB in bfloat16
_SCORES = (4096, 32000)  # of a vocabulary's words for each token
_BACKWARD = 2.5  # times the forward's flops: five products instead of two
_LAYOUTS = ("tn", "nn", "nt")
_RAMPS = (16, 32, 64, 96, 128, 192, 256, 384, 512)
_FILLS = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0)


@dataclass(frozen=True)
class ProductTime:
    """A product of m by k and of k by n, and how long it took beyond its launch."""

    m: int
    n: int
    k: int
    layout: str
    ns: float

    def rate(self) -> float:
        return 2 * self.m * self.n * self.k / self.ns * 1e9


@dataclass(frozen=True)
class AttentionTime:
    """Causal attention of so many heads of all sequences, and how long it took."""

    heads: int
    seq: int
    backward: bool
    ns: float

    def rate(self) -> float:
        """Of the half of the scores that are made."""
        flops = 2 * self.heads * self.seq**2 * _WIDTH * (_BACKWARD if self.backward else 1)
        return flops / self.ns * 1e9


def layers() -> Iterator[tuple[int, int, int, str]]:
    """m, n, k and layout of every product to time: a layer's forward, its input's gradient, and its
    weight's."""
    for tokens, width, wide in _LAYERS:
        yield tokens, wide, width, "tn"
        yield tokens, width, wide, "nn"
        yield wide, width, tokens, "nt"


def fit_products(
    times: Sequence[ProductTime], peak: float, multiprocessors: int
) -> tuple[float, dict[str, float]]:
    """The ramp and the parts of the peak, by layout, that say best how long products take."""

    def fitted(ramp: float) -> tuple[float, dict[str, float]]:
        flat = Kernels(multiprocessors, ramp, dict.fromkeys(_LAYOUTS, 1.0), {})
        found = {
            t: t.rate() / peak / flat.matmul_part(t.m, t.n, t.k, t.layout) for t in times
        }  # fmt: skip
        parts = {
            layout: min(1.0, median(part for t, part in found.items() if t.layout == layout))
            for layout in _LAYOUTS
        }
        return _off(part / parts[t.layout] for t, part in found.items()), parts

    ramp = min(_RAMPS, key=lambda ramp: fitted(ramp)[0])
    return ramp, fitted(ramp)[1]


def fit_attention(
    times: Sequence[AttentionTime], peak: float, multiprocessors: int
) -> tuple[float, float]:
    """The part of the peak and the fill that say best how long attention of one direction takes."""
    kind = "attention_backward" if times[0].backward else "attention_forward"

    def fitted(fill: float) -> tuple[float, float]:
        flat = Kernels(multiprocessors, 1, {kind: 1.0}, {f"{kind}_fill": fill})
        found = [
            time.rate() / peak / flat.attention_part(time.heads, time.seq, time.seq, kind, True)
            for time in times
        ]
        part = min(1.0, median(found))
        return _off(each / part for each in found), part

    fill = min(_FILLS, key=lambda fill: fitted(fill)[0])
    return fitted(fill)[1], fill


def _off(ratios: Iterable[float]) -> float:
    return median(abs(math.log(ratio)) for ratio in ratios)


def fit(
    products: Sequence[ProductTime],
    attention: Sequence[AttentionTime],
    peak: float,
    multiprocessors: int,
) -> Kernels:
    """The figures that say best how long these took, as parts of the peak, in flops per second."""
    ramp, parts = fit_products(products, peak, multiprocessors)
    fills = {}
    for kind, backward in (("attention_forward", False), ("attention_backward", True)):
        times = [time for time in attention if time.backward == backward]
        parts[kind], fills[f"{kind}_fill"] = fit_attention(times, peak, multiprocessors)
    short = {name: float(f"{part:.3g}") for name, part in parts.items()}
    return Kernels(multiprocessors, ramp, short, fills)


def time_products(time_ns: Timer, device: Any) -> list[ProductTime]:
    """Products of a layer's shapes in bfloat16. `time_ns` times a function on the device, less what
    every kernel takes for its launch."""
    import torch

    made = partial(_random, device)
    found = []
    for m, n, k, layout in layers():
        left = made(k, m).t() if layout == "nt" else made(m, k)
        right = made(n, k).t() if layout == "tn" else made(k, n)
        found.append(ProductTime(m, n, k, layout, time_ns(partial(torch.mm, left, right))))
    return found


def time_attention(time_ns: Timer, device: Any) -> list[AttentionTime]:
    """Causal attention of several sizes in bfloat16, by the kernel that PyTorch chooses. A size
    for which the memory does not suffice is left out."""
    import torch

    found = []
    for heads, seq in _ATTENTION:
        with contextlib.suppress(torch.OutOfMemoryError):
            found += _attention_times(time_ns, device, heads, seq)
    return found


def _attention_times(time_ns: Timer, device: Any, heads: int, seq: int) -> list[AttentionTime]:
    import torch
    import torch.nn.functional as F

    given = [_random(device, 1, heads, seq, _WIDTH).requires_grad_() for _ in range(3)]
    forward = partial(F.scaled_dot_product_attention, *given, is_causal=True)
    mixed = forward()
    gradient = torch.randn_like(mixed)
    backward = partial(torch.autograd.grad, mixed, given, gradient, retain_graph=True)
    return [
        AttentionTime(heads, seq, False, time_ns(forward)),
        AttentionTime(heads, seq, True, time_ns(backward)),
    ]


def time_streams(time_ns: Timer, device: Any) -> dict[str, float]:
    """Bytes per second of kernels that read and write more slowly than a copy does."""
    import torch

    aten = torch.ops.aten
    x = _random(device, *_STREAMED)
    y, width = torch.randn_like(x), [x.shape[1]]
    scale, shift = torch.ones_like(x[0]), torch.zeros_like(x[0])
    _, mean, deviation = aten.native_layer_norm(x, width, scale, shift, 1e-5)
    words = _random(device, *_SCORES).float()
    scores = torch.log_softmax(words, 1)
    runs: dict[str, tuple[Callable[[], Any], int]] = {
        "norm": (partial(aten.native_layer_norm, x, width, scale, shift, 1e-5), 2 * x.nbytes),
        "norm_backward": (
            partial(
                aten.native_layer_norm_backward,
                y,
                x,
                width,
                mean,
                deviation,
                scale,
                shift,
                [True] * 3,
            ),
            3 * x.nbytes,
        ),
        "softmax": (partial(torch.log_softmax, words, 1), 2 * words.nbytes),
        "softmax_backward": (
            partial(aten._log_softmax_backward_data, words, scores, 1, words.dtype),
            3 * words.nbytes,
        ),
        "cast": (partial(x.to, torch.float32), 3 * x.nbytes),
        "dropout": (partial(aten.native_dropout, x, 0.1, True), 2 * x.nbytes + x.numel()),
    }
    return {name: moved / time_ns(run) * 1e9 for name, (run, moved) in runs.items()}


def _random(device: Any, *sizes: int) -> Any:
    """Equal numbers would take less power, and so less time."""
    import torch

    return torch.randn(sizes, dtype=torch.bfloat16, device=device)
