"""`traced` captures a call of a model chunk as a graph; `emitted` makes its planned parts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch._aot_autograd import descriptors
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import config as fx_config
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from overlapc.core.errors import CaptureError
from overlapc.core.ir import Plan
from overlapc.megatron import changes, packed, recompute, tracing
from overlapc.megatron.gradients import (
    Receiver,
    deliver,
    fuse,
    fused_weights,
    receiver,
    unreduced,
)
from overlapc.megatron.outside import left_outside
from overlapc.passes.capture.front import capture
from overlapc.passes.capture.joint import Joint, Leaf, is_gradient, owner_of
from overlapc.passes.emit.parts import Parts, cut
from overlapc.passes.exact.as_eager import as_eager
from overlapc.passes.exact.identities import without_identities
from overlapc.passes.nodes import primal_nodes
from overlapc.passes.opaque.op import refuse_added_twice
from overlapc.passes.opaque.stand_in import placed
from overlapc.passes.trace import Captured, trace_joint
from overlapc.planning.report import Report
from overlapc.runtime.program import Flight, Program, State
from overlapc.runtime.restored import held
from overlapc.state.described import Places
from overlapc.state.module_state import PLAIN
from overlapc.tools.reach import autograd_nodes
from overlapc.tools.shared_changes import replaced

_LARGE = 1 << 20  # bytes
_NO_LINES = "do_not_emit_stack_traces"  # newer torch can leave out each op's line of the model


@dataclass
class ChunkCall:
    """A call of the chunk: `tensors` are the stage's input, scales of `scalers`, the tensors among
    `leaves`, and those that modules have as `attributes`."""

    tensors: list[Tensor]
    has_input: bool
    scalers: Sequence[Any]
    leaves: list[Any]
    spec: TreeSpec
    attributes: Sequence[Places]

    @staticmethod
    def of(
        module: Any,
        scales: Mapping[Any, Tensor],
        attributes: Sequence[Places],
        args: Any,
        kwargs: Any,
    ) -> ChunkCall:
        leaves, spec = tree_flatten((args, kwargs))
        came = []
        if not getattr(module, "pre_process", True):
            given = (getattr(each, "input_tensor", None) for each in module.children())
            came = [each for each in given if isinstance(each, Tensor)]
        if served := [v for v in leaves if packed.is_packed(v) and not packed.unserved(v)]:
            rows = packed.tokens_of(module, leaves, came)
            standing = {id(value): packed.standing_for(value, rows) for value in served}
            leaves = [standing.get(id(leaf), leaf) for leaf in leaves]
            leaves, spec = tree_flatten(tree_unflatten(leaves, spec))
        leaves = [_laid_out(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        tensors += [owner[name] for [(owner, name), *_] in attributes]
        flat = [*came, *scales.values(), *tensors]
        return ChunkCall(flat, bool(came), tuple(scales), leaves, spec, attributes)

    @property
    def scales(self) -> int:
        return len(self.scalers)

    def shapes(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """The shapes that calls of one graph share, by the tensor's place among the leaves. (The
        stage's input and scales come before the leaves, attributes behind.)"""
        count = len(self.leaves)
        leaves = [i for i, leaf in enumerate(self.leaves) if isinstance(leaf, Tensor)]
        behind = range(count, count + len(self.attributes))
        places = [*range(-self.has_input - self.scales, 0), *leaves, *behind]
        shapes = [tuple(tensor.shape) for tensor in self.tensors]
        return tuple(zip(places, shapes, strict=True))

    def shaped(self, shapes: Mapping[int, Sequence[int]]) -> ChunkCall:
        """The call on tensors of these shapes: its own tensors if their shapes fit, else zeros.
        (Ranks may have unread tensors that other ranks lack.)"""
        tensors = list(self.tensors)
        for i, (place, shape) in enumerate(self.shapes()):
            if place in shapes and tuple(shapes[place]) != shape:
                zeros = tensors[i].new_zeros(tuple(shapes[place]))
                tensors[i] = zeros.requires_grad_(tensors[i].requires_grad)
        return replace(self, tensors=tensors)

    def emptied(self) -> ChunkCall:
        """The call without its tensors."""
        return replace(self, tensors=[], leaves=[], attributes=())

    def form(self) -> Any:
        """What calls of one plan have in common, without their shapes."""
        plain = [leaf if isinstance(leaf, PLAIN) else type(leaf) for leaf in self.leaves]
        described = [
            (t.dim(), t.dtype, t.device, t.requires_grad, _layout(t)) for t in self.tensors
        ]
        return str(self.spec), repr(plain), tuple(described), self.has_input, self.scales

    def check(self, module: Any) -> None:
        if not (self.has_input or getattr(module, "pre_process", True)):
            raise CaptureError(
                f"no part of {type(module).__name__} has the stage's input, expected it as the "
                "input_tensor of one"
            )
        for leaf in self.leaves:
            if not isinstance(leaf, (Tensor, *PLAIN)):
                kind = type(leaf).__name__
                what = packed.unserved(leaf) if packed.is_packed(leaf) else f"a {kind}"
                raise CaptureError(f"forward is given {what}, expected tensors and plain values")


