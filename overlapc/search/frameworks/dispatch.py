"""`sent_once` prices experts' all-to-alls that send a token once, however many experts it goes to.

As DeepEP does (Megatron's `--moe-token-dispatcher-type flex --moe-enable-deepep`): another node
gets a token once over the network, from where its ranks get it over their links, once each. What
comes back is summed on the same way. NCCL's all-to-all sends a copy for each expert.

Its README (github.com/deepseek-ai/DeepEP) has 153 GB/s inside a node of H800, whose NVLink has 200,
and 43 to a second node, over a network card of 50.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import comb

from overlapc.core.ir import Op, Profile, Trace
from overlapc.profiler.hardware import Hardware
from overlapc.profiler.work import OpWork

_LINKS, _CARDS = 153 / 200, 43 / 50  # of their rates, that it reaches
# Ops around experts that move tokens, and weigh what comes back, in the search's own module.
_MOVING = (
    "clone",
    "index",
    "index_add",
    "index_put",
    "index_select",
    "mul",
    "new_zeros",
    "sum",
    "zeros_like",
)


def _sent(trace: Trace, groups: Mapping[str, tuple[int, int]]) -> list[Op]:
    """All-to-alls of experts whose groups fill their nodes, as DeepEP's kernels ask for."""
    exchanges = [op for op in trace.ops if op.role == "start" and "all_to_all" in op.signature]
    used = {op.group for op in exchanges if "moe" in trace.modules.get(op.name, "").split(".")}
    sizes = ((group, *groups[group]) for group in used)
    filled = {group for group, ranks, near in sizes if ranks <= near or ranks % near == 0}
    return [op for op in exchanges if op.group in filled]


def sent_once(
    trace: Trace,
    profile: Profile,
    works: Mapping[str, OpWork],
    groups: Mapping[str, tuple[int, int]],
    machine: Hardware,
    experts: tuple[int, int],
) -> Profile:
    """The profile with such all-to-alls. `groups` has of each group its ranks, and how many of them
    a node has; `experts` are all, and those of a token."""
    costs = dict(profile.costs)
    for op in _sent(trace, groups):
        if (traffic := works[op.name].traffic) is not None:
            took_ns = once_ns(machine, traffic[1], *groups[op.group], *experts)
            costs[op.name] = replace(costs[op.name], comm_ns=took_ns)
    return replace(profile, costs=costs)


def ordered_as_sent(
    trace: Trace, profile: Profile, groups: Mapping[str, tuple[int, int]]
) -> Profile:
    """The profile, if tokens are sent, without what brings them into the order of experts and back,
    and weighs what experts make: HybridEP's kernels do the first while they send, the kernel that
    gates the second (Megatron-core 0.16.1, `_HybridEPManager` of token_dispatcher.py and
    `TEGroupedMLP`)."""
    costs = dict(profile.costs)
    if not _sent(trace, groups):
        return profile
    for op in trace.ops:
        inside = "moe" in trace.modules.get(op.name, "").split(".")
        if inside and op.role not in ("start", "wait") and _is_moving(op.signature):
            costs[op.name] = replace(costs[op.name], compute_ns=0)
    return replace(profile, costs=costs)


def _is_moving(signature: str) -> bool:
    name = signature.removeprefix("aten.").split(".")[0].split(" ")[0]
    return name in _MOVING


def once_ns(
    machine: Hardware, size_bytes: int, ranks: int, per_node: int, experts: int, top_k: int
) -> int:
    """How long it takes, if each rank has so many bytes for the experts, a copy for each of `top_k`
    of them, and any experts are as likely as any others."""
    if ranks <= 1 or size_bytes <= 0:
        return 0
    tokens = size_bytes / top_k
    near = min(per_node, ranks)
    nodes = -(-ranks // near)
    # of a rank's tokens, those that go to a rank, and to a node
    to_rank, to_node = (1 - _missed(experts, experts // part, top_k) for part in (ranks, nodes))
    # Each rank passes on what came for the others of its node.
    link_s = tokens * nodes * (near - 1) * to_rank / (machine.intra.bytes_per_s * _LINKS)
    card = machine.inter.bytes_per_s / machine.gpus_per_node
    card_s = tokens * (nodes - 1) * to_node / (card * _CARDS)
    link = machine.intra if nodes == 1 else machine.inter
    return round(link.alpha_ns + max(link_s, card_s) * 1e9)


def _missed(experts: int, some: int, top_k: int) -> float:
    """How likely it is that none of a token's experts is among `some`."""
    return comb(experts - some, top_k) / comb(experts, top_k)
