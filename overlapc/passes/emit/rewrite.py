"""`rewrite` turns a captured graph and a plan into forward and backward FX graphs.

AOTAutograd's own partitioner gets the saved set as recompute tags, so PyTorch handles RNG states,
symbolic sizes and aliasing. `rewrite` then orders both graphs.
"""

from __future__ import annotations

import contextlib
import difflib
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import fx
from torch._functorch import config as functorch_config
from torch._functorch.partitioners import default_partition, is_sym_node
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.graph import _BoxedCodeGen
from torch.utils.checkpoint import CheckpointPolicy

from overlapc.core.errors import CaptureError
from overlapc.core.ir import Plan, issues
from overlapc.passes.nodes import is_folded_getitem, is_random
from overlapc.passes.trace import Captured, forward_nodes
from overlapc.tools.flags import debug_level, log

_CHECKS = (
    torch.ops.aten._assert_async.default,
    torch.ops.aten._assert_async.msg,
)
_CHECK = "overlapc_check"
_FOREIGN_TAGS = ("recompute", "ac_graph_id", "has_backward_hook")


def rewrite(
    captured: Captured, plan: Plan, joint_inputs: Any = None, **partition_options: Any
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Return forward and backward graphs that save what the plan saves, in the plan's order, boxed.

    The plan must have passed `check`. The joint graph's tags are overwritten.
    """
    emitted = emit(captured, plan, joint_inputs, **partition_options)
    return emitted.forward, emitted.backward


@dataclass
class Emitted:
    """Both graphs, with the op of the trace for each of their nodes."""

    forward: fx.GraphModule
    backward: fx.GraphModule
    names: dict[fx.Node, str]


def emit(
    captured: Captured, plan: Plan, joint_inputs: Any = None, **partition_options: Any
) -> Emitted:
    """Do what `rewrite` does, and also say which node is which op."""
    _name_outputs(captured.joint)
    _tag(captured, plan)
    options = {"num_fwd_outputs": captured.num_fwd_outputs, **partition_options}
    if "static_lifetime_input_indices" not in options:
        options["static_lifetime_input_indices"] = list(captured.static_inputs)
    settings = {"unsafe_allow_optimization_of_collectives": True}
    if joint_inputs is None:  # nobody would pass generators to the graphs
        settings["graphsafe_rng_functionalization"] = False
    with functorch_config.patch(settings), _fake_mode(captured.joint):
        made: list[fx.GraphModule] = []
        with _checks_renamed(captured.joint, made):
            made += default_partition(captured.joint, joint_inputs, **options)
    forward, backward = made
    _drop_backward(captured, forward)
    _objects_behind_states(forward, backward, options["num_fwd_outputs"])
    # The partitioner keeps every seeded op that it might need; unread ones must not run.
    backward.graph.eliminate_dead_code(
        is_impure_node=lambda node: node.op in ("placeholder", "output")
    )
    order = list(issues(plan.order))
    phase_one = {op.name for op in captured.trace.ops if op.is_forward}
    first = [name for name, again in order if not again and name in phase_one]
    second = [name for name, again in order if again or name not in phase_one]
    all_names: dict[fx.Node, str] = {}
    for module, planned in ((forward, first), (backward, second)):
        names = _origin(captured, module, plan)
        reorder(module, planned, names)
        verify(module, planned, names)
        _copy_where_no_view_is(module)
        all_names |= names
    _verify_saved(captured, plan, backward, names)
    if debug_level() >= 3:
        log(3, _changes(captured, plan))
    if debug_level() >= 4:
        log(4, f"forward:{forward.code}\nbackward:{backward.code}")
    return Emitted(forward, backward, all_names)


def _fake_mode(joint: fx.GraphModule) -> AbstractContextManager[Any]:
    """The fake mode that the graph was traced in, or a null context if it is on: the partitioner
    makes up a random state for recompute."""
    if detect_fake_mode() is None:
        for node in joint.graph.nodes:
            val = node.meta.get("val")
            if isinstance(val, FakeTensor):
                return val.fake_mode
    return contextlib.nullcontext()


def _changes(captured: Captured, plan: Plan) -> str:
    """Show what the plan changes in the traced order of the graph."""
    traced = [op.name for op in captured.trace.ops]
    lines = difflib.unified_diff(traced, plan.order, "traced", "planned", lineterm="", n=0)
    return "\n".join(lines) or "the plan changes nothing"


def _name_outputs(joint: fx.GraphModule) -> None:
    """Give a getitem to every multi-output op without one: the partitioner identifies such ops by
    their getitems, and an op kept only for its random draw has none."""
    for node in joint.graph.nodes:
        val = node.meta.get("val")
        if node.op == "call_function" and isinstance(val, (tuple, list)) and not node.users:
            with joint.graph.inserting_after(node):
                first = joint.graph.call_function(operator.getitem, (node, 0))
            first.meta = {**node.meta, "val": val[0]}


@contextlib.contextmanager
def _checks_renamed(joint: fx.GraphModule, made: list[fx.GraphModule]) -> Iterator[None]:
    """Within this context a joint graph's checks of its values (`one_hot` has one) are
    `_assert_scalar`: before torch 2.13 the partitioner knows no other, and recomputes nothing in a
    graph with others. They get their ops back, there and in the graphs `made`."""
    for node in joint.graph.nodes:
        if node.target in _CHECKS:
            node.meta[_CHECK] = node.target
            node.target = torch.ops.aten._assert_scalar.default
    try:
        yield
    finally:
        for graph in (joint, *made):
            for node in graph.graph.nodes:
                node.target = node.meta.pop(_CHECK, node.target)


def _tag(captured: Captured, plan: Plan) -> None:
    saved = frozenset(plan.saved)
    recomputed = frozenset(plan.recomputed)
    forward = forward_nodes(captured.joint)
    for node in captured.joint.graph.nodes:
        for tag in _FOREIGN_TAGS:
            node.meta.pop(tag, None)
        if node not in forward or node.op != "call_function" or is_sym_node(node):
            continue
        producer = node.args[0] if is_folded_getitem(node) else node
        if node.name in saved:
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        elif producer.name in recomputed:
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE


def _drop_backward(captured: Captured, forward: fx.GraphModule) -> None:
    """Erase backward ops that the partitioner leaves in the forward: it regards collectives as
    needed, and the forward can compute them where a gradient begins with a constant."""
    ops = captured.trace.op
    for node in reversed(list(forward.graph.nodes)):
        maker = node.args[0].name if is_folded_getitem(node) else node.name
        if not node.users and maker in ops and not ops[maker].is_forward:
            forward.graph.erase_node(node)


def _objects_behind_states(
    forward: fx.GraphModule, backward: fx.GraphModule, num_fwd_outputs: int
) -> None:
    """Move saved objects behind generator states. AOTAutograd expects saved tensors first, then
    objects (DTensor's meshes), then sizes, but RNG functionalisation puts its states, which are
    tensors, behind objects."""
    output = forward.graph.find_nodes(op="output")[0]
    saved = output.args[0][num_fwd_outputs:]
    objects = [
        node.name
        for node in saved
        if not isinstance(node.meta.get("val"), torch.Tensor) and not is_sym_node(node)
    ]
    if not objects:
        return
    sizes = [node for node in saved if is_sym_node(node)]
    tensors = [node for node in saved if node not in sizes and node.name not in objects]
    held = [node for node in saved if node.name in objects]
    output.args = ((*output.args[0][:num_fwd_outputs], *tensors, *held, *sizes),)
    inputs = backward.graph.find_nodes(op="placeholder")
    states = [node for node in inputs if "rng_state" in str(node.target)]
    for node in reversed([n for n in inputs if n.name in objects] if states else []):
        states[-1].append(node)


def _origin(captured: Captured, module: fx.GraphModule, plan: Plan) -> dict[fx.Node, str]:
    """Node of the forward or backward graph -> op of the trace. Nodes keep their names, except
    recomputed random ops: RNG functionalisation replaces these in both graphs, in the order of the
    joint graph."""
    nodes = list(module.graph.nodes)
    names = {node: node.name for node in nodes if node.name in captured.trace.op}
    present = {node.name for node in nodes}
    recomputed = frozenset(plan.recomputed)
    missing = [
        node.name
        for node in captured.joint.graph.nodes
        if node.name in recomputed and is_random(node) and node.name not in present
    ]
    replaced = [n for n in nodes if n.op == "call_function" and "rng_state" in str(n.target)]
    states = [n for n in module.graph.find_nodes(op="placeholder") if "rng_state" in str(n.target)]
    made = states or replaced
    if len(missing) != len(made):
        raise CaptureError(
            f"{len(missing)} random ops are to be recomputed, PyTorch's partitioner made "
            f"{len(made)}"
        )
    if states:  # of the backward: ops that nothing reads are gone, their states are not
        return names | {node: missing[states.index(_state(node, states))] for node in replaced}
    return names | dict(zip(replaced, missing, strict=True))


def _state(node: fx.Node, states: Sequence[fx.Node]) -> fx.Node:
    """The state that an op of the backward is given; states are in the order of the joint graph."""
    return next(state for state in states if state in node.all_input_nodes)


def reorder(
    module: fx.GraphModule, order: Iterable[str], names: Mapping[fx.Node, str] | None = None
) -> None:
    """Put the graph's nodes into the given order of op names, in place, and box it.

    A node that the order does not name (sizes, getitems, RNG plumbing) goes right before its first
    user; a getitem right after its source. Names that the graph lacks are skipped.
    """
    graph = module.graph
    by_name = {(names or {}).get(node, node.name): node for node in graph.nodes}
    output = graph.find_nodes(op="output")[0]
    placed: dict[fx.Node, None] = {n: None for n in graph.find_nodes(op="placeholder")}

    def place(node: fx.Node) -> None:
        stack = [node]
        while stack:
            top = stack[-1]
            if top in placed:
                stack.pop()
                continue
            waiting = [n for n in top.all_input_nodes if n not in placed]
            if waiting:
                stack.extend(reversed(waiting))
                continue
            stack.pop()
            placed[top] = None
            for user in top.users:
                # All getitems at once: a tuple keeps its tensors alive until the last is taken.
                if user.target is operator.getitem and user not in placed:
                    stack.append(user)

    for name in order:
        if name in by_name:
            place(by_name[name])
    for node in list(graph.nodes):
        if node is not output:
            place(node)
    for node in placed:
        if node.op != "placeholder":
            output.prepend(node)
    graph.set_codegen(_BoxedCodeGen())
    graph.lint()
    module.recompile()
    if not getattr(module, "_boxed_call", False):  # older releases do not set it
        module._boxed_call = True  # type: ignore[assignment]


def verify(module: fx.GraphModule, planned: Sequence[str], names: Mapping[fx.Node, str]) -> None:
    """Raise unless the emitted graph issues the plan's ops in the plan's order, except dead
    code."""
    emitted = [names[n] for n in module.graph.nodes if n in names and n.op == "call_function"]
    alive = set(emitted)
    expected = [name for name in planned if name in alive]
    if emitted != expected:
        wrong = next(pair for pair in zip_longest(emitted, expected) if pair[0] != pair[1])
        raise CaptureError(f"the graph issues {wrong[0]} where the plan says {wrong[1]}")


def _copy_where_no_view_is(module: fx.GraphModule) -> None:
    """Where sizes are symbols, strides may not be those of real results (`exact/layouts.py`): a
    `reshape` that was traced as a view may be a copy, as in eager."""
    aten = torch.ops.aten
    for node in module.graph.find_nodes(op="call_function", target=aten.view.default):
        given = node.args[0].meta.get("val")
        if isinstance(given, torch.Tensor) and any(
            isinstance(n, torch.SymInt) for n in given.shape
        ):
            node.target = aten.reshape.default
    module.recompile()


def _verify_saved(
    captured: Captured, plan: Plan, backward: fx.GraphModule, names: Mapping[fx.Node, str]
) -> None:
    """Raise if the backward recomputes anything that the plan saves."""
    recomputed = frozenset(plan.recomputed)
    issued = [n for n in backward.graph.nodes if n in names and n.op == "call_function"]
    for name in [names[node] for node in issued]:
        op = captured.trace.op[name]
        if op.is_forward and op.recomputable and name not in recomputed:
            raise CaptureError(f"PyTorch's partitioner recomputes {name}, which the plan saves")
