"""`estimate` says what every op of a captured graph should cost on a machine not at hand.

`works_of` says what the ops have to do, `work_ns` how long the machine takes for it. Flops come
from PyTorch's own formulas. Views and numbers cost nothing. A collective is looked up in the
machine's link figures.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import fx
from torch.utils.flop_counter import flop_registry

from overlapc.core.errors import OptionError
from overlapc.core.ir import Cost, Op, Profile, Slowdown, Trace
from overlapc.passes.storages import UNBACKED_HINT, hint
from overlapc.passes.trace import Captured
from overlapc.profiler.cache import Cache, cache_key
from overlapc.profiler.clock import section_of
from overlapc.profiler.hardware import Hardware
from overlapc.profiler.links import collective_of, hinted_bytes, tensors
from overlapc.profiler.work import AttentionWork, OpWork, Product, work_ns

__all__ = ["Described", "describe", "estimate", "forward_flops", "priced", "works_of"]

# Where PyTorch has a formula for the CUDA kernel only; or none, but the work is the same.
_SAME_FLOPS = {
    "_scaled_dot_product_flash_attention_for_cpu": "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_fused_attention_overrideable": "_scaled_dot_product_flash_attention",
}
# They read the rows they are asked for, not the table they are given.
_GATHERS = ("embedding", "index", "gather", "index_select", "slice_scatter", "select_scatter")
# Kernels with a rate of their own, by op (`Hardware.streams`).
_STREAMS = {
    "native_layer_norm": "norm",
    "_fused_rms_norm": "norm",
    "native_layer_norm_backward": "norm_backward",
    "_fused_rms_norm_backward": "norm_backward",
    "_softmax": "softmax",
    "_log_softmax": "softmax",
    "_softmax_backward_data": "softmax_backward",
    "_log_softmax_backward_data": "softmax_backward",
    "_to_copy": "cast",
    "native_dropout": "dropout",
}


@dataclass(frozen=True)
class Described:
    """All of a captured graph that its costs follow from, on any machine: it needs no graph."""

    trace: Trace
    works: Mapping[str, OpWork]
    ranks: Mapping[str, Sequence[int]]  # of each process group
    section: str  # of a cache of measured op times, in which the graph's device is

    def groups(self, hardware: Hardware) -> dict[str, tuple[int, int]]:
        """By process group: the number of its ranks, and of those in a node."""
        ranks = self.ranks.items()
        return {group: (len(each), hardware.most_in_a_node(each)) for group, each in ranks}


def estimate(
    captured: Captured,
    hardware: Hardware,
    group_sizes: Mapping[str, int] | None = None,
    known: Cache | None = None,
) -> Profile:
    """The costs of all ops on `hardware`; nothing is run, so fake tensors and groups will do.

    What `known` has, as `measure` found it on this machine, is taken from there: all but how long
    collectives are on their way.

    `group_sizes` gives the ranks of each process group by name; without it they are asked of
    `torch.distributed`. A group is taken to be within a node if it fits into one, unless
    torch knows its ranks. Workspace is not estimated.
    """
    return priced(describe(captured, group_sizes), hardware, known)


def describe(
    captured: Captured,
    group_sizes: Mapping[str, int] | None = None,
    device: torch.device | None = None,
) -> Described:
    """All that the graph's costs follow from. By default its device is that of its tensors."""
    ranks = {group: _ranks(group, group_sizes) for group in captured.trace.groups}
    section = section_of(device or device_of(captured))
    return Described(captured.trace, works_of(captured), ranks, section)


