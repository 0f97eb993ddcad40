"""`trace_joint` turns a joint FX graph into a Trace.

The joint graph is AOTAutograd's: placeholders `primals_*` and `tangents_*`, aten and
`_c10d_functional` calls, one output holding the results followed by the gradients. A node is an
op, except that `getitem` is folded into the op it takes from.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx
from torch._ops import OpOverload
from torch.fx.graph import _Namespace

from overlapc.core.errors import CaptureError
from overlapc.core.ir import COMPUTE, Op, Piece, Role, Trace, Value
from overlapc.core.valid import validate_trace
from overlapc.passes.exact.launches import write_into_new
from overlapc.passes.nodes import (
    group_of,
    input_kinds,
    is_folded_getitem,
    is_primal,
    is_random,
    is_recomputable,
    is_start,
    is_tangent,
    is_wait,
    module_of,
    primal_nodes,
    signature_of,
    writes,
)
from overlapc.passes.roles import weight_grads
from overlapc.passes.storages import aliases, is_view, same_storage, storage_bytes, take_as_even
from overlapc.tools.reach import made_of

# Collectives that copy their input at the start; all others read it until they end.
_COPIES_INPUT = ("all_reduce", "broadcast")


@dataclass
class Captured:
    """A joint graph and its Trace; op names are node names."""

    joint: fx.GraphModule
    trace: Trace
    num_fwd_outputs: int
    static_inputs: tuple[int, ...] = ()

    @property
    def depends_on_data(self) -> bool:
        """Does the size of any value depend on data, as the loads of experts do?"""
        return any("unbacked_bindings" in node.meta for node in self.joint.graph.nodes)


def trace_joint(
    joint: fx.GraphModule,
    num_fwd_outputs: int,
    static_inputs: Iterable[int] = (),
    stage: int = 0,
    sizes: Mapping[str, int] | None = None,
    by_inductor: bool = False,
) -> Captured:
    """Return the Trace of a joint graph.

    `static_inputs` are the positions of primals that are parameters or buffers: their gradients
    are weight gradients. `sizes` overrides the storage bytes of values (as measured).
    """
    static_inputs = tuple(static_inputs)
    take_as_even(joint.graph)
    write_into_new(joint, by_inductor)
    _leave_changed_parameters(joint, num_fwd_outputs, static_inputs)
    _results_first(joint, num_fwd_outputs)
    number_ops(joint)
    tag_forward(joint, num_fwd_outputs)
    forward = forward_nodes(joint)
    weight = weight_grads(joint, forward, num_fwd_outputs, frozenset(static_inputs))
    changed = changed_inputs(joint)
    values = _Values(sizes or {})
    ops: list[Op] = []
    inputs: list[str] = []
    symbols: dict[str, str] = {}
    for node in joint.graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            inputs.append(values.define(node, "", node))
            continue
        if node.op == "output" or is_folded_getitem(node):
            continue
        if node.op != "call_function":
            raise CaptureError(f"the graph holds a {node.op} node", node.name)
        letter = "F" if node in forward else "W" if node in weight else "I"
        given = _given(node)
        ops.append(
            Op(
                name=node.name,
                role=_role(node, letter),
                lane=group_of(node) if is_start(node) else COMPUTE,
                piece=Piece(stage, letter, 0),
                inputs=given,
                outputs=tuple(values.define(n, node.name, node) for n in _made(node)),
                signature=signature_of(node, symbols),
                random=is_random(node),
                recomputable=is_recomputable(node) and not values.share(given, changed),
            )
        )
    results = joint.graph.find_nodes(op="output")[0].args[0]
    outputs = dict.fromkeys(n.name for n in results if isinstance(n, fx.Node))
    known_values = tuple(values.found.values())
    kinds = input_kinds(joint, num_fwd_outputs, static_inputs)
    paths = _modules_of(joint, ops)
    trace = Trace(tuple(ops), known_values, tuple(inputs), tuple(outputs), kinds, paths)
    _validate(trace)
    return Captured(joint, trace, num_fwd_outputs, static_inputs)


def trace_in_order(graph: fx.GraphModule) -> Captured:
    """The trace of a graph in the order that it has, as one piece: to be timed and weighed, not
    planned."""
    values, piece = _Values({}), Piece(0, "F", 0)
    ops: list[Op] = []
    inputs: list[str] = []
    symbols: dict[str, str] = {}
    take_as_even(graph.graph)
    for node in graph.graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            inputs.append(values.define(node, "", node))
        elif node.op == "call_function" and not is_folded_getitem(node):
            lane, given = group_of(node) if is_start(node) else COMPUTE, _given(node)
            made = tuple(values.define(n, node.name, node) for n in _made(node))
            role, signature = _role(node, "F"), signature_of(node, symbols)
            ops.append(Op(node.name, role, lane, piece, given, made, signature))
    output = graph.graph.find_nodes(op="output")[0]
    results = tuple(dict.fromkeys(n.name for n in output.all_input_nodes))
    return Captured(
        graph, Trace(tuple(ops), tuple(values.found.values()), tuple(inputs), results), 0
    )


def _validate(trace: Trace) -> None:
    try:
        validate_trace(trace)
    except Exception as error:
        raise CaptureError(str(error)) from error


def _modules_of(joint: fx.GraphModule, ops: Sequence[Op]) -> dict[str, str]:
    """The modules that ops belong to, where known, by the op's name."""
    paths = {node.name: path for node in joint.graph.nodes if (path := module_of(node))}
    return {op.name: paths[op.name] for op in ops if op.name in paths}


