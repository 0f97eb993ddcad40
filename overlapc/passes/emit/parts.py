"""`cut` cuts a planned training step into parts that pass their state on explicitly.

    forward    inputs -> results, saved values            F
    backward   saved values, tangents -> gradients        R, I and W
    merged     both, of two microbatches, in one order; `join` makes it, and those of slices
    pair       two forwards as one graph, and two backwards
    pieces     the backward in three: R (recompute) needs no tangents, and W (only for weight
               gradients) can wait

A part takes and returns values by name: an input of the joint graph by its node's name, a result as
`result0`, a gradient as `gradient3` (of the input at that place), a saved value by its node's name.
A parameter's gradient is added to its owner, named `owner_of_` and the input's name.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch._functorch import config as functorch_config

from overlapc.core.errors import CaptureError
from overlapc.core.ir import Plan, issue
from overlapc.core.merge import ADD, at
from overlapc.core.stages import TURNS, turns
from overlapc.nn.layers import summed
from overlapc.passes.capture.joint import Owner, is_gradient, owner_of
from overlapc.passes.draws import Draw
from overlapc.passes.emit.direct import direct
from overlapc.passes.emit.rewrite import Emitted, emit, reorder, verify
from overlapc.passes.nodes import is_before, is_folded_getitem, is_total, primal_nodes
from overlapc.passes.trace import Captured, changed_inputs, may_alias

Deliver = Callable[[Sequence[Any], Tensor, bool], None]  # as `accumulate`; a module's function


@dataclass
class Part:
    """A graph with the names of its inputs and outputs, in order. `names` maps nodes to issues of
    the plan: `R:` for recompute."""

    module: fx.GraphModule
    takes: tuple[str, ...]
    gives: tuple[str, ...]
    names: dict[fx.Node, str]
    # What runs, with the module and its forward, of which it was made.
    _compiled: tuple[Any, Any, Callable[[list[Any]], Any]] | None = field(
        default=None, init=False, repr=False, compare=False
    )

    def run(self, shared: Mapping[str, Any], *states: MutableMapping[str, Any]) -> None:
        """Run the part on the values that all microbatches share and on the state of each
        microbatch. The part removes the values that it takes from a state, and adds those that it
        returns."""
        given = []
        for name in self.takes:
            which, _, key = name.rpartition(":")
            given.append(shared[key] if key in shared else states[int(which or 0)].pop(key))
        results = self._forward(given)
        for name, value in zip(self.gives, results, strict=True):
            which, _, key = name.rpartition(":")
            if key not in shared:
                states[int(which or 0)][key] = value

    @property
    def _forward(self) -> Callable[[list[Any]], Any]:
        """The module's forward since its last `recompile`, which calls ops directly."""
        module, forward = self.module, type(self.module).forward
        made = self._compiled
        if made is None or made[0] is not module or made[1] is not forward:
            made = self._compiled = module, forward, direct(module)
        return made[2]


@dataclass
class Parts:
    """All parts of one microbatch, and how to merge those of two."""

    forward: Part
    backward: Part
    actions: Mapping[str, str]  # issue of the backward -> the action it is part of

    def merged(self, plan: Plan) -> Part:
        """Join the forward of one microbatch and the backward of another to one graph in the order
        of `plan`; the first state is the forward's, the second the backward's."""
        return join((self.forward, self.backward), plan.order)

    def pair(self, plan: Plan, second: Parts) -> tuple[Part, Part]:
        """Join the forwards of two microbatches to one graph, and their backwards to another, in
        the order of `plan`; `second` has the parts of the second microbatch."""
        forward = join((self.forward, second.forward), plan.order, at, apart=True)
        return forward, join((self.backward, second.backward), plan.order, at, apart=True)

    def pieces(self) -> dict[str, Part]:
        """Cut the backward into R, I and W: three parts that run in this order, at any time. (R
        returns the values that both it and I read.)"""
        turns = self._turns()
        return {letter: _piece(self.backward, turns, letter) for letter in _TURNS}

    def _turns(self) -> dict[fx.Node, int]:
        """Node of the backward -> its action. A node that is no op of the trace goes with its first
        reader."""
        turn_of: dict[fx.Node, int] = {}
        for node in reversed(self.backward.module.graph.nodes):
            if node.op in ("placeholder", "output"):
                continue
            name = self.backward.names.get(node)
            first = min((turn_of[user] for user in node.users if user in turn_of), default=0)
            turn_of[node] = _TURNS[self.actions[name]] if name else first
        for node in self.backward.module.graph.nodes:
            if node.target is operator.getitem and node.args[0] in turn_of:
                turn_of[node] = turn_of[node.args[0]]
        return turn_of


