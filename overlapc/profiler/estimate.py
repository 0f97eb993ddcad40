"""`estimate` says what every op of a captured graph should cost on a machine not at hand.

    time of an op = launch + the longer of: flops / reachable flops · bytes moved / reachable rate

Flops come from PyTorch's own formulas. Views and numbers cost nothing. A collective is looked
up in the machine's link figures. Ops of equal signature are estimated once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import fx
from torch.utils.flop_counter import flop_registry

from overlapc.errors import OptionError
from overlapc.ir import Cost, Op, Profile, Slowdown, Trace
from overlapc.passes.storages import UNBACKED_HINT, hint
from overlapc.passes.trace import Captured
from overlapc.profiler.cache import Cache, cache_key
from overlapc.profiler.clock import section_of
from overlapc.profiler.hardware import Hardware
from overlapc.profiler.links import collective_of, hinted_bytes, tensors

__all__ = ["estimate", "forward_flops"]

# Where PyTorch has a formula for the CUDA kernel only; or none, but the work is the same.
_SAME_FLOPS = {
    "_scaled_dot_product_flash_attention_for_cpu": "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_fused_attention_overrideable": "_scaled_dot_product_flash_attention",
}
# They read the rows they are asked for, not the table they are given.
_GATHERS = ("embedding", "index", "gather", "index_select", "slice_scatter", "select_scatter")
_HALF = (torch.bfloat16, torch.float16)


def estimate(
    captured: Captured,
    hardware: Hardware,
    group_sizes: Mapping[str, int] | None = None,
    known: Cache | None = None,
    attention: float = 1.0,
) -> Profile:
    """The costs of all ops on `hardware`; nothing is run, so fake tensors and groups will do.

    What `known` has, as `measure` found it on this machine, is taken from there: all but how long
    collectives are on their way.

    `group_sizes` gives the ranks of each process group by name; without it they are asked of
    `torch.distributed`. A group is taken to be within a node if it fits into one, unless
    torch knows its ranks. Workspace is not estimated. Fused attention takes `attention` times as
    long as the machine's best kernels.
    """
    groups = {lane: _group(lane, hardware, group_sizes) for lane in captured.trace.lanes}
    nodes = {node.name: node for node in captured.joint.graph.nodes}
    roofline = _Roofline(hardware, captured.trace, attention)
    section = section_of(_device(captured)) if known is not None else ""
    found: dict[tuple[str, str, bool], Cost] = {}
    costs: dict[str, Cost] = {}
    for op in captured.trace.ops:
        key = (op.signature, op.lane, roofline.is_view(op))
        if key not in found:
            node = nodes[op.name]
            if op.role == "start":
                call = collective_of(node)
                ranks, per_node = groups[op.lane]
                comm_ns = hardware.collective_ns(call.kind, call.bytes, ranks, per_node)
                found[key] = Cost(hardware.launch_ns, comm_ns, 0, "estimated")
            elif op.role == "wait" or key[2]:
                found[key] = Cost(source="estimated")
            else:
                found[key] = Cost(roofline.time_ns(node), source="estimated")
            measured = None if known is None else known.get(section, cache_key(op.signature))
            if measured is not None:
                took_ns, workspace = measured
                found[key] = Cost(took_ns, found[key].comm_ns, workspace, "measured")
        costs[op.name] = found[key]
    across = [name for name, (ranks, per_node) in groups.items() if ranks > per_node]
    slowdown = Slowdown()
    if groups:
        inside = len(across) < len(groups)
        slowdown = hardware.intra.slowdown if inside else hardware.inter.slowdown
    conditions = {
        "hardware": f"{hardware.name} ({hardware.status})",
        "groups": ", ".join(f"{g}: {n} ranks, {m} a node" for g, (n, m) in groups.items()),
        "unknown_sizes": f"taken as {UNBACKED_HINT}",
        "workspace": "not estimated",
    }
    return Profile(costs, slowdown, conditions)


def _device(captured: Captured) -> torch.device:
    """Of the graph's tensors."""
    values = (node.meta.get("val") for node in captured.joint.graph.nodes)
    devices = (tensor.device for value in values for tensor in tensors(value))
    return next(devices, torch.device("cpu"))


def _group(name: str, hardware: Hardware, group_sizes: Mapping[str, int] | None) -> tuple[int, int]:
    """(ranks, how many of them at most share a node) of a process group."""
    if group_sizes is not None:
        if name not in group_sizes or group_sizes[name] < 1:
            raise OptionError(
                f"group_sizes says nothing useful of process group {name!r}: "
                f"expected a number of ranks, found {dict(group_sizes)}"
            )
        return group_sizes[name], min(group_sizes[name], hardware.gpus_per_node)
    try:
        ranks = dist.get_process_group_ranks(dist.distributed_c10d._resolve_process_group(name))
    except (RuntimeError, ValueError, KeyError) as error:
        raise OptionError(
            f"torch.distributed knows no process group {name!r}: pass group_sizes={{{name!r}: n}}"
        ) from error
    return len(ranks), hardware.most_in_a_node(ranks)


