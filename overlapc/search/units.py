"""What is captured once for many layouts: a few blocks of the model, and its head, on one rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from overlapc.ir import Problem
from overlapc.search.layouts import Cluster, Layout, expert_ranks
from overlapc.search.models import Model

BLOCKS = 4  # that are captured, or one period; a stage of more is as many times as long


@dataclass(frozen=True)
class UnitKey:
    """All that a capture depends on."""

    model: Model
    hardware: str
    gpus: int
    tp: int
    expert_ranks: int
    microbatch: int

    @staticmethod
    def of(model: Model, cluster: Cluster, layout: Layout) -> UnitKey:
        experts = expert_ranks(model, layout.dp)
        return UnitKey(model, cluster.hardware, cluster.gpus, layout.tp, experts, layout.microbatch)


@dataclass(frozen=True)
class Unit:
    """A few blocks as a problem, the head as another, and what travels between stages."""

    blocks: int
    problem: Problem
    received: tuple[str, ...]  # its inputs that another stage makes
    head: Problem
    boundary_bytes: int


def make_unit(key: UnitKey) -> Unit:
    """Capture the key's blocks and head on fake tensors and ranks, with estimated costs. The
    process has no process groups before and after."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from overlapc.profiler.hardware import load_hardware
    from overlapc.search.groups import fake_groups
    from overlapc.search.modules import Head

    model = key.model
    machine = load_hardware(key.hardware)
    dtype = torch.bfloat16 if "bfloat16" in machine.peak_flops else torch.float16
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with fake_groups(key.gpus, key.tp, key.expert_ranks) as (tensor, expert), FakeTensorMode():
            count = min(model.layers, max(BLOCKS // model.period, 1) * model.period)
            x = torch.zeros(key.microbatch, model.seq, model.width, requires_grad=True)
            blocks = _problem(model.blocks(count, tensor, expert), x, machine)
            head = _problem(Head(model, tensor), x, machine)
    finally:
        torch.set_default_dtype(before)
    problem, received = blocks
    return Unit(count, problem, received, head[0], x.nbytes)


def _problem(module: Any, x: Any, machine: Any) -> tuple[Problem, tuple[str, ...]]:
    from overlapc.merge import accumulate
    from overlapc.passes.capture import capture
    from overlapc.passes.parts import parameter_gradients
    from overlapc.profiler.estimate import estimate

    captured = capture(module, x)
    problem = Problem(captured.trace, estimate(captured, machine))
    # A gradient is read once, the float32 sum is read and written: five times its bytes.
    add_ns = machine.memory_ns(5 * 1024)
    problem = accumulate(problem, list(parameter_gradients(captured)), add_ns)
    static = set(captured.static_inputs)
    placeholders = captured.joint.graph.find_nodes(op="placeholder")
    received = [
        node.name
        for i, node in enumerate(placeholders)
        if i not in static or "tangents" in node.name
    ]
    return Problem(problem.trace, problem.profile), tuple(received)