@dataclass
class _Values:
    """The values of a graph so far, each on the storage of the input that it aliases or on its own.

    `sizes` are measured bytes of storages."""

    sizes: Mapping[str, int]
    found: dict[str, Value] = field(default_factory=dict)
    bytes_of: dict[str, int] = field(default_factory=dict)  # of a storage

    def define(self, node: fx.Node, producer: str, source: fx.Node) -> str:
        """Add the value named by `node` and made by `source`; return its name."""
        root = self._root(node, source)
        if root not in self.bytes_of:
            size = storage_bytes(node.meta.get("val"))
            self.bytes_of[root] = self.sizes.get(root, size)
        self.found[node.name] = Value(node.name, self.bytes_of[root], root, producer)
        return node.name

    def _root(self, node: fx.Node, source: fx.Node) -> str:
        for given in aliases(source):
            if given.name in self.found and same_storage(node, given):
                return self.found[given.name].storage
        if is_wait(source) or is_view(source):
            return self.found[source.all_input_nodes[0].name].storage
        return node.name

    def share(self, names: Iterable[str], others: Iterable[str]) -> bool:
        """Is any of the values equal to one of the others, or a view of one?"""
        return not {self.found[name].storage for name in names}.isdisjoint(others)


def _given(node: fx.Node) -> tuple[str, ...]:
    """The values that an op reads; the wait of a collective also reads the inputs of its start."""
    given = [n.name for n in node.all_input_nodes]
    if is_wait(node):
        start = node.all_input_nodes[0]
        start = start.args[0] if is_folded_getitem(start) else start
        if not any(copy in str(start.target) for copy in _COPIES_INPUT):
            given += [n.name for n in start.all_input_nodes]
    return tuple(dict.fromkeys(given))


def _made(node: fx.Node) -> list[fx.Node]:
    """The nodes that name an op's outputs: itself, or the items of its tuple."""
    made = [user for user in node.users if is_folded_getitem(user)] or [node]
    # A tuple that is passed on whole (a list of tensors into another op) keeps its own name, too.
    if made != [node] and any(not is_folded_getitem(user) for user in node.users):
        made.append(node)
    return made


def _role(node: fx.Node, letter: str) -> Role:
    if is_start(node):
        return "start"
    if is_wait(node):
        return "wait"
    return {"F": "forward", "I": "input_grad", "W": "weight_grad"}[letter]  # type: ignore[return-value]


def forward_nodes(joint: fx.GraphModule) -> set[fx.Node]:
    """The nodes that AOTAutograd's partitioner counts as forward: all up to the last one tagged
    so."""
    nodes: list[fx.Node] = []
    last = 0
    for node in joint.graph.nodes:
        if node.op == "output":
            break
        if not is_tangent(node):
            nodes.append(node)
        if node.meta.get("partitioner_tag") == "is_forward" or is_primal(node):
            last = len(nodes)
    return set(nodes[:last])


def _results_first(joint: fx.GraphModule, num_fwd_outputs: int) -> None:
    """Move the nodes that results depend on before the backward. A view that is a result may be
    traced behind the backward, and AOTAutograd's partitioner would count all nodes before that view
    as forward."""
    behind: set[fx.Node] = set()
    needed = _forward_nodes(joint, num_fwd_outputs)
    begins: fx.Node | None = None
    for node in list(joint.graph.nodes):
        if is_tangent(node) or not behind.isdisjoint(node.all_input_nodes):
            behind.add(node)
            begins = begins or (node if node.op == "call_function" else None)
        elif begins is not None and node in needed and node.op == "call_function":
            begins.prepend(node)


