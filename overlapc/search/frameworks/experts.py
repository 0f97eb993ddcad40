"""What frameworks do for layers with experts beside what their products and collectives take."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from overlapc.core.ir import Profile, Trace
from overlapc.profiler.hardware import Hardware
from overlapc.profiler.work import work_ns
from overlapc.search.captures import UnitKey
from overlapc.search.frameworks.framework import Framework

if TYPE_CHECKING:
    from overlapc.profiler.estimate import Described


def of_experts(
    profile: Profile, described: Described, machine: Hardware, framework: Framework
) -> Profile:
    """The costs with those of experts' products, batches of them: what they read and write takes a
    part of its time beside them. Weight gradients (NT) are added up by the product itself."""
    costs = dict(profile.costs)
    for name, work in described.works.items():
        product = work.product
        if product is None or product.batch == 1 or costs[name].source != "estimated":
            continue
        moved = work.moved_bytes
        if product.layout == "nt":
            moved += (2 * framework.gradient_bytes - 2) * product.batch * product.m * product.n
        more_ns = framework.uncovered * machine.memory_ns(moved)
        alone_ns = work_ns(machine, replace(work, moved_bytes=0))
        costs[name] = replace(costs[name], compute_ns=round(alone_ns + more_ns))
    return replace(profile, costs=costs)


def with_biases(
    profile: Profile, described: Described, machine: Hardware, moves: tuple[int, int], width: int
) -> Profile:
    """The costs with those of biases that are added to what each expert makes of a row: so many
    bytes move for each of its numbers in a forward and in a backward. They are spread over the
    products, of which a forward has two and a backward four."""
    trace, costs = described.trace, dict(profile.costs)
    for op in trace.ops:
        product = described.works[op.name].product
        inside = "moe" in trace.modules.get(op.name, "").split(".")
        if product is None or not inside or not op.signature.startswith("aten.bmm."):
            continue
        rows = product.batch * (product.k if product.layout == "nt" else product.m)
        share = moves[0] / 2 if op.is_forward else moves[1] / 4
        more_ns = round(machine.memory_ns(share * rows * width))
        costs[op.name] = replace(costs[op.name], compute_ns=costs[op.name].compute_ns + more_ns)
    return replace(profile, costs=costs)


def host_ns_of(trace: Trace, framework: Framework, key: UnitKey, is_forward: bool) -> int:
    """What the host launches for layers with experts, beside their ops: more ops, and each product
    of each expert that a rank holds, which takes it as long as another op: Transformer Engine looks
    for the kernel of each anew."""
    experts = getattr(key.model, "experts", 0)
    if not (experts and any(framework.expert_ops)):
        return 0
    layers = {path.split(".moe")[0] for path in trace.modules.values() if ".moe" in path}
    ops = framework.expert_ops[0 if is_forward else 1] * framework.host_ns
    products = (2 if is_forward else 4) * (experts // key.expert_ranks) * framework.host_ns
    return len(layers) * (ops + products)
