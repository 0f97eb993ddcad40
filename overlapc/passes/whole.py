"""`WholeStep` is a training step that was traced as one graph (forward, loss and backward, as
torchtitan's graph trainer has it): as a joint graph, which a plan needs, and then in the plan's
order.

    inputs   -> primals, in their order; there are no tangents
    results  -> results, and behind them a gradient for each primal that has one

Everything up to the last op that the loss depends on is its forward. (A chunked loss has backwards
of its chunks within; for a plan they are ops like others.)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from overlapc.core.errors import CaptureError
from overlapc.core.ir import Cost, Plan, Problem, Profile, issue, issues
from overlapc.core.simulate import peak_bytes
from overlapc.passes.emit.rewrite import verify
from overlapc.passes.nodes import is_folded_getitem, is_random, once, writes
from overlapc.passes.storages import aliases, is_view
from overlapc.passes.trace import Captured, trace_in_order, trace_joint

_ATEN = torch.ops.aten
_FLEX = {torch.ops.higher_order.flex_attention, torch.ops.higher_order.flex_attention_backward}
_AGAIN = "_again"  # behind the name of an op that runs again


class WholeStep:
    """A graph of a step, changed in place: `captured` for a plan, then `reorder`."""

    def __init__(
        self, graph: fx.GraphModule, gradients: Mapping[int, int], static: Collection[int]
    ) -> None:
        """`gradients` are the places of gradients among the graph's results, by the place of the
        input that they are of. `static` are the places of inputs that last from step to step."""
        self.graph = graph
        self._output = graph.graph.find_nodes(op="output")[0]
        self._inputs = graph.graph.find_nodes(op="placeholder")
        self._targets = [node.target for node in self._inputs]
        self._results = self._output.args
        for node in graph.graph.nodes:
            _refuse(node)
            if node.op == "call_function" and is_random(node):
                once(node)  # one graph has no states of generators
        write_apart(graph)
        self.captured = self._captured(gradients, static)

    def _captured(self, gradients: Mapping[int, int], static: Collection[int]) -> Captured:
        given: Any = self._results[0]
        of_inputs = set(gradients.values())
        results = [each for i, each in enumerate(given) if i not in of_inputs]
        grads = [given[gradients[i]] if i in gradients else None for i in range(len(self._inputs))]
        try:
            for i, node in enumerate(self._inputs):
                node.target = f"primals_{i + 1}"
            self._output.args = ([*results, *grads],)
            captured = trace_joint(self.graph, len(results), sorted(static))
        except BaseException:
            self.restore()
            raise
        return captured

    def restore(self) -> None:
        """Give the graph its own inputs and results back."""
        for node, target in zip(self._inputs, self._targets, strict=True):
            node.target = target
        self._output.args = self._results
        self.graph.recompile()

    def reorder(self, plan: Plan) -> None:
        """Put the graph's ops into the order of a plan that passed `check`, with a copy of each op
        that it recomputes. Inputs and results are the graph's own again."""
        order_as_planned(self.captured, plan)
        self.restore()


def order_as_planned(captured: Captured, plan: Plan) -> None:
    """Put a joint graph's ops into the order of a plan, in place: a recomputed op is a copy, and
    what belongs to the backward reads it."""
    graph, trace, saved = captured.joint.graph, captured.trace, frozenset(plan.saved)
    nodes = {node.name: node for node in graph.nodes}
    output = graph.find_nodes(op="output")[0]
    again: dict[fx.Node, fx.Node] = {}
    emitted: dict[fx.Node, str] = {}

    def in_backward(node: fx.Node) -> fx.Node:
        """What a reader in the backward reads in the place of a node."""
        maker = node.args[0].name if is_folded_getitem(node) else node.name  # type: ignore[union-attr]
        if maker not in trace.op or not trace.op[maker].is_forward or node.name in saved:
            return node
        return again[node]

    for name, recomputed in issues(plan.order):
        node = nodes[name]
        items = [user for user in node.users if is_folded_getitem(user)]
        if recomputed:
            _copy(graph, output, node, items, in_backward, again)
            emitted[again[node]] = issue(name, True)
            continue
        if not trace.op[name].is_forward:
            node.args, node.kwargs = fx.map_arg((node.args, node.kwargs), in_backward)
        for moved in (node, *items):
            output.prepend(moved)
        emitted[node] = name
    _drop_unread(graph)
    graph.lint()
    captured.joint.recompile()
    verify(captured.joint, plan.order, emitted)


def peak_in_order(graph: fx.GraphModule) -> int:
    """The most bytes that a graph's own values take at a time in the order that it has."""
    trace = trace_in_order(graph).trace
    order = tuple(op.name for op in trace.ops)
    free = Profile(dict.fromkeys(order, Cost()))
    return peak_bytes(Problem(trace, free, phases=("F",)), Plan("", "none", (), order))


