"""From a joint FX graph to a Trace: `trace_joint`, and front end B: `capture`.

The joint graph is AOTAutograd's: placeholders `primals_*` and `tangents_*`, aten and
`_c10d_functional` calls, one output holding the results followed by the gradients. A node is an
op, except that `getitem` is folded into the op it takes from.
"""

from __future__ import annotations

import contextlib
import operator
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._functorch.partitioners import _is_tangent, is_sym_node
from torch.fx.graph import _Namespace
from torch.utils._pytree import tree_leaves

from overlapc.errors import CaptureError
from overlapc.ir import COMPUTE, Op, Piece, Role, Trace, Value
from overlapc.passes.as_eager import are_fake, as_eager
from overlapc.passes.roles import weight_grads

UNBACKED_HINT = 8192
# Collectives that read their input until they end; an all_reduce works on a copy of its own.
_COPIES_INPUT = ("all_reduce", "broadcast")


@dataclass
class Captured:
    """A joint graph and its Trace; op names are node names."""

    joint: fx.GraphModule
    trace: Trace
    num_fwd_outputs: int
    static_inputs: tuple[int, ...] = ()


def is_start(node: fx.Node) -> bool:
    return (
        isinstance(node.target, torch._ops.OpOverload)
        and node.target.namespace in ("_c10d_functional", "c10d_functional")
        and not is_wait(node)
    )


def is_wait(node: fx.Node) -> bool:
    return (
        isinstance(node.target, torch._ops.OpOverload)
        and node.target._schema.name.split("::")[-1] == "wait_tensor"
    )


def is_random(node: fx.Node) -> bool:
    """Does it draw from the default generator, itself or in a subgraph it runs?"""
    seeded = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    return seeded or any(is_random(inner) for inner in _inner_nodes(node))


def line_of(node: fx.Node) -> str:
    """The line of the user's code that a node comes from."""
    lines = [line.strip() for line in (node.stack_trace or "").splitlines()]
    frames = [line for line in lines if line.startswith("File ")]
    return frames[-1] if frames else "of no known source"


def _inner_nodes(node: fx.Node) -> Iterator[fx.Node]:
    """The nodes of the graphs that a higher-order op, such as `cond`, is given to run."""
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        for given in node.all_input_nodes:
            if given.op == "get_attr":
                inner = getattr(node.graph.owning_module, str(given.target), None)
                if isinstance(inner, fx.GraphModule):
                    yield from inner.graph.nodes


def is_folded_getitem(node: fx.Node) -> bool:
    """A getitem that names one output of a multi-output op."""
    return (
        node.op == "call_function"
        and node.target is operator.getitem
        and isinstance(node.args[0], fx.Node)
        and isinstance(node.args[0].meta.get("val"), (tuple, list))
    )


def group_of(node: fx.Node) -> str:
    """The process group of a collective: its last string argument."""
    names = [a for a in (*node.args, *node.kwargs.values()) if isinstance(a, str)]
    if not names:
        raise CaptureError(f"collective {node.target} names no process group", node.name)
    return str(names[-1])


def forward_nodes(joint: fx.GraphModule) -> set[fx.Node]:
    """The nodes that AOTAutograd's partitioner counts as forward: all up to the last so tagged."""
    found: list[fx.Node] = []
    last = 0
    for node in joint.graph.nodes:
        if node.op == "output":
            break
        if not _is_tangent(node):
            found.append(node)
        if node.meta.get("partitioner_tag") == "is_forward" or (
            node.op == "placeholder" and "primals" in str(node.target)
        ):
            last = len(found)
    return set(found[:last])


def tag_forward(joint: fx.GraphModule, num_fwd_outputs: int) -> None:
    """Tag what results are made of as forward: passes over the joint graph make nodes without a
    tag (of Python numbers that became inputs)."""
    results = joint.graph.find_nodes(op="output")[0].args[0][:num_fwd_outputs]
    front = [node for node in results if isinstance(node, fx.Node)]
    seen = set(front)
    while front:
        node = front.pop()
        if node.op == "call_function":
            node.meta["partitioner_tag"] = "is_forward"
        front += [given for given in node.all_input_nodes if given not in seen]
        seen.update(node.all_input_nodes)


