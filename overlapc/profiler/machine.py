"""`measure_machine` measures this machine for a file like `hardware/*.toml` (`overlapc profile`).

One process measures compute and memory; under torchrun ranks also measure the link between them.
Other figures are copied from a known machine, and their sources say so.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from overlapc.core.errors import OptionError
from overlapc.emulate.model import Kind, Link
from overlapc.profiler.clock import Clock, device_name
from overlapc.profiler.hardware import Hardware, LinkSpec
from overlapc.profiler.kernels import Timer, fit, time_attention, time_products, time_streams
from overlapc.profiler.link_model import Collective
from overlapc.profiler.link_spec import Table
from overlapc.profiler.links import measure_links
from overlapc.profiler.shapes import Kernels

__all__ = ["measure_machine"]

_DTYPES = ("float32", "bfloat16", "float16", "float64")
_KINDS: tuple[Kind, ...] = (
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "p2p",
)  # fmt: skip
_SUMS = ("all_reduce", "reduce_scatter")
_QUEUED, _HOST_NS = 10, 100_000  # runs in a GPU's queue, and what the host takes for one at most
_SMALLEST = 1 << 14  # bytes of a collective whose time is nearly all latency


def measure_machine(name: str, base: Hardware, budget_s: float = 30.0) -> Hardware:
    """Measure this machine. All ranks of the default process group, if there is one, call this
    together, and measure compute at the same time, as in training."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    here = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    if ranks % here:
        raise OptionError(
            f"{ranks} ranks, {here} of them here: expected as many on each node (LOCAL_WORLD_SIZE)"
        )
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    said = f"measured: {device_name(device)}, torch {torch.__version__}"
    if not cuda:
        said += f", {torch.get_num_threads()} threads"
    sources = {
        key: f"not measured: as {base.name} ({text})"
        for key, text in base.sources.items()
        if not key.startswith(("kernels.", "streams."))
        and key not in ("memory.total", "memory.in_place")
    }
    share = 0.4 if ranks > 1 else 1.0
    machine = _Compute(device, budget_s * share).measure(base, sources, said)
    sources["memory.bytes"] = sources["node.gpus"] = said
    machine = replace(
        machine,
        name=name,
        status=f"{said}; what was not measured is of {base.name}",
        memory_bytes=_memory_bytes(device) // (1 if cuda else here),
        gpus_per_node=here if ranks > 1 else max(1, torch.cuda.device_count()),
        sources=sources,
        total=0,
    )
    if ranks > 1:
        left_s = budget_s * (1 - share)
        if here == ranks:
            link = _link(device, dist.group.WORLD, 1, left_s, "intra", sources, said)
            return replace(machine, intra=link)
        link = _link(device, _across_nodes(ranks, here), here, left_s, "inter", sources, said)
        if machine.intra.bytes_per_s < link.bytes_per_s:
            sources["intra.bytes_per_s"] = "not measured: no slower than what crosses nodes"
            machine = replace(machine, intra=replace(machine.intra, bytes_per_s=link.bytes_per_s))
        machine = replace(machine, inter=link)
    return machine


def _across_nodes(ranks: int, here: int) -> Any:
    """The group of this rank that has one rank of each node. All ranks of a node measure at the
    same time, each in its own group, and so share the node's link."""
    groups = [dist.new_group(list(range(local, ranks, here))) for local in range(here)]
    return groups[dist.get_rank() % here]


