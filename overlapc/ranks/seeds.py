"""`warn_of_seeds` warns if ranks draw different random numbers for a tensor that all of them hold.

Ranks of one tensor-parallel group hold copies of the same activations between their collectives.
Dropout on such a copy must drop the same elements on every rank, or the copies differ: nothing
fails, but the model trains on wrong values. If every rank has its own part (a slice of the
sequence, its own heads, its own batch), each may draw different numbers.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

from overlapc.passes.nodes import group_of, is_random, is_start, line_of, primal_nodes
from overlapc.passes.trace import Captured, forward_nodes
from overlapc.ranks.exchange import Exchange
from overlapc.tools.told import warn

# What a value is to the ranks of a group.
CONSTANT = "constant"  # equal on all ranks, made of parameters and numbers alone
COMMON = "common"  # equal on all ranks, made of data
NOISE = "noise"  # random numbers, not yet combined with data
OWN = "own"  # different on each rank
# Collectives whose result is equal on every rank of their group.
_GIVE_ALL = ("all_reduce", "all_gather", "broadcast")
_SAMPLE = 4096


def warn_of_seeds(
    captured: Captured, primals: Sequence[Any] | None, exchange: Exchange | None
) -> None:
    """Warn if ranks of a group have different random states and an op draws for a value that should
    be equal on them. All ranks of the round call this, once they agree on the trace."""
    if exchange is None or not any(op.random for op in captured.trace.ops):
        return
    mine = json.dumps(_fingerprints(captured, primals, exchange.rank)).encode()
    told = dict(zip(exchange.ranks, map(json.loads, exchange.gather("seeds", mine)), strict=True))
    for group in captured.trace.groups:
        ranks = dist.get_process_group_ranks(dist.distributed_c10d._resolve_process_group(group))
        found = [told[rank] for rank in ranks if rank in told]
        if exchange.rank != ranks[0] or len({each["random state"] for each in found}) < 2:
            continue
        alike = {name for name, mark in found[0].items() if all(e.get(name) == mark for e in found)}
        node = drawn_for_common(captured, group, alike)
        if node is not None:
            warn(
                f"overlapc: ranks {', '.join(map(str, ranks))} hold the same activations where "
                f"{node.name} draws random numbers ({line_of(node)}), but their random states "
                "differ: from there on their copies differ, without an error. Seed these ranks "
                "alike (torch.manual_seed with one number) before the first step"
            )
            return


def drawn_for_common(captured: Captured, group: str, alike: set[str]) -> fx.Node | None:
    """The first forward op that draws random numbers for data that is equal on all ranks of
    `group`.

    `alike` are the inputs that are equal on these ranks, and the ops whose numbers are."""
    forward = forward_nodes(captured.joint)
    state: dict[fx.Node, str] = {}
    weights = captured.trace.of_kind("parameter", "buffer")
    for node in captured.joint.graph.nodes:
        if node not in forward:
            continue
        given = [state[n] for n in node.all_input_nodes if n in state]
        if node.op == "get_attr":
            state[node] = CONSTANT
        elif node.name not in alike:
            state[node] = OWN
        elif node.op == "placeholder":
            state[node] = CONSTANT if node.name in weights else COMMON
        else:
            state[node] = _made_of(node, given, group)
            if state[node] == NOISE and COMMON in given:
                return node
    return None


def _made_of(node: fx.Node, given: Sequence[str], group: str) -> str:
    if is_start(node) and group_of(node) == group:
        kind = str(node.target).partition(".")[2]
        if not kind.startswith(_GIVE_ALL):
            return OWN
        return CONSTANT if set(given) <= {CONSTANT} else COMMON
    if OWN in given:
        return OWN
    if NOISE in given or (is_random(node) and _chance(node) != 0):
        return NOISE
    return COMMON if COMMON in given else CONSTANT


def _chance(node: fx.Node) -> Any:
    """The probability of a random op, or None without one; with 0 the op is not random."""
    schema = getattr(node.target, "_schema", None)
    for place, argument in enumerate(schema.arguments if schema is not None else ()):
        if argument.name in ("p", "dropout_p"):
            given = node.args[place] if place < len(node.args) else argument.default_value
            return node.kwargs.get(argument.name, given)
    return None


def _fingerprints(
    captured: Captured, primals: Sequence[Any] | None, rank: int
) -> Mapping[str, str]:
    """Hashes that tell whether inputs, and numbers among the ops' arguments, are equal on ranks."""
    inputs = primal_nodes(captured.joint)
    found = {node.name: f"of rank {rank}" for node in inputs}
    devices = {torch.device("cpu")}
    with torch.no_grad(), _disable_current_modes():
        for node, value in zip(inputs, primals or (), strict=False):
            found[node.name] = _hash(_sample(value) if isinstance(value, torch.Tensor) else value)
            if isinstance(value, torch.Tensor) and value.is_cuda:
                devices.add(value.device)
        found["random state"] = _hash([_random_state(device) for device in devices])
    for node in captured.joint.graph.nodes:
        if node.op == "call_function":
            found[node.name] = _hash(_numbers(node))
    return found


def _random_state(device: torch.device) -> list[int]:
    state = torch.get_rng_state() if device.type == "cpu" else torch.cuda.get_rng_state(device)
    found: list[int] = state.tolist()
    return found


def _sample(tensor: torch.Tensor) -> list[int]:
    """The bytes of elements at even distances, enough to tell two tensors apart."""
    flat = tensor.detach().reshape(-1)
    some = flat[:: max(1, len(flat) // _SAMPLE)].cpu().contiguous()
    found: list[int] = some.view(torch.uint8).tolist()
    return found


def _numbers(node: fx.Node) -> str:
    """The arguments of a node that are no tensors; names of process groups and numbers of devices
    differ by rank."""
    args = (*node.args[:-1], None) if is_start(node) else node.args
    said = repr(fx.map_arg((args, dict(node.kwargs)), lambda n: n.name))
    return re.sub(r"(device\(type='\w+'), index=\d+", r"\1", said)


def _hash(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:12]