@dataclass(frozen=True)
class Returned:
    """What `forward` returns: one tensor, or a structure of tensors and Nones."""

    spec: TreeSpec
    is_tensor: tuple[bool, ...]

    @staticmethod
    def of(out: Any) -> tuple[Returned, list[Tensor]]:
        leaves, spec = tree_flatten(out)
        if other := [leaf for leaf in leaves if not isinstance(leaf, (Tensor, type(None)))]:
            raise CaptureError(f"forward returns a {type(other[0]).__name__}, expected tensors")
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        return Returned(spec, tuple(isinstance(leaf, Tensor) for leaf in leaves)), tensors

    @property
    def count(self) -> int:
        return sum(self.is_tensor)

    def made(self, tensors: Sequence[Tensor]) -> Any:
        left = iter(tensors)
        return tree_unflatten(
            [next(left) if is_one else None for is_one in self.is_tensor], self.spec
        )


class WholeChunk(nn.Module):
    """The chunk as a function of tensors alone: the stage's input, if it has one, scales of
    auxiliary losses, the tensors among the arguments, and those that modules have as attributes."""

    def __init__(self, module: nn.Module, original: Callable[..., Any], call: ChunkCall) -> None:
        super().__init__()
        self.model = module
        self.taps = tracing.Taps()
        self.returned: Returned
        self._original, self._call = original, call

    def forward(self, *given: Tensor) -> tuple[Tensor, ...]:
        tensors, call = list(given), self._call
        self.taps.clear()
        if call.has_input:
            self.model.set_input_tensor([tensors.pop(0)])
        for scaler in call.scalers:
            scaler.main_loss_backward_scale = tensors.pop(0)
        leaves = [tensors.pop(0) if isinstance(leaf, Tensor) else leaf for leaf in call.leaves]
        args, kwargs = tree_unflatten(leaves, call.spec)
        attributes = [
            (owner, name, tensor)
            for places, tensor in zip(call.attributes, tensors, strict=True)
            for owner, name in places
        ]
        restore = held([self.model])
        try:
            with (
                placed(attributes),
                left_outside(self.model, "forward"),
                changes.refused(self.model, "forward"),
                changes.unseeded(),
                changes.unhooked(),
            ):
                out = self._original(*args, **kwargs)
        except Exception:
            restore()  # with some module as one op it may be traced again
            raise
        self.returned, results = Returned.of(out)
        for i, result in enumerate(results):
            if result._is_view() or any(result is one for one in (*given, *results[:i])):
                results[i] = result.clone()
        return (*results, *self.taps.values)