def tag_forward(joint: fx.GraphModule, num_fwd_outputs: int) -> None:
    """Tag the nodes that results depend on as forward: passes over the joint graph make nodes
    without a tag (of Python numbers that became inputs)."""
    for node in _forward_nodes(joint, num_fwd_outputs):
        if node.op == "call_function":
            node.meta["partitioner_tag"] = "is_forward"


def _forward_nodes(joint: fx.GraphModule, num_fwd_outputs: int) -> set[fx.Node]:
    """The results of the forward, and all nodes that they depend on."""
    results = joint.graph.find_nodes(op="output")[0].args[0][:num_fwd_outputs]
    return set(made_of(node for node in results if isinstance(node, fx.Node)))


def number_ops(joint: fx.GraphModule) -> None:
    """Name the ops of each kind by their order in the graph: `mm`, `mm_1`, `mm_2`.

    Tracing also numbers ops that are dropped later. So ranks that keep different parts of one
    result, such as `split(x)[rank]`, would otherwise give the same op different names.
    """
    names = _Namespace()
    for node in joint.graph.nodes:
        if node.op != "call_function":
            names.create_name(node.name, node)
    for node in joint.graph.nodes:
        if node.op == "call_function":
            node.name = names.create_name(re.sub(r"(_\d+)+$", "", node.name), node)
    joint.graph._graph_namespace = names


def changed_inputs(joint: fx.GraphModule) -> set[str]:
    """Return the inputs that the model writes to, as batch norm writes its running statistics: by a
    `copy_` in the graph, or by AOTAutograd after the forward, from an output of the graph."""
    from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput

    inputs = joint.graph.find_nodes(op="placeholder")
    output = joint.graph.find_nodes(op="output")[0]
    written = [_whole(desc) for desc in output.meta.get("desc", ())]
    targets = [w.mutated_input for w in written if isinstance(w, InputMutationAOTOutput)]
    changed = {node.name for node in inputs if _whole(node.meta.get("desc")) in targets}
    for node in joint.graph.nodes:
        of_aten = isinstance(node.target, OpOverload) and node.target.namespace == "aten"
        if of_aten and writes(node):
            changed.add(node.args[0].name)
    return changed


def changed_with_gradient(joint: fx.GraphModule) -> list[tuple[int, ...]]:
    """Return the shapes of inputs that the model changes and that have a gradient afterwards."""
    tangents = [n for n in joint.graph.find_nodes(op="placeholder") if is_tangent(n)]
    results = [(n, getattr(_whole(n.meta.get("desc")), "output", None)) for n in tangents]
    return [tuple(n.meta["val"].shape) for n, made in results if hasattr(made, "mutated_input")]


def _leave_changed_parameters(
    joint: fx.GraphModule, num_fwd_outputs: int, static_inputs: Iterable[int]
) -> None:
    """Give no gradient to a parameter that the model only changes under `no_grad`, as in eager.

    AOTAutograd treats the changed value as a result, and returns that result's gradient, which is
    zeros.
    """
    output = joint.graph.find_nodes(op="output")[0]
    results = list(output.args[0])
    static = frozenset(static_inputs)
    # Inputs that are numbers may have no place among the gradients.
    pairs = zip(primal_nodes(joint), results[num_fwd_outputs:], strict=False)
    for i, (parameter, gradient) in enumerate(pairs):
        if i in static and isinstance(gradient, fx.Node) and is_tangent(gradient):
            result = getattr(_whole(gradient.meta.get("desc")), "output", None)
            changed = getattr(result, "mutated_input", None)
            if changed is not None and changed == _whole(parameter.meta.get("desc")):
                results[num_fwd_outputs + i] = None
    output.args = (results,)


def _whole(desc: Any) -> Any:
    """AOTAutograd's description of the tensor subclass that the described tensor is a part of."""
    return _whole(desc.base) if type(desc).__name__.startswith("SubclassGetAttr") else desc


def may_alias(node: fx.Node) -> bool:
    """May a value share its storage with an input of its op?"""
    return is_wait(node) or is_view(node) or bool(aliases(node))