def priced(
    described: Described,
    hardware: Hardware,
    known: Cache | None = None,
    attention: float = 1.0,
    pytorch_kernels: bool = True,
) -> Profile:
    """The costs of all ops, as `estimate` has them. Fused attention takes `attention` times as long
    as the machine's best kernels. Without `pytorch_kernels` others run in their place: norms,
    losses, casts and dropout then stream as fast as additions do."""
    if not pytorch_kernels:
        hardware = replace(hardware, streams={})
    groups = described.groups(hardware)
    found: dict[tuple[str, str, OpWork], Cost] = {}
    costs: dict[str, Cost] = {}
    for op in described.trace.ops:
        work = described.works[op.name]
        key = (op.signature, op.group, work)
        if key not in found:
            comm_ns = 0
            if work.traffic is not None:
                comm_ns = hardware.collective_ns(*work.traffic, *groups[op.group])
            found[key] = Cost(work_ns(hardware, work, attention), comm_ns, 0, "estimated")
            signature = cache_key(op.signature)
            measured = None if known is None else known.get(described.section, signature)
            if measured is not None:
                took_ns, workspace = measured
                found[key] = Cost(took_ns, comm_ns, workspace, "measured")
        costs[op.name] = found[key]
    across = [name for name, (ranks, per_node) in groups.items() if ranks > per_node]
    slowdown = Slowdown()
    if groups:
        inside = len(across) < len(groups)
        slowdown = hardware.intra.slowdown if inside else hardware.inter.slowdown
    conditions = {
        "hardware": f"{hardware.name} ({hardware.status})",
        "groups": ", ".join(f"{g}: {n} ranks, {m} a node" for g, (n, m) in groups.items()),
        "unknown_sizes": f"loads of experts taken as even, others as {UNBACKED_HINT}",
        "workspace": "not estimated",
    }
    return Profile(costs, slowdown, conditions)


def device_of(captured: Captured) -> torch.device:
    """Of the graph's tensors."""
    values = (node.meta.get("val") for node in captured.joint.graph.nodes)
    devices = (tensor.device for value in values for tensor in tensors(value))
    return next(devices, torch.device("cpu"))


def _ranks(name: str, group_sizes: Mapping[str, int] | None) -> Sequence[int]:
    """The ranks of a process group."""
    if group_sizes is not None:
        if name not in group_sizes or group_sizes[name] < 1:
            raise OptionError(
                f"group_sizes says nothing useful of process group {name!r}: "
                f"expected a number of ranks, found {dict(group_sizes)}"
            )
        return range(group_sizes[name])
    try:
        return dist.get_process_group_ranks(dist.distributed_c10d._resolve_process_group(name))
    except (RuntimeError, ValueError, KeyError) as error:
        raise OptionError(
            f"torch.distributed knows no process group {name!r}: pass group_sizes={{{name!r}: n}}"
        ) from error


def works_of(captured: Captured) -> dict[str, OpWork]:
    """What each op of the graph has to do, by its name. Ops of equal signature have the same."""
    nodes = {node.name: node for node in captured.joint.graph.nodes}
    found: dict[tuple[str, str, bool], OpWork] = {}
    works: dict[str, OpWork] = {}
    for op in captured.trace.ops:
        key = (op.signature, op.group, _is_view(captured.trace, op))
        if key not in found:
            node = nodes[op.name]
            if op.role == "start":
                call = collective_of(node)
                found[key] = OpWork("collective", traffic=(call.kind, call.bytes))
            elif op.role == "wait" or key[2]:
                found[key] = OpWork("free")
            else:
                found[key] = _work(node)
        works[op.name] = found[key]
    return works


def _is_view(trace: Trace, op: Op) -> bool:
    """Does it only name memory that is there already, or make a number?"""
    if ".copy_." in op.signature or "_." in op.signature.split(" ", 1)[0]:
        return False  # writes in place
    storages = {trace.value[name].storage for name in op.inputs}
    return all(
        trace.value[name].storage in storages or trace.value[name].bytes == 0 for name in op.outputs
    )


def _work(node: fx.Node) -> OpWork:
    flops, moved, name = float(_flops(node)), _moved_bytes(node), _name(node)
    if not flops:
        return OpWork("stream", moved_bytes=moved, stream=_STREAMS.get(name, ""))
    work = OpWork("matmul", flops, _dtype(node), moved)
    shapes = [
        [hint(n) for n in t.shape]
        for given in node.all_input_nodes
        for t in tensors(given.meta.get("val"))
    ]
    if "attention" in name:
        return replace(work, kind="attention", attention=_attention(node))
    if "convolution" in name:
        # As a matmul: pixels by output channels by the patch each of them reads.
        weight = next((s for s in reversed(shapes) if len(s) >= 3), [1])
        return replace(work, smallest=min(weight[0], math.prod(weight[1:])))
    dims = [n for shape in shapes if len(shape) >= 2 for n in shape[-2:]]
    return replace(work, smallest=min(dims, default=1), product=_product(node))