def number_ops(joint: fx.GraphModule) -> None:
    """Name the ops of each kind by their order in the graph: `mm`, `mm_1`, `mm_2`.

    Tracing also numbers what is dropped later. Ranks that keep different parts of one result, such
    as `split(x)[rank]`, would call the same op by different names.
    """
    names = _Namespace()
    for node in joint.graph.nodes:
        if node.op != "call_function":
            names.create_name(node.name, node)
    for node in joint.graph.nodes:
        if node.op == "call_function":
            node.name = names.create_name(re.sub(r"(_\d+)+$", "", node.name), node)
    joint.graph._graph_namespace = names


def trace_joint(
    joint: fx.GraphModule,
    num_fwd_outputs: int,
    static_inputs: Iterable[int] = (),
    stage: int = 0,
    sizes: Mapping[str, int] | None = None,
) -> Captured:
    """The Trace of a joint graph.

    `static_inputs` are the positions of primals that are parameters or buffers: their gradients
    are weight gradients. `sizes` overrides the storage bytes of values (as measured).
    """
    static_inputs = tuple(static_inputs)
    _leave_changed_parameters(joint, num_fwd_outputs, static_inputs)
    number_ops(joint)
    tag_forward(joint, num_fwd_outputs)
    forward = forward_nodes(joint)
    weight = weight_grads(joint, forward, num_fwd_outputs, frozenset(static_inputs))
    ops: list[Op] = []
    values: dict[str, Value] = {}
    inputs: list[str] = []
    root: dict[str, str] = {}  # value -> storage
    bytes_of: dict[str, int] = {}
    symbols: dict[str, str] = {}
    changed = changed_inputs(joint)

    def storage(node: fx.Node, source: fx.Node) -> tuple[str, int]:
        """The storage a value lives on: that of the input it aliases, or one of its own."""
        for given in _aliases(source):
            if given.name in root and _same_storage(node, given):
                return root[given.name], bytes_of[root[given.name]]
        if is_wait(source) or _is_view(source):
            given = source.all_input_nodes[0]
            return root[given.name], bytes_of[root[given.name]]
        size = _storage_bytes(node.meta.get("val"))
        if sizes is not None:
            size = sizes.get(node.name, size)
        return node.name, size

    def define(node: fx.Node, producer: str, source: fx.Node) -> str:
        root[node.name], size = storage(node, source)
        bytes_of[root[node.name]] = size
        values[node.name] = Value(node.name, size, root[node.name], producer)
        return node.name

    for node in joint.graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            inputs.append(define(node, "", node))
            continue
        if node.op == "output" or is_folded_getitem(node):
            continue
        if node.op != "call_function":
            raise CaptureError(f"the graph holds a {node.op} node", node.name)
        made = [user for user in node.users if is_folded_getitem(user)] or [node]
        # A tuple handed on whole (a list of tensors into another op) keeps its own name too.
        if made != [node] and any(not is_folded_getitem(user) for user in node.users):
            made.append(node)
        given = [n.name for n in node.all_input_nodes]
        if is_wait(node):
            start = node.all_input_nodes[0]
            start = start.args[0] if is_folded_getitem(start) else start
            if not any(copy in str(start.target) for copy in _COPIES_INPUT):
                given += [n.name for n in start.all_input_nodes]
        letter = "F" if node in forward else "W" if node in weight else "I"
        ops.append(
            Op(
                name=node.name,
                role=_role(node, letter),
                lane=group_of(node) if is_start(node) else COMPUTE,
                piece=Piece(stage, letter, 0),
                inputs=tuple(dict.fromkeys(given)),
                outputs=tuple(define(n, node.name, node) for n in made),
                signature=_signature(node, symbols),
                random=is_random(node),
                recomputable=_is_recomputable(node) and not _reads(given, changed, root),
            )
        )
    results = joint.graph.find_nodes(op="output")[0].args[0]
    outputs = dict.fromkeys(n.name for n in results if isinstance(n, fx.Node))
    modules = {node.name: path for node in joint.graph.nodes if (path := _module(node))}
    modules = {op.name: modules[op.name] for op in ops if op.name in modules}
    trace = Trace(tuple(ops), tuple(values.values()), tuple(inputs), tuple(outputs), modules)
    try:
        trace.validate()
    except Exception as error:
        raise CaptureError(str(error)) from error
    return Captured(joint, trace, num_fwd_outputs, static_inputs)