@dataclass
class Planned:
    """A captured and planned chunk: how to call its graph, and what its results are."""

    program: Program
    log: tracing.Taps
    owners: dict[str, Receiver]
    scales: tuple[str, ...]  # names of inputs of the graph
    gradients: tuple[str, ...]  # by tensor of the call; "" if it has none
    outs: tuple[str, ...]  # the tensors that forward returns
    taps: tuple[str, ...]
    changed: tuple[tuple[str, int], ...]  # (new value, place) of each changed buffer
    tangents: tuple[str, ...]  # by tensor that forward returns; "" if it has no gradient
    returned: Returned
    copied: tuple[int, ...]  # places of the call's tensors that the script may change meanwhile
    lasting: tuple[int, ...]  # places of parameters and buffers that the backward reads
    constants: tuple[Tensor, ...]  # tensors that the script may change, too
    draws: bool  # does the backward draw random numbers?
    apart: bool  # parts of the backward may run early or late
    # owners that are also used before the chunk
    shared: frozenset[str] = field(kw_only=True, default=frozenset())

    @property
    def slices(self) -> int:
        return 1

    def begin(
        self, flat: Sequence[Tensor], before: Flight | None = None
    ) -> tuple[Flight, list[Tensor]]:
        """Run F on parameters, buffers and tensors of a call, merged with the backward of the
        flight `before`, if there is one; return the flight and the tensors of the result."""
        state: State = dict(zip(self.program.joint.inputs, self.own(flat), strict=True))
        flight = self.program.begin([state | self.owners], before)
        for name, place in self.changed:
            flat[place].copy_(flight.state.pop(name))
        self.log.replay([flight.state.pop(name) for name in self.taps])
        # Megatron may free the result's memory as soon as it is sent.
        return flight, [flight.state.pop(name).detach() for name in self.outs]

    def own(self, flat: Sequence[Tensor]) -> list[Tensor]:
        """The inputs of a flight. Of what the script gives or sets for each microbatch they are
        copies: when a deferred or recomputing backward reads them, the script may have written the
        next microbatch there."""
        given = list(flat)
        for place in self.copied:
            given[place] = _copy(flat[place])
        return given

    def ask(self, flight: Flight, tangents: Sequence[Tensor], scales: Sequence[Tensor]) -> None:
        """Give the backward of a flight what it begins with: the gradients of those results that
        have one."""
        flight.state.update(zip(filter(None, self.tangents), tangents, strict=True))
        for name, scale in zip(self.scales, scales, strict=True):
            if name in flight.state:
                flight.state[name] = scale

    def handed(self, flight: Flight) -> list[Tensor | None]:
        """Take the gradients of the call's tensors that a backward has made; once."""
        return [flight.state.pop(name, None) if name else None for name in self.gradients]


def _laid_out(tensor: Tensor) -> Tensor:
    """Tokens, positions and masks, contiguous as most are: their layout changes no result. (A large
    mask that is expanded stays so.)"""
    if not (_is_dense(tensor) and _is_exact(tensor)):
        return tensor
    kept = not all(tensor.stride()) and tensor.nbytes > _LARGE
    return tensor if kept else tensor.contiguous()


def _layout(tensor: Tensor) -> Any:
    """How numbers that are rounded lie in memory, whatever their sizes: the order of dimensions,
    which of them are expanded, and which lie end to end with the next. None: contiguous."""
    if not _is_dense(tensor) or _is_exact(tensor) or tensor.is_contiguous():
        return None
    strides, shape = tensor.stride(), tensor.shape
    order = sorted((d for d in range(tensor.dim()) if shape[d] > 1), key=lambda d: -strides[d])
    joined = [strides[a] == strides[b] * shape[b] for a, b in pairwise(order)]
    return tuple(order), tuple(bool(strides[d]) for d in order), tuple(joined)


def _is_exact(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())