_TURNS = {letter: turn for turn, letter in enumerate(TURNS)}


def join(
    parts: Sequence[Part],
    order: Sequence[str],
    named: Callable[[str, int], str] | None = None,
    draws: Mapping[str, Draw] | None = None,
    apart: bool = False,
    states: Sequence[int] | None = None,
) -> Part:
    """Join parts of different microbatches, or of the slices of one, to one graph in the order. The
    graph runs on a state for each part, or on these `states`, of which a part takes what an earlier
    one gives. `named` gives the order's name of an issue of the i-th. Slices, which are not
    `apart`, ask each other what they counted, and the first draws the random numbers of all
    (`draws`, by op)."""
    states = range(len(parts)) if states is None else states
    graph = fx.Graph()
    names: dict[fx.Node, str] = {}
    results: dict[tuple[int, str], Any] = {}  # state, name
    copies: list[dict[fx.Node, Any]] = [{} for _ in parts]
    wholes: dict[str, fx.Node] = {}  # what is drawn for all slices
    draws, slices = draws or {}, named is not None and not apart
    takes = _taken(graph, parts, states, copies)
    for which, (state, part, copy) in enumerate(zip(states, parts, copies, strict=True)):
        for node, name in zip(_inputs(part), part.takes, strict=True):
            if node not in copy:  # an earlier part gives it
                copy[node] = results.pop((state, name))
        for node in part.module.graph.nodes:
            if node.op == "output":
                given = fx.node.map_arg(node.args[0], copy.__getitem__)
                results |= {(state, name): one for name, one in zip(part.gives, given, strict=True)}
            elif part.names.get(node) in draws and not is_folded_getitem(node):
                draw = draws[part.names[node]]
                if part.names[node] not in wholes:
                    wholes[part.names[node]] = draw.nodes(graph)
                given = copy[node.args[0]] if draw.is_dropout else None
                copy[node] = draw.node_of(graph, wholes[part.names[node]], state, given)
                copy[node].meta = dict(node.meta)
            elif slices and is_total(node):
                copy[node] = graph.call_function(summed, (copy[node.args[0]],))
                copy[node].meta = dict(node.meta)
            elif slices and state and is_before(node):
                copy[node] = _passed_on(
                    graph, parts[which - 1], copies[which - 1], part.names[node]
                )
            elif node.op != "placeholder":
                copy[node] = graph.node_copy(node, copy.__getitem__)
            if node in part.names and node.op != "placeholder":
                text = part.names[node]
                names[copy[node]] = named(text, state) if named else text
    if slices:
        _read_all(parts, copies)
    graph.output(tuple(results.values()))
    module = fx.GraphModule(_attributes(parts), graph)
    _ordered(module, order, names)
    gives = tuple(f"{state}:{name}" for state, name in results)
    return Part(module, takes, gives, names)


def _inputs(part: Part) -> Sequence[fx.Node]:
    return list(part.module.graph.find_nodes(op="placeholder"))


def _taken(
    graph: fx.Graph,
    parts: Sequence[Part],
    states: Sequence[int],
    copies: Sequence[dict[fx.Node, Any]],
) -> tuple[str, ...]:
    """Enter the inputs of the joined graph, but for what an earlier part of the same state gives;
    their names."""
    takes: list[str] = []
    there: set[tuple[int, str]] = set()
    for state, part, copy in zip(states, parts, copies, strict=True):
        for node, name in zip(_inputs(part), part.takes, strict=True):
            if (state, name) not in there:
                copy[node] = graph.node_copy(node)
                # All parts read the parameters; one shared name would keep values until the end.
                copy[node].target = copy[node].name
                takes.append(f"{state}:{name}")
        there |= {(state, name) for name in part.gives}
    return tuple(takes)


def _passed_on(graph: fx.Graph, part: Part, copy: Mapping[fx.Node, Any], name: str) -> fx.Node:
    """What the slice of this part counted at the op of that name, with what came before it."""
    mine = next(node for node, each in part.names.items() if each == name)
    passed = graph.call_function(torch.ops.aten.add.Tensor, (copy[mine.args[0]], copy[mine]))
    passed.meta = dict(mine.meta)
    return passed


def _read_all(parts: Sequence[Part], copies: Sequence[Mapping[fx.Node, Any]]) -> None:
    """Let totals of each slice read what they are of in all slices."""
    given: dict[str, list[fx.Node]] = {}
    totals: list[tuple[str, fx.Node]] = []
    for part, copy in zip(parts, copies, strict=True):
        for node, name in part.names.items():
            if is_total(node) and node in copy:
                given.setdefault(name, []).append(copy[node.args[0]])
                totals.append((name, copy[node]))
    for name, node in totals:
        node.args = tuple(given[name])