def _module(node: fx.Node) -> str:
    """The innermost module that the op is of, or whose gradient it makes; "" where that is the
    model itself or not known."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    path = list(stack.values())[-1][0] if stack else ""
    path = re.sub(r"(?:\._modules)?\['([^']*)'\]", r".\1", str(path))  # L['self']._modules['head']
    return path.partition(".")[2].partition(".")[2]


def changed_inputs(joint: fx.GraphModule) -> set[str]:
    """Inputs that the model writes to, as batch norm does to its running statistics: by a `copy_`
    in the graph, or by AOTAutograd after the forward, from an output of the graph."""
    from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput

    inputs = joint.graph.find_nodes(op="placeholder")
    output = joint.graph.find_nodes(op="output")[0]
    written = [_whole(desc) for desc in output.meta.get("desc", ())]
    targets = [w.mutated_input for w in written if isinstance(w, InputMutationAOTOutput)]
    found = {node.name for node in inputs if _whole(node.meta.get("desc")) in targets}
    for node in joint.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
        found.add(node.args[0].name)
    return found


def _leave_changed_parameters(
    joint: fx.GraphModule, num_fwd_outputs: int, static_inputs: Iterable[int]
) -> None:
    """A parameter that the model only changes, under `no_grad`, gets no gradient, as in eager.

    AOTAutograd takes what it was changed to for a result, and hands on that result's gradient,
    which is zeros.
    """
    primals = [n for n in joint.graph.find_nodes(op="placeholder") if "primals" in str(n.target)]
    output = joint.graph.find_nodes(op="output")[0]
    results = list(output.args[0])
    for place in (num_fwd_outputs + i for i in static_inputs):
        parameter, gradient = primals[place - num_fwd_outputs], results[place]
        if isinstance(gradient, fx.Node) and _is_tangent(gradient):
            result = getattr(_whole(gradient.meta.get("desc")), "output", None)
            changed = getattr(result, "mutated_input", None)
            if changed is not None and changed == _whole(parameter.meta.get("desc")):
                results[place] = None
    output.args = (results,)


def _whole(desc: Any) -> Any:
    """What AOTAutograd calls the tensor subclass that the described tensor is a part of."""
    return _whole(desc.base) if type(desc).__name__.startswith("SubclassGetAttr") else desc


def _reads(given: Iterable[str], changed: Iterable[str], root: Mapping[str, str]) -> bool:
    """Is one of the values an input that changes later, or a view of it?"""
    return not {root[name] for name in given}.isdisjoint(changed)


def _role(node: fx.Node, letter: str) -> Role:
    if is_start(node):
        return "start"
    if is_wait(node):
        return "wait"
    return {"F": "forward", "I": "input_grad", "W": "weight_grad"}[letter]  # type: ignore[return-value]


def _is_recomputable(node: fx.Node) -> bool:
    """May this op run a second time? Not if it mutates, if it makes numbers rather than tensors,
    or if it draws random numbers inside, where PyTorch cannot make it draw the same again.
    (Nor if it reads what has been mutated since: see `changed_inputs`.)"""
    if is_sym_node(node) or not _tensors(node.meta.get("val")):
        return False
    inner = list(_inner_nodes(node))
    if any(is_random(n) for n in inner):
        return False
    return not any(_is_mutable(n) for n in (node, *inner))


def _is_mutable(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


# --------------------------------------------------------------------------- storage


def _tensors(val: Any) -> list[torch.Tensor]:
    if isinstance(val, torch.Tensor):
        return [val]
    if isinstance(val, (tuple, list)):
        return [t for item in val for t in _tensors(item)]
    return []


def _is_view(node: fx.Node) -> bool:
    """Ops whose kernel hands back its input's storage though the schema may not say so."""
    name = str(node.target)
    return name.startswith(("aten._unsafe_view.", "aten._reshape_alias.", "aten.detach."))