class _Roofline:
    def __init__(self, hardware: Hardware, trace: Trace, attention: float) -> None:
        self.hardware, self.trace, self.attention = hardware, trace, attention

    def is_view(self, op: Op) -> bool:
        """Does it only name memory that is there already, or make a number?"""
        if ".copy_." in op.signature or "_." in op.signature.split(" ", 1)[0]:
            return False  # writes in place
        storages = {self.trace.value[name].storage for name in op.inputs}
        return all(
            self.trace.value[name].storage in storages or self.trace.value[name].bytes == 0
            for name in op.outputs
        )

    def time_ns(self, node: fx.Node) -> int:
        flops_ns = self.flops_ns(node)
        moved_ns = self.hardware.memory_ns(self.moved_bytes(node))
        return round(self.hardware.launch_ns + max(flops_ns, moved_ns))

    def moved_bytes(self, node: fx.Node) -> int:
        given = [t for n in node.all_input_nodes for t in tensors(n.meta.get("val"))]
        made = sum(map(hinted_bytes, tensors(node.meta.get("val"))))
        if _name(node) in _GATHERS:
            return 2 * made + sum(map(hinted_bytes, given[1:]))
        return made + sum(map(_read_bytes, given))

    def flops_ns(self, node: fx.Node) -> float:
        flops: float = _flops(node)
        if not flops:
            return 0.0
        shapes = [
            [hint(n) for n in t.shape]
            for given in node.all_input_nodes
            for t in tensors(given.meta.get("val"))
        ]
        name = _name(node)
        if "attention" in name:
            flops, part = self.attention_work(node, flops)
        elif "convolution" in name:
            # As a matmul: pixels by output channels by the patch each of them reads.
            weight = next((s for s in reversed(shapes) if len(s) >= 3), [1])
            part = self.hardware.matmul_part(min(weight[0], math.prod(weight[1:])))
        elif self.hardware.kernels is not None and (product := _product(node)) is not None:
            part = self.hardware.kernels.matmul_part(*product)
        else:
            dims = [n for shape in shapes if len(shape) >= 2 for n in shape[-2:]]
            part = self.hardware.matmul_part(min(dims, default=1))
        return self.hardware.flops_ns(flops, self.dtype(node), part)

    def attention_work(self, node: fx.Node, flops: float) -> tuple[float, float]:
        """(flops, part of the peak) of fused attention. The formulas count all scores."""
        kernels, backward = self.hardware.kernels, "backward" in _name(node)
        (query, *_) = tensors(node.all_input_nodes[int(backward)].meta.get("val"))
        shape = query.shape
        causal = any(arg is True for arg in node.args) or node.kwargs.get("is_causal") is True
        if kernels is None or not causal:
            return flops * self.attention, self.hardware.attention_efficiency
        heads, seq = math.prod(hint(n) for n in shape[:-2]), hint(shape[-2])
        kind = "attention_backward" if backward else "attention_forward"
        return flops / 2 * self.attention, kernels.attention_part(heads, seq, kind)

    def dtype(self, node: fx.Node) -> str:
        given = [t for n in node.all_input_nodes for t in tensors(n.meta.get("val"))]
        dtypes = [t.dtype for t in given if t.is_floating_point()]
        if not dtypes:
            return "float32"
        if dtypes[0] == torch.float32 and torch.get_float32_matmul_precision() != "highest":
            return "tf32" if "tf32" in self.hardware.peak_flops else "float32"
        return str(dtypes[0]).removeprefix("torch.")


def _name(node: fx.Node) -> str:
    schema = getattr(node.target, "_schema", None)
    return schema.name.split("::")[-1] if schema is not None else str(node.target)


def _product(node: fx.Node) -> tuple[int, int, int, str, int] | None:
    """(m, n, k, layout, batch) of a product of two matrices, or of two batches of them."""
    pair = [next(iter(tensors(arg.meta.get("val"))), None) for arg in node.all_input_nodes[-2:]]
    if not _name(node).endswith("mm") or len(node.all_input_nodes) < 2 or None in pair:
        return None
    left, right = (t for t in pair if t is not None)
    if not 2 <= left.dim() == right.dim() <= 3:
        return None
    m, k = (hint(size) for size in left.shape[-2:])
    n, batch = hint(right.shape[-1]), math.prod(hint(size) for size in left.shape[:-2])
    by_columns = [t.stride(-1) != 1 and t.stride(-2) == 1 for t in (left, right)]
    return m, n, k, "nt" if by_columns[0] else "tn" if by_columns[1] else "nn", batch


def forward_flops(captured: Captured) -> int:
    """Count the flops of a whole forward."""
    forward = {op.name for op in captured.trace.ops if op.is_forward}
    return sum(_flops(node) for node in captured.joint.graph.nodes if node.name in forward)


def _flops(node: fx.Node) -> int:
    formula = _formula(node)
    if formula is None:
        return 0
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), _shape)
    try:
        return int(formula(*args, **kwargs, out_val=_shape(node)))
    except Exception:  # a formula for arguments of another kind: memory decides then
        return 0


def _formula(node: fx.Node) -> Any:
    packet = getattr(node.target, "overloadpacket", node.target)
    if packet in flop_registry:
        return flop_registry[packet]
    name = _name(node)
    for ours, theirs in _SAME_FLOPS.items():
        if name.startswith(ours):
            return flop_registry.get(getattr(torch.ops.aten, theirs + name[len(ours) :]))
    return None


def _shape(node: fx.Node) -> Any:
    """A node's value as the formulas take it: shapes for tensors, numbers for sizes."""

    def plain(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return torch.Size([hint(n) for n in value.shape])
        if isinstance(value, torch.SymInt):
            return hint(value)
        if isinstance(value, (tuple, list)):
            return type(value)([plain(item) for item in value])
        return value

    return plain(node.meta.get("val"))


def _read_bytes(tensor: torch.Tensor) -> int:
    """Bytes behind a tensor: an expanded one is read from less memory than its shape says."""
    count = tensor.element_size()
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if not (isinstance(stride, int) and stride == 0):
            count *= hint(size)
    return count