def _piece(backward: Part, turns: Mapping[fx.Node, int], letter: str) -> Part:
    nodes = backward.module.graph.nodes
    outside = dict(
        zip(backward.module.graph.find_nodes(op="placeholder"), backward.takes, strict=True)
    )
    results = backward.module.graph.find_nodes(op="output")[0].args[0]
    turn = _TURNS[letter]
    mine = [node for node in nodes if turns.get(node) == turn]
    graph = fx.Graph()
    copy: dict[fx.Node, fx.Node] = {}
    for node in mine:
        for other in node.all_input_nodes:
            if other not in copy and turns.get(other) != turn:
                copy[other] = graph.placeholder(other.name)
                copy[other].target = copy[other].name
    handed_on = [n for n in results if n.op == "placeholder" and letter == "I" and n not in copy]
    for node in dict.fromkeys(handed_on):  # an incoming gradient that is returned unchanged
        copy[node] = graph.placeholder(node.name)

    def key_of(node: fx.Node) -> str:
        """(The forward may have a node of the same name: a generator's state.)"""
        return outside.get(node, f"{node.name} of the backward")

    takes = [key_of(node) for node in copy]
    for node in mine:
        copy[node] = graph.node_copy(node, copy.__getitem__)
    gives = {}
    for node, new in copy.items():
        if any(turns.get(user, turn) > turn for user in node.users):
            gives[key_of(node)] = new
    for node, name in zip(results, backward.gives, strict=True):
        if turns.get(node, _TURNS["I"]) == turn:
            gives[name] = copy[node]
    graph.output(tuple(gives.values()))
    module = fx.GraphModule(_attributes([backward]), graph)
    names = {copy[node]: backward.names[node] for node in mine if node in backward.names}
    order = [names.get(copy[node], "") for node in mine]
    _ordered(module, [name for name in order if name], names)
    return Part(module, tuple(takes), tuple(gives), names)


def _attributes(parts: Iterable[Part]) -> torch.nn.Module:
    """A module that has the constants of the parts' graphs."""
    root = torch.nn.Module()
    for part in parts:
        for node in part.module.graph.find_nodes(op="get_attr"):
            setattr(root, str(node.target), getattr(part.module, str(node.target)))
    return root


def cut(captured: Captured, plan: Plan, deliver: Deliver | None = None) -> Parts:
    """Return the parts of a captured graph under a plan that passed `check`. `deliver` adds
    parameters' gradients to their owners as soon as they are made; other gradients are returned."""
    # One generator state for each draw, as a tensor, on any device.
    with functorch_config.patch(graphsafe_rng_functionalization=False):
        emitted = emit(captured, plan)
    forward = _forward(captured, emitted)
    saved = forward.gives[captured.num_fwd_outputs :]
    backward = _backward(captured, emitted, saved, deliver or accumulate)
    _ordered(backward.module, plan.order, backward.names)
    return Parts(forward, backward, turns(captured.trace, plan.order))


def accumulate(owners: Sequence[Owner], gradient: Tensor, owned: bool = False) -> None:
    """Add a gradient to `.grad` of its owners, as autograd does, or by autograd if hooks wait for
    it. The first gradient becomes `.grad`: the tensor itself if nobody else holds it (`owned`) and
    its layout is that of the parameter, else a copy."""
    with torch.no_grad():
        for owner in owners:
            tensor = owner.tensor
            if owner.watched:
                whole = gradient if owner.whole is None else owner.whole(gradient)
                torch.autograd.backward(tensor, whole)
                continue
            if owner.whole is not None:
                kept = owned or tensor.grad is not None
                whole = owner.whole(gradient if kept else gradient.clone())
                tensor.grad = whole if tensor.grad is None else tensor.grad.add_(whole)
                continue
            if tensor.grad is not None:
                mixed = tensor.grad.is_sparse and not gradient.is_sparse
                tensor.grad = gradient + tensor.grad if mixed else tensor.grad.add_(gradient)
                continue
            if gradient.is_sparse:
                tensor.grad = gradient.detach() if owned else gradient.detach().clone()
                continue
            all_of_it = gradient.untyped_storage().nbytes() == gradient.numel() * gradient.itemsize
            if owned and all_of_it and gradient.stride() == tensor.stride():
                tensor.grad = gradient.detach()
            else:
                tensor.grad = torch.empty_like(tensor).copy_(gradient)