def is_flex(node: fx.Node) -> bool:
    """Is it flex attention, which torchtitan has Inductor compile behind a plan?"""
    return node.target in _FLEX


def _copy(
    graph: fx.Graph,
    before: fx.Node,
    node: fx.Node,
    items: Sequence[fx.Node],
    reads: Callable[[fx.Node], fx.Node],
    again: dict[fx.Node, fx.Node],
) -> None:
    """Copy an op, and the items of its tuple, to run again."""
    with graph.inserting_before(before):
        # A region that Inductor compiles is an op and the subgraphs that it alone reads.
        parts = [given for given in node.all_input_nodes if given.op == "get_attr"]
        own = {given: _copied(graph, given) for given in parts if is_flex(node)}
        for one in (node, *items):
            reader = again.__getitem__ if one is not node else lambda n: own.get(n) or reads(n)
            again[one] = _copied(graph, one, reader)
            again[one].name = graph._graph_namespace.create_name(one.name + _AGAIN, again[one])


def _copied(
    graph: fx.Graph, node: fx.Node, reads: Callable[[fx.Node], fx.Node] | None = None
) -> fx.Node:
    """A copy of a node, whose marks are its own."""
    copy = graph.node_copy(node, reads or (lambda given: given))
    custom = dict(node.meta.get("custom") or {})
    copy.meta = dict(node.meta, autograd_backward=True, **({"custom": custom} if custom else {}))
    return copy


def _drop_unread(graph: fx.Graph) -> None:
    """Erase items of tuples that nobody reads: of an op that runs again, or whose copies do."""
    for node in reversed(list(graph.nodes)):
        if is_folded_getitem(node) and not node.users:
            graph.erase_node(node)


def write_apart(graph: fx.GraphModule) -> None:
    """Have ops that write into a value which they alone read make a new value, where such an op
    exists: these may run again. CaptureError for writes that others see."""
    for node in list(graph.graph.nodes):
        if node.op != "call_function" or not writes(node) or _scattered(node):
            continue
        target = node.args[0] if node.args else None
        lone = isinstance(target, fx.Node) and list(target.users) == [node]
        shared = lone and not writes(target) and _is_part(target)
        if not isinstance(target, fx.Node) or not lone or shared:
            raise CaptureError(f"{node.target} writes into a value that others read", node.name)
        if target.op == "call_function":
            _make_new(node)


def _scattered(node: fx.Node) -> bool:
    """Is it `z[a:b].copy_(x)` of a z that the graph makes? Then whoever reads z behind it reads a
    new one from now on. (So chunked losses collect their gradients.)"""
    if node.target != _ATEN.copy_.default or node.users or len(node.args) != 2:
        return False
    part, x = node.args
    if not isinstance(part, fx.Node) or part.target != _ATEN.slice.Tensor or len(part.users) > 1:
        return False
    z: Any = part.args[0]
    alike = isinstance(x, fx.Node) and x.meta["val"].shape == part.meta["val"].shape
    if not alike or z.op != "call_function" or writes(z) or _is_part(z):
        return False
    views = [user for user in z.users if user < node and user is not part and _is_part(user)]
    if any(reader > node or _is_part(reader) for view in views for reader in view.users):
        return False  # it may be read behind the write
    with node.graph.inserting_before(node):
        made = node.graph.call_function(_ATEN.slice_scatter.default, (z, x, *part.args[1:]))
    given: Any = fx.map_arg(made.args, lambda each: each.meta["val"])
    made.meta = dict(node.meta, val=_ATEN.slice_scatter.default(*given))
    z.replace_all_uses_with(made, lambda user: user > node)
    for gone in (node, part):
        node.graph.erase_node(gone)
    return True


def _is_part(node: fx.Node) -> bool:
    """Is it another value's memory?"""
    return is_view(node) or bool(aliases(node))


def _make_new(node: fx.Node) -> None:
    """Give an op's functional form to the node, if its result has the same form."""
    target = node.target
    assert isinstance(target, OpOverload)
    name = target._schema.name.removeprefix("aten::").removesuffix("_")
    packet = getattr(torch.ops.aten, name, None) if target.namespace == "aten" else None
    overload = getattr(packet, target._overloadname, None)
    if overload is None or overload == target:
        return
    given = fx.map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
    before = node.meta["val"]
    made = overload(*given[0], **given[1])
    alike = (before.dtype, before.shape, before.stride())
    if (made.dtype, made.shape, made.stride()) == alike:
        node.target, node.meta["val"] = overload, made


def _refuse(node: fx.Node) -> None:
    """Raise for a node that a plan cannot move or run again."""
    target = node.target
    if isinstance(target, torch._ops.HigherOrderOperator) and not is_flex(node):
        raise CaptureError(f"the step holds {target} (a higher-order op)", node.name)
    if isinstance(target, OpOverload) and target.namespace == "ao":
        raise CaptureError(f"the step moves values to the host ({target})", node.name)