class _Compute:
    def __init__(self, device: torch.device, budget_s: float) -> None:
        self.device, self.clock = device, Clock(device)
        self.cuda = device.type == "cuda"
        # About 20 things are timed, and on CUDA some 50 kernels.
        self.each_ns = int(budget_s * 1e9 / (80 if self.cuda else 20))

    def measure(self, base: Hardware, sources: dict[str, str], said: str) -> Hardware:
        sizes = [1 << power for power in (range(6, 14) if self.cuda else range(4, 11))]
        often = torch.bfloat16 if self.cuda else torch.float32
        rates = {n: self.matmul_rate(n, often) for n in sizes}
        best = max(rates, key=lambda n: rates[n])
        peaks = self.peaks(best)
        peak = peaks["bfloat16" if self.cuda else "float32"] = rates[best]
        for key in [key for key in sources if key.startswith("peak_flops.")]:
            del sources[key]
        sources |= {f"peak_flops.{dtype}": f"{said}: square matmul of {best}" for dtype in peaks}
        sources["compute.matmul_efficiency"] = f"{said}: {often}, square, of what {best} reaches"
        sources["compute.launch_ns"] = f"{said}: add of 16 floats"
        sources["compute.attention_efficiency"] = f"{said}: causal, forward"
        launch_ns = max(1, self.launch_ns())
        timer: Timer = lambda run: max(1.0, self.time_ns(run) - launch_ns)  # noqa: E731
        kernels = None
        if self.cuda:
            kernels, fastest = self.kernels(peak, timer)
            if fastest > peak:
                peak = peaks["bfloat16"] = fastest
                sources["peak_flops.bfloat16"] = f"{said}: the fastest of a layer's products"
                sources["compute.matmul_efficiency"] = f"{said}: {often}, square, of peak_flops"
            for key in ("multiprocessors", "ramp", *kernels.parts, *kernels.fills):
                sources[f"kernels.{key}"] = f"{said}: fitted to products and attention of layers"
            if base.kernels is not None and base.kernels.aligned:
                kernels = replace(kernels, aligned=base.kernels.aligned)
                sources["kernels.aligned"] = base.sources["kernels.aligned"]
        copied, added, in_place = self.copy_rate(), self.add_rate(), self.in_place_rate()
        streams: dict[str, float] = {}
        if self.cuda:
            rates_of = time_streams(timer, self.device)
            streams = {name: min(1.0, _short(rate / copied)) for name, rate in rates_of.items()}
            for name in streams:
                sources[f"streams.{name}"] = f"{said}: PyTorch's own kernel, of the copy rate"
        sources["memory.bytes_per_s"] = f"{said}: copy of {self.large_bytes / 1e6:.0f} MB"
        sources["memory.efficiency"] = f"{said}: x + x into new memory, of the copy rate"
        sources["memory.in_place"] = f"{said}: x += y, of the copy rate"
        return replace(
            base,
            peak_flops=peaks,
            memory_bytes_per_s=copied,
            memory_efficiency=min(1.0, _short(added / copied)),
            in_place=min(1.0, _short(in_place / copied)),
            streams=streams,
            launch_ns=launch_ns,
            kernels=kernels,
            matmul_efficiency=tuple((float(n), _short(rate / peak)) for n, rate in rates.items()),
            attention_efficiency=min(1.0, _short(self.attention_rate(often) / peak)),
        )

    def kernels(self, peak: float, timer: Timer) -> tuple[Kernels, float]:
        """How fast kernels are by their shapes, as parts of the peak or of the fastest product's
        rate, if that is higher; and that rate."""
        products, attention = time_products(timer, self.device), time_attention(timer, self.device)
        fastest = _short(max(time.rate() for time in products))
        count = torch.cuda.get_device_properties(self.device).multi_processor_count
        return fit(products, attention, max(peak, fastest), count), fastest

    def time_ns(self, run: Callable[[], Any]) -> float:
        """The median of as many runs as the budget allows, after two warm-ups."""
        run()
        begin = self.clock.mark()
        run()
        (_, once) = self.clock.read([begin, self.clock.mark()])
        count = max(3, min(200, self.each_ns // max(1, once)))
        if self.cuda and once < 2 * _HOST_NS:
            return self.queued_ns(run, count)
        marks = [self.clock.mark()]
        for _ in range(count):
            run()
            marks.append(self.clock.mark())
        read = self.clock.read(marks)
        return max(1.0, statistics.median(b - a for a, b in pairwise(read)))

    def queued_ns(self, run: Callable[[], Any], count: int) -> float:
        """The median of about so many runs of a short kernel, for which the host may need longer to
        launch it than it runs: several at a time wait in the device's queue. (Long ones follow each
        other by themselves, and heat the device as in training.)"""
        in_queue = min(_QUEUED, count)
        took = []
        for _ in range(max(3, count // in_queue)):
            self.clock.ahead(in_queue * _HOST_NS)
            begin = self.clock.mark()
            for _ in range(in_queue):
                run()
            took.append(self.clock.read([begin, self.clock.mark()])[1] / in_queue)
        return max(1.0, statistics.median(took))

    def matmul_rate(self, n: int, dtype: torch.dtype) -> float:
        a = torch.randn(n, n, dtype=dtype, device=self.device)  # equal numbers take less power
        out = torch.empty_like(a)
        return _short(2 * n**3 / self.time_ns(lambda: torch.mm(a, a, out=out)) * 1e9)

    def peaks(self, n: int) -> dict[str, float]:
        rates = {}
        for name in _DTYPES:
            if name == "float16" and not self.cuda:
                n = min(n, 256)  # this type may have no fast kernel
            rates[name] = self.matmul_rate(n, getattr(torch, name))
        if self.cuda:
            before = torch.get_float32_matmul_precision()
            torch.set_float32_matmul_precision("high")
            try:
                rates["tf32"] = self.matmul_rate(n, torch.float32)
            finally:
                torch.set_float32_matmul_precision(before)
        return rates

    @property
    def large_bytes(self) -> int:
        return 1 << (28 if self.cuda else 26)

    def copy_rate(self) -> float:
        x = torch.ones(self.large_bytes // 4, device=self.device)
        out = torch.empty_like(x)
        return _short(2 * x.nbytes / self.time_ns(lambda: out.copy_(x)) * 1e9)

    def add_rate(self) -> float:
        x = torch.ones(self.large_bytes // 4, device=self.device)
        return 2 * x.nbytes / self.time_ns(lambda: x + x) * 1e9

    def in_place_rate(self) -> float:
        x = torch.ones(self.large_bytes // 4, device=self.device)
        y = torch.ones_like(x)
        return 3 * x.nbytes / self.time_ns(lambda: x.add_(y)) * 1e9

    def launch_ns(self) -> int:
        x = torch.ones(16, device=self.device)
        return round(self.time_ns(lambda: x + x))

    def attention_rate(self, dtype: torch.dtype) -> float:
        batch, heads, seq, width = (4, 16, 2048, 128) if self.cuda else (1, 4, 512, 64)
        q = torch.randn(batch, heads, seq, width, dtype=dtype, device=self.device)
        # Counted by PyTorch's own formula, which includes the masked half.
        flops = 4 * batch * heads * seq * seq * width
        with torch.no_grad():
            run = lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True)  # noqa: E731
            return flops / self.time_ns(run) * 1e9


def _link(
    device: torch.device,
    members: Any,
    sharing: int,
    budget_s: float,
    which: str,
    sources: dict[str, str],
    said: str,
) -> LinkSpec:
    """Measure the link under a process group, as a table of bus bandwidths. `sharing` such groups
    measure at the same time; the result is their sum."""
    group, ranks = members.group_name, members.size()
    largest = 1 << (28 if device.type == "cuda" else 24)
    sizes = [_SMALLEST, *(largest >> shift for shift in (6, 3, 0))]
    calls = [
        Collective(group, kind, "float32" if kind in _SUMS else "", size)
        for kind in _KINDS
        for size in sizes
    ]
    model = measure_links(calls, device=device, repeats=9, budget_s=budget_s, beside="all_reduce")
    busbw: dict[str, Table] = {}
    latencies = {}
    for curve in model.curves:
        points = [(size, ns) for size, ns in curve.points if size >= largest >> 6]
        busbw[curve.kind] = tuple(
            (
                float(size),
                _short(sharing * Link.wire_bytes(curve.kind, size, ranks) / max(1, ns) * 1e9),
            )
            for size, ns in points
        )
        latencies[curve.kind] = curve.points[0][1]
    said = f"{said}, {ranks} ranks, {model.conditions['backend']}"
    for key in [key for key in sources if key.startswith(f"{which}.")]:
        del sources[key]
    sources[f"{which}.alpha_ns"] = f"{said}: all_reduce of {_SMALLEST} bytes"
    sources[f"{which}.bytes_per_s"] = f"{said}: the best of the table of all_reduce"
    sources |= {f"{which}.busbw.{kind}": f"{said}: {model.conditions['runs']}" for kind in busbw}
    for side in ("compute", "comm"):
        sources[f"{which}.slowdown.{side}_permille"] = f"{said}: {model.conditions['slowdown']}"
    return LinkSpec(
        alpha_ns=latencies["all_reduce"],
        bytes_per_s=max(rate for _, rate in busbw["all_reduce"]),
        efficiency={},
        busbw=busbw,
        slowdown=model.slowdown,
    )


def _short(number: float) -> float:
    """Round to four digits: no measurement has more."""
    return float(f"{number:.4g}")


def _memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