def parameter_gradients(captured: Captured) -> dict[str, list[str]]:
    """Map each gradient to the inputs (parameters) whose gradient it is, by the names of nodes."""
    static = set(captured.static_inputs)
    inputs = primal_nodes(captured.joint)
    inputs_of: dict[str, list[str]] = {}
    results = captured.joint.graph.find_nodes(op="output")[0].args[0]
    for i, grad in enumerate(results[captured.num_fwd_outputs :]):
        if i in static and isinstance(grad, fx.Node):
            inputs_of.setdefault(grad.name, []).append(inputs[i].name)
    return inputs_of


def _forward(captured: Captured, emitted: Emitted) -> Part:
    nodes = list(emitted.forward.graph.find_nodes(op="output")[0].args[0])
    count = captured.num_fwd_outputs
    for node in nodes:
        if node is not None and not isinstance(node, (fx.Node, int, float)):
            raise CaptureError(f"the forward hands out {node!r}, which is no tensor or number")
    gives = [f"result{i}" for i in range(count)]
    gives += [str(getattr(node, "name", node)) for node in nodes[count:]]
    takes = [node.name for node in emitted.forward.graph.find_nodes(op="placeholder")]
    return Part(emitted.forward, tuple(takes), tuple(gives), _of(emitted, emitted.forward))


def _backward(captured: Captured, emitted: Emitted, saved: Sequence[str], deliver: Deliver) -> Part:
    module = emitted.backward
    graph = module.graph
    names = _of(emitted, module)
    trace = captured.trace
    names = {
        node: issue(name, name in trace.op and trace.op[name].is_forward)
        for node, name in names.items()
    }
    placeholders = graph.find_nodes(op="placeholder")
    _check_unchanged(captured, [node.name for node in placeholders])
    # Each graph names generator states differently, but in the same order.
    here = {node.name for node in placeholders}
    states = iter([name for name in saved if name not in here])
    takes = []
    for node in placeholders:
        known = node.name in saved or trace.kinds.get(node.name) == "gradient"
        takes.append(node.name if known else next(states))

    output = graph.find_nodes(op="output")[0]
    gradients = list(output.args[0])
    joint_results = captured.joint.graph.find_nodes(op="output")[0].args[0]
    origin = joint_results[captured.num_fwd_outputs :]
    wanted = parameter_gradients(captured)
    added: set[str] = set()
    given: list[Any] = []
    gives: list[str] = []
    static = set(captured.static_inputs)
    for i, (grad, source) in enumerate(zip(gradients, origin, strict=True)):
        if not isinstance(grad, fx.Node) or not is_gradient(source):
            continue
        if i not in static:
            given.append(grad)
            gives.append(f"gradient{i}")
            continue
        if source.name in added:
            continue
        added.add(source.name)
        owners = []
        for name in wanted[source.name]:
            with graph.inserting_before(placeholders[0]):
                owners.append(graph.placeholder(owner_of(name)))
            takes.insert(0, owner_of(name))
            placeholders.insert(0, owners[-1])
        with graph.inserting_before(output):
            owned = len(owners) == 1 and _has_one_reader(grad)
            add = graph.call_function(deliver, (tuple(owners), grad, owned))
        names[add] = source.name + ADD
    output.args = (tuple(given),)
    return Part(module, tuple(takes), tuple(gives), names)


def _has_one_reader(node: fx.Node) -> bool:
    """Is the output the only reader of the value, and of what the value may be a view of?"""
    while len(node.users) == 1 and node.op == "call_function":
        if is_folded_getitem(node):
            return not may_alias(node.all_input_nodes[0])
        if not may_alias(node):
            return True
        node = node.all_input_nodes[0]
    return False


def _check_unchanged(captured: Captured, saved: Sequence[str]) -> None:
    """Refuse graphs in which the forward of a later microbatch changes what a backward reads."""
    wrong = sorted(set(saved) & changed_inputs(captured.joint))
    if wrong:
        raise CaptureError(
            f"the backward reads {wrong[0]}, an input that the forward changes in place; expected "
            "buffers that are only changed, or only read: clone it before it is used"
        )


def _of(emitted: Emitted, module: fx.GraphModule) -> dict[fx.Node, str]:
    return {node: emitted.names[node] for node in module.graph.nodes if node in emitted.names}


def _ordered(module: fx.GraphModule, order: Sequence[str], names: Mapping[fx.Node, str]) -> None:
    """Put the graph into the order; nodes that are no op of the trace get names outside of the
    plan."""
    all_names = {node: names.get(node, f"#{i}") for i, node in enumerate(module.graph.nodes)}
    reorder(module, order, all_names)
    verify(module, order, names)