def _aliases(node: fx.Node) -> list[fx.Node]:
    """Inputs that an output of this node may share storage with, by its schema."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not any(r.alias_info is not None for r in schema.returns):
        return []
    return [n for n in node.all_input_nodes]


def may_alias(node: fx.Node) -> bool:
    """Whether a value may share its storage with what it was made from."""
    return is_wait(node) or _is_view(node) or bool(_aliases(node))


def _same_storage(a: fx.Node, b: fx.Node) -> bool:
    """Two values that an aliasing op joins: fake tensors of one graph share storages as real."""
    mine, theirs = _tensors(a.meta.get("val")), _tensors(b.meta.get("val"))
    if not mine or not theirs:
        return False
    try:
        keys = {t.untyped_storage()._cdata for t in theirs}
        return (
            any(t.untyped_storage()._cdata in keys for t in mine)
            or len([n for n in a.all_input_nodes]) <= 1
        )
    except (RuntimeError, NotImplementedError):
        return True


def hint(size: Any) -> int:
    """A symbolic size as a number: its example value, or UNBACKED_HINT for unknown ones."""
    if isinstance(size, int):
        return size
    node = size.node
    if node.has_hint():
        return int(node.hint)
    expr = node.expr
    known = {s: UNBACKED_HINT for s in expr.free_symbols}
    examples = getattr(node.shape_env, "backed_var_to_val", None)
    if examples is None:  # as older releases call it
        examples = node.shape_env.var_to_val
    known |= {s: int(examples[s]) for s in expr.free_symbols if s in examples}
    return max(0, int(expr.xreplace(known)))


def _storage_bytes(val: Any) -> int:
    total = 0
    for tensor in _tensors(val):
        try:
            total += hint(tensor.untyped_storage().nbytes())
        except (RuntimeError, NotImplementedError):
            numel = 1
            for size in tensor.shape:
                numel *= hint(size)
            total += numel * tensor.element_size()
    return total


# --------------------------------------------------------------------------- signature


def _signature(node: fx.Node, symbols: dict[str, str]) -> str:
    """Target, and dtype and shape of what enters and leaves. Numbers among the arguments are
    left out: they may differ from rank to rank (a slice by rank) where the work does not."""
    given = " ".join(
        _describe(n.meta.get("val"), symbols) for n in node.all_input_nodes if "val" in n.meta
    )
    is_op = isinstance(node.target, (torch._ops.OpOverload, torch._ops.HigherOrderOperator))
    # The text of a plain function holds its address, which differs from process to process.
    target = str(node.target) if is_op else fx.node._get_qualified_name(node.target)
    return f"{target} {given} > {_describe(node.meta.get('val'), symbols)}"


def _describe(val: Any, symbols: dict[str, str]) -> str:
    if isinstance(val, torch.Tensor):
        dtype = str(val.dtype).removeprefix("torch.")
        return f"{dtype}[{','.join(_dimension(s, symbols) for s in val.shape)}]"
    if isinstance(val, (tuple, list)):
        return f"({' '.join(_describe(v, symbols) for v in val)})"
    if isinstance(val, (torch.SymInt, int)):
        return "int"
    return type(val).__name__


def _dimension(size: Any, symbols: dict[str, str]) -> str:
    """Symbols are renamed in order of appearance, so that every rank writes them alike."""
    if isinstance(size, int):
        return str(size)
    expr = size.node.expr
    for symbol in sorted(expr.free_symbols, key=lambda s: s.name):
        symbols.setdefault(symbol.name, f"d{len(symbols)}")
    renamed = expr.xreplace({s: type(s)(symbols[s.name]) for s in expr.free_symbols})
    return str(renamed).replace(" ", "")


# --------------------------------------------------------------------------- front end B


def capture(model: torch.nn.Module, *args: Any, **kwargs: Any) -> Captured:
    """The joint graph of one training step of `model`, without running it.

    Works on real and fake tensors and on real and fake process groups. `model(*args)` must give
    tensors, at least one of which requires a gradient.
    """
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
    from torch._subclasses.fake_tensor import DataDependentOutputException
    from torch.fx.traceback import preserve_node_meta

    model = without_ties(model)
    given = [*tree_leaves((args, kwargs)), *model.parameters(), *model.buffers()]
    with contextlib.ExitStack() as stack, preserve_node_meta(), _named_modules(model):
        if not are_fake(given):  # what is planned on fake tensors runs elsewhere
            stack.enter_context(as_eager())
        try:
            try:
                with contextlib.ExitStack() as first:
                    exported = aot_export_joint_with_descriptors(first, model, args, kwargs)
                    stack.push(first.pop_all())
            except DataDependentOutputException:
                args, kwargs = _with_unknown_sizes((args, kwargs))
                exported = aot_export_joint_with_descriptors(stack, model, args, kwargs)
        except Exception as error:
            raise CaptureError(
                f"{type(model).__name__} could not be traced as one graph: {error}"
            ) from error
        joint = exported.graph_module
        metadata = exported._aot_state.fw_metadata
        static = tuple(getattr(metadata, "static_input_indices", ()))
        count = sum(1 for _ in exported.params_spec) + sum(1 for _ in exported.buffers_spec)
        return trace_joint(
            joint, num_fwd_outputs=_forward_outputs(joint), static_inputs=static or range(count)
        )


@contextlib.contextmanager
def _named_modules(model: torch.nn.Module) -> Iterator[None]:
    """While the model is traced, nodes know of which of its modules they are, as Dynamo's do."""
    from torch.fx import traceback

    around: list[Any] = []

    def enter(module: torch.nn.Module, _: Any) -> None:
        before = traceback.current_meta.get("nn_module_stack")
        around.append(before)
        name = names[module]
        more = {name: (f"L['self'].{name}", type(module))}
        traceback.current_meta["nn_module_stack"] = {**(before or {}), **more}

    def leave(*_: Any) -> None:
        before = around.pop()
        if before is None:
            traceback.current_meta.pop("nn_module_stack", None)
        else:
            traceback.current_meta["nn_module_stack"] = before

    names = {module: name for name, module in model.named_modules() if name}
    with contextlib.ExitStack() as hooks:
        for module in names:
            hooks.callback(module.register_forward_pre_hook(enter, prepend=True).remove)
            hooks.callback(module.register_forward_hook(leave, always_call=True).remove)
        yield