def _is_dense(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_nested


def _copy(tensor: Tensor) -> Tensor:
    """A copy laid out alike: what is expanded is copied once."""
    once = tensor
    for d, stride in enumerate(tensor.stride()):
        once = once if stride or not tensor.shape[d] else once.narrow(d, 0, 1)
    return once.clone().expand(tensor.shape)


def traced(whole: WholeChunk, call: ChunkCall, ddp: Any) -> Captured:
    """Return the joint graph of a call, without running it."""
    call.check(whole.model)
    mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True, allow_non_fake_inputs=True)
    fakes = [
        mode.from_tensor(t.detach().requires_grad_(t.requires_grad), static_shapes=True)
        for t in call.tensors
    ]
    with contextlib.ExitStack() as stack:
        if getattr(ddp, "remove_forward_pre_hook_handles", None):
            ddp.disable_forward_pre_hook(param_sync=False)
            stack.callback(ddp.enable_forward_pre_hook)
        if hasattr(fx_config, _NO_LINES):  # nobody reads them, and to find them takes long
            stack.enter_context(replaced(fx_config, _NO_LINES, True))
        stack.enter_context(tracing.standing_in(whole.model, whole.taps))
        stack.enter_context(as_eager())
        stack.enter_context(left_outside(whole.model, "the backward"))
        stack.enter_context(changes.refused(whole.model, "the backward"))
        captured = capture(whole, *fakes)
    whole.taps.values.clear()
    _refuse_others(captured)
    refuse_added_twice(captured.joint.graph)
    recompute.refuse_changes(captured, whole.model)
    without_identities(captured.joint)
    return trace_joint(captured.joint, captured.num_fwd_outputs, captured.static_inputs)


def _constants(captured: Any) -> list[Tensor]:
    nodes = captured.joint.graph.find_nodes(op="get_attr")
    found = [getattr(captured.joint, node.target, None) for node in nodes]
    return [value for value in found if isinstance(value, Tensor)]


def _refuse_others(captured: Any) -> None:
    """Raise for parameters that a graph has as constants: their gradients would be lost."""
    for value in _constants(captured):
        if value.requires_grad:
            raise CaptureError(
                f"forward reads a parameter of shape {tuple(value.shape)} that is not found among "
                "those of its modules; expected nn.ParameterList or nn.ModuleList in the place of "
                "a list, a closure or a helper object"
            )


def emitted(
    captured: Captured,
    report: Report,
    whole: WholeChunk,
    call: ChunkCall,
    lasting: Sequence[Tensor],
    ddp: Any,
    actions: Mapping[str, str],
) -> Planned:
    """Make the planned parts of a captured call. `lasting` are parameters and buffers. `actions` of
    the backward's issues say which may run early or late."""
    joint = described(captured, whole.returned.count)
    owners = owners_in(joint, lasting, ddp)
    fused, products = fused_weights(whole.model), set[str]()

    def parts_of(captured: Captured, plan: Plan) -> Parts:
        parts = cut(captured, plan, deliver)
        tracing.in_streams(captured, parts.forward)
        if fused:
            products.update(fuse(parts.backward, owners, fused))
        return parts

    program = Program(joint, report, whole=False, cut=parts_of)
    shared = used_before(call, owners)
    hooked = [name for name in shared if owners[name].tensor._backward_hooks]
    refuse_used_before([*hooked, *(name for name in shared if name not in products)], owners)
    owners |= {name: unreduced(owners[name], ddp) for name in shared}
    moved = program.move(actions)
    names = names_in(program, call, lasting, whole.returned)
    return Planned(program, whole.taps, owners, apart=moved, shared=frozenset(shared), **names)


def used_before(call: ChunkCall, owners: Mapping[str, Receiver]) -> list[str]:
    """The names of parameters of the chunk that have made a tensor of the call, too: an embedding
    that is tied to the output, and runs before the chunk. Autograd adds their gradients up, and DDP
    gets the sum, but for what a kernel adds to `main_grad` by itself."""
    names = {id(owner.tensor): name for name, owner in owners.items()}
    ends = [getattr(node, "variable", None) for node in autograd_nodes(call.tensors)]
    return [names[id(end)] for end in ends if id(end) in names]


def refuse_used_before(names: Sequence[str], owners: Mapping[str, Receiver]) -> None:
    """Raise if there are such parameters, of which a planned chunk would deliver a part first."""
    for name in names:
        raise CaptureError(
            f"a parameter of shape {tuple(owners[name].tensor.shape)} is used both in it and "
            "before it (an embedding tied to the output, say), where sums of its gradient would be "
            "others than Megatron's; expected --gradient-accumulation-fusion, untied weights, or "
            "several pipeline stages"
        )


