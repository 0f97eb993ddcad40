"""`beside_products` lets tensor-parallel ranks gather and scatter sequences while products run.

As Transformer Engine's userbuffers do it (Megatron's `--tp-comm-overlap`), in the configurations
that NVIDIA publishes with its runs (github.com/NVIDIA/dgxc-benchmarking, `ub_tp_comm_overlap_cfg`
of gpt3_175b_hydra.yaml and llama3.1_405b.yaml), by their names:

`ring_exchange`, before a product: ranks' parts go round, by copy engines, and are multiplied two at
a time (`aggregate`) while the next are on their way.
`pipeline`, behind a product of the forward: it is made in four parts, and each is scattered while
the next is made, by multiprocessors that the product then lacks.
`bulk`, in the backward: sums are scattered beside the product for the weight's gradient, as without
userbuffers.

A product in parts takes longer, since each part's last wave of tiles leaves multiprocessors idle.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from overlapc.core.ir import Op, Profile, Trace
from overlapc.profiler.hardware import Hardware
from overlapc.profiler.shapes import filled
from overlapc.profiler.work import OpWork, Product

_SPLITS, _SCATTERING = 4, 16  # num_splits; num_sm is 8 to 24
_TOGETHER = 2  # parts that are multiplied at once
_MULTIPROCESSORS = 132  # of H100, where a machine's file names none


def beside_products(
    trace: Trace, profile: Profile, works: Mapping[str, OpWork], machine: Hardware, ranks: int
) -> Profile:
    """The profile, in which the traffic of so many ranks takes what its products leave of it, and
    these what they take in parts."""
    costs = dict(profile.costs)
    kernels = machine.kernels
    count = kernels.multiprocessors if kernels is not None else _MULTIPROCESSORS
    for op in trace.ops:
        if op.role != "start":
            continue
        product, parts, lacks = None, 1, 0
        if "all_gather" in op.signature:
            product, parts = product_behind(trace, works, op), max(2, ranks // _TOGETHER)
        elif "reduce_scatter" in op.signature and op.is_forward:
            product, parts, lacks = product_before(trace, works, op), _SPLITS, _SCATTERING
        shape = works[product.name].product if product is not None else None
        if product is None or shape is None:
            continue
        alone, cost = profile.costs[product.name], costs[op.name]
        took_ns = alone.compute_ns * _in_parts(shape, parts, count, lacks)
        whole_ns = alone.compute_ns + cost.comm_ns
        both_ns = took_ns + cost.comm_ns - min(took_ns, cost.comm_ns) * (parts - 1) / parts
        if both_ns < whole_ns:  # else nobody would ask for it
            costs[product.name] = replace(alone, compute_ns=round(took_ns))
            costs[op.name] = replace(cost, comm_ns=round(both_ns - took_ns))
    return replace(profile, costs=costs)


def _in_parts(product: Product, parts: int, count: int, lacks: int) -> float:
    """How many times as long the product takes in parts of its rows, without some of so many
    multiprocessors."""
    m, n = product.m, product.n
    whole, part = filled(m, n, 1, count), filled(-(-m // parts), n, 1, count - lacks)
    return max(1.0, whole / part) * count / (count - lacks)


def product_behind(trace: Trace, works: Mapping[str, OpWork], op: Op) -> Op | None:
    """The first product that takes what a collective brings, through its wait and through views."""
    reached = {op.name}
    for each in trace.ops:
        givers = {trace.value[name].producer for name in each.inputs}
        if reached.isdisjoint(givers):
            continue
        if works[each.name].kind == "matmul":
            return each
        if works[each.name].kind == "free":
            reached.add(each.name)
    return None


def product_before(trace: Trace, works: Mapping[str, OpWork], op: Op) -> Op | None:
    """The product whose result a collective takes, through views."""
    while op.inputs and (producer := trace.value[op.inputs[0]].producer):
        op = trace.op[producer]
        if works[op.name].kind != "free":
            return op if works[op.name].kind == "matmul" else None
    return None
