"""The baseline `torch`: PyTorch's own budgeted min-cut chooses what to save."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch._functorch import config as functorch_config
from torch._functorch.partitioners import min_cut_rematerialization_partition

from overlapc.passes.trace import Captured
from overlapc.tools.flags import log

SWEEP = (1.0, 0.8, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0)
GLANCE = (1.0, 0.5)  # each takes a second or more for a few hundred ops


def torch_choices(
    captured: Captured, joint_inputs: Any, budgets: Sequence[float] = SWEEP
) -> list[tuple[str, ...]]:
    """For each activation_memory_budget, return the names of the forward values that torch would
    save."""
    choices: dict[tuple[str, ...], None] = {}
    for _, backward in torch_partitions(captured, joint_inputs, budgets):
        choices[saved_names(captured, backward)] = None
    return list(choices)


def torch_partitions(
    captured: Captured, joint_inputs: Any, budgets: Sequence[float] = SWEEP
) -> Iterator[tuple[fx.GraphModule, fx.GraphModule]]:
    """Return the forward and backward graph for each activation_memory_budget, without budgets at
    which torch's partitioner fails on this graph."""
    for budget in budgets:
        joint = _copied(captured.joint)
        for node in joint.graph.nodes:
            for tag in ("recompute", "ac_graph_id", "has_backward_hook"):
                node.meta.pop(tag, None)
        options = {
            "activation_memory_budget": budget,
            "activation_memory_budget_runtime_estimator": "flops",
            "activation_memory_budget_solver": "dp",
            "unsafe_allow_optimization_of_collectives": budget == 0.0,
            # DTensor's meshes enter as script objects, which older releases lack.
            "unsafe_treat_script_objects_as_zero_size": True,
        }
        known = {name: value for name, value in options.items() if hasattr(functorch_config, name)}
        try:
            with functorch_config.patch(known):
                forward, backward = min_cut_rematerialization_partition(
                    joint,
                    joint_inputs,
                    num_fwd_outputs=captured.num_fwd_outputs,
                    static_lifetime_input_indices=list(captured.static_inputs),
                )
        except Exception as error:
            log(1, f"torch's partitioner at activation_memory_budget={budget}: {error}")
            continue
        yield forward, backward


def saved_names(captured: Captured, backward: fx.GraphModule) -> tuple[str, ...]:
    """Return the forward values that a backward graph takes as inputs."""
    forward = {name for op in captured.trace.ops if op.is_forward for name in op.outputs}
    names = [
        str(node.target)
        for node in backward.graph.find_nodes(op="placeholder")
        if isinstance(node.meta.get("val"), torch.Tensor)
    ]
    return tuple(name for name in names if name in forward)


def _copied(joint: fx.GraphModule) -> fx.GraphModule:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in joint.graph.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    return fx.GraphModule(joint, graph)