def owners_in(joint: Joint, lasting: Sequence[Tensor], ddp: Any) -> dict[str, Receiver]:
    """The parameters among those that last, by the names under which a state holds them."""
    return {
        owner_of(name): receiver(lasting[leaf.place], ddp)
        for name, leaf in joint.leaves.items()
        if leaf.place < len(lasting)
    }


def names_in(
    program: Program, call: ChunkCall, lasting: Sequence[Tensor], returned: Returned
) -> dict[str, Any]:
    """Names and places in the graph of a call, by field of `Planned`. The call's tensors come after
    the inputs that last."""
    joint, first = program.joint, len(lasting)
    names, scales = joint.inputs, first + call.has_input
    results, changed = _results(joint)
    count = returned.count
    tangents = {desc.output.idx: name for name, desc in joint.tangents.items()}
    gradients = tuple(
        f"gradient{place}" if names[place] in joint.leaves else ""
        for place in range(first, first + len(call.tensors))
    )
    behind = range(scales + call.scales, first + len(call.tensors))
    given = [i for i in behind if names[i] not in joint.leaves]  # others are autograd's
    trace = joint.captured.trace
    value = trace.value
    read = {value[name].storage for op in trace.ops for name in op.inputs}
    kept = {value[name].storage for name in program.taken if name in value}
    return {
        "constants": tuple(_constants(joint.captured)),
        "draws": any(op.random and not op.is_forward for op in trace.ops),
        "copied": tuple(i for i in given if value[names[i]].storage in read),
        "lasting": tuple(i for i in range(first) if value[names[i]].storage in kept),
        "scales": names[scales : scales + call.scales],
        "gradients": gradients,
        "outs": tuple(results[:count]),
        "taps": tuple(results[count:]),
        "changed": changed,
        "tangents": tuple(tangents.get(i, "") for i in range(count)),
        "returned": returned,
    }


def described(captured: Captured, returns: int) -> Joint:
    """Describe the captured joint graph of a module: its inputs are parameters, buffers,
    arguments, its results what its forward `returns`, and logged losses."""
    inputs = primal_nodes(captured.joint)
    output = captured.joint.graph.find_nodes(op="output")[0]
    count = captured.num_fwd_outputs
    gradients = output.args[0][count:]
    descs = output.meta["desc"][:count]
    if not gradients:
        raise CaptureError("no result of forward requires a gradient, expected at least one")
    plain = range(sum(isinstance(desc, descriptors.PlainAOTOutput) for desc in descs))
    placeholders = captured.joint.graph.find_nodes(op="placeholder")
    tangents = {n.name: n.meta.get("desc") for n in placeholders if n not in inputs}
    places = [getattr(getattr(d, "output", None), "idx", returns) for d in tangents.values()]
    if not places or max(places) >= returns:
        raise CaptureError(
            f"{len(places)} results of forward require a gradient, expected at least one, and none "
            "that it does not return"
        )
    return Joint(
        captured,
        tuple(node.name for node in inputs),
        tuple(range(len(inputs))),
        {
            node.name: Leaf(place)
            for place, (node, gradient) in enumerate(zip(inputs, gradients, strict=True))
            if is_gradient(gradient)
        },
        tangents,
        {f"result{i}": desc for i, desc in enumerate(descs)},
        tuple(plain),
        (False,) * len(plain),
    )


def _results(joint: Joint) -> tuple[list[str], tuple[tuple[str, int], ...]]:
    """Names of the results that the chunk returns, in order, and of the new values of buffers."""
    descs = [node.meta.get("desc") for node in primal_nodes(joint.captured.joint)]
    plain: dict[int, str] = {}
    changed = []
    for name, desc in joint.results.items():
        if isinstance(desc, descriptors.PlainAOTOutput):
            plain[desc.idx] = name
        elif isinstance(desc, descriptors.InputMutationAOTOutput):
            changed.append((name, descs.index(desc.mutated_input)))
        else:
            raise CaptureError(f"forward gives {desc}, expected tensors of their own")
    return [plain[i] for i in sorted(plain)], tuple(changed)