def _with_unknown_sizes(inputs: Any) -> Any:
    """The inputs as fake tensors of a mode that has symbols for sizes that are data."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv
    from torch.utils._pytree import tree_map_only

    mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True)
    return tree_map_only(torch.Tensor, lambda t: mode.from_tensor(t, static_shapes=True), inputs)


def without_ties(model: torch.nn.Module) -> torch.nn.Module:
    """The model, or, if it has some parameter or buffer under several names, a module around it
    that has each once: what is one for autograd must be one input of the graph."""
    for named in (model.named_parameters, model.named_buffers):
        if len([*named()]) != len([*named(remove_duplicate=False)]):
            return _Untied(model)
    return model


class _Untied(torch.nn.Module):
    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self._model = [model]  # in a list, so that it is no submodule
        self._names: dict[str, str] = {}
        for i, (name, parameter) in enumerate(model.named_parameters()):
            self._names[f"parameter{i}"] = name
            self.register_parameter(f"parameter{i}", parameter)
        for i, (name, buffer) in enumerate(model.named_buffers()):
            self._names[f"buffer{i}"] = name
            self.register_buffer(f"buffer{i}", buffer)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given = {name: getattr(self, mine) for mine, name in self._names.items()}
        return torch.func.functional_call(self._model[0], given, args, kwargs)


def _forward_outputs(joint: fx.GraphModule) -> int:
    """How many of the joint graph's outputs are results: those before the gradients, which a
    frozen parameter has None for."""
    from torch._functorch._aot_autograd.descriptors import GradAOTOutput

    output = joint.graph.find_nodes(op="output")[0]
    descs: Sequence[Any] = output.meta["desc"]
    results = [i for i, d in enumerate(descs) if d is not None and not isinstance(d, GradAOTOutput)]
    return max(results, default=-1) + 1