def _moved_bytes(node: fx.Node) -> int:
    given = [t for n in node.all_input_nodes for t in tensors(n.meta.get("val"))]
    made = sum(map(hinted_bytes, tensors(node.meta.get("val"))))
    if _name(node) == "_pre_bucket_all_gather":  # it writes this rank's part of the bucket
        return 2 * sum(map(_read_bytes, given))
    if _name(node) in _GATHERS:
        return 2 * made + sum(map(hinted_bytes, given[1:]))
    return made + sum(map(_read_bytes, given))


def _attention(node: fx.Node) -> AttentionWork:
    name = _name(node)
    backward = "backward" in name
    (query, *_) = tensors(node.all_input_nodes[int(backward)].meta.get("val"))
    heads, rows = math.prod(hint(n) for n in query.shape[:-2]), hint(query.shape[-2])
    if name.startswith("ring"):  # of a step behind the first one, to half of the keys
        beside = "diagonal" not in name
        keys = rows // 2 if beside else rows
        return AttentionWork(heads, rows, not beside, backward, keys, beside)
    schema = getattr(node.target, "_schema", None)  # flex_attention has none
    names = [] if schema is None else [argument.name for argument in schema.arguments]
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    causal = given.get("is_causal", False) is True
    key = node.args[int(backward) + 1]
    keys = hint(key.meta["val"].shape[-2]) if isinstance(key, fx.Node) else rows
    return AttentionWork(heads, rows, causal, backward, keys)


def _dtype(node: fx.Node) -> str:
    given = [t for n in node.all_input_nodes for t in tensors(n.meta.get("val"))]
    dtypes = [t.dtype for t in given if t.is_floating_point()]
    if not dtypes:
        return "float32"
    if dtypes[0] == torch.float32 and torch.get_float32_matmul_precision() != "highest":
        return "tf32"
    return str(dtypes[0]).removeprefix("torch.")


def _name(node: fx.Node) -> str:
    schema = getattr(node.target, "_schema", None)
    return schema.name.split("::")[-1] if schema is not None else str(node.target)


def _product(node: fx.Node) -> Product | None:
    pair = [next(iter(tensors(arg.meta.get("val"))), None) for arg in node.all_input_nodes[-2:]]
    if not _name(node).endswith("mm") or len(node.all_input_nodes) < 2 or None in pair:
        return None
    left, right = (t for t in pair if t is not None)
    if not 2 <= left.dim() == right.dim() <= 3:
        return None
    m, k = (hint(size) for size in left.shape[-2:])
    n, batch = hint(right.shape[-1]), math.prod(hint(size) for size in left.shape[:-2])
    by_columns = [t.stride(-1) != 1 and t.stride(-2) == 1 for t in (left, right)]
    layout = "nt" if by_columns[0] else "tn" if by_columns[1] else "nn"
    return Product(m, n, k, layout, batch)


def forward_flops(captured: Captured) -> int:
    """Count the flops of a whole forward."""
    forward = {op.name for op in captured.trace.ops if op.is_forward}
    return sum(_flops(node) for node in captured.joint.graph.nodes if node.name in forward)


def _flops(node: fx.Node) -> int:
    formula = _formula(node)
    if formula is None:
        return 0
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), _shape)
    if "attention" in _name(node):
        args = _with_all_heads(args)
    try:
        return int(formula(*args, **kwargs, out_val=_shape(node)))
    except Exception:  # a formula for arguments of another kind: memory decides then
        return 0


def _with_all_heads(args: Sequence[Any]) -> list[Any]:
    """Shapes with keys and values for each head of the queries: the formulas of torch before 2.13
    know no heads that share them."""
    heads = max((a[1] for a in args if isinstance(a, torch.Size) and len(a) == 4), default=0)
    return [
        torch.Size((a[0], heads, *a[2:])) if isinstance(a, torch.Size) and len(a) == 4 else a
        for a in args
    ]


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
