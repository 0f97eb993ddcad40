"""`called` makes a module that cannot be traced one op of the graph, with a handle.

An opaque module runs as eager runs it, with its own kernels and its own autograd. In a graph its
forward is `overlapc::opaque_forward`, which returns results and a *handle* that owns what autograd
keeps; its backward is `overlapc::opaque_backward`, which reads the handle. To a plan the handle is
a value like any other, with the size of what autograd keeps: it is saved, or recomputed by running
the forward again.

The module runs on made-up inputs, to learn what it returns and keeps (`opaque_calls`). A module
that changes its own state is refused, since it might run twice.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from overlapc.core.errors import CaptureError, OverlapcError
from overlapc.passes.draws import random_states
from overlapc.passes.opaque.calls import (
    Call,
    Learned,
    Like,
    autocast_now,
    eagerly,
    has_ties,
    learn,
    modes_of,
    open_size,
)
from overlapc.passes.opaque.reached import Reached
from overlapc.passes.summed import blank, is_added, summing
from overlapc.state.known import in_fp8, known_of
from overlapc.state.module_state import PLAIN

_library = torch.library.Library("overlapc", "FRAGMENT")


@dataclass
class Graph:
    """What a forward keeps for its backward: the results at the ends of its autograd graph, and the
    inputs that may get a gradient."""

    results: list[Any]  # None where one requires no gradient
    inputs: list[Tensor]


@dataclass(eq=False)
class Opaque:
    """A call and what was learned of it; the module keeps it alive."""

    call: Call
    learned: Learned


_known: weakref.WeakKeyDictionary[nn.Module, dict[Any, Opaque]] = weakref.WeakKeyDictionary()
_by_number: weakref.WeakValueDictionary[int, Opaque] = weakref.WeakValueDictionary()
_trace = 0  # its number


# --------------------------------------------------------------------------- the ops


def _run(known: Opaque, tensors: list[Tensor], splits: list[int]) -> tuple[Any, list[Tensor]]:
    """Run the call. It may draw or write nothing that it did not when it was tried out, since it
    might run twice. (A mode, an attribute, or a helper's may be another by now.)"""
    call, module = known.call, known.call.module()
    if module is None or (not call.whole and modes_of(module) == call.modes):
        return call.run(tensors, splits)
    if call.known is not None:
        made = call.run(tensors, splits)
        if in_fp8(module):
            raise call.otherwise("runs in FP8, as it did not")
        return made
    before, versions = random_states(), [tensor._version for tensor in tensors]
    made = call.run(tensors, splits)
    draws = not known.learned.draws and not all(map(torch.equal, before, random_states()))
    if draws or [tensor._version for tensor in tensors] != versions:
        raise OverlapcError(
            f"a {type(module).__name__}, which runs as one op, draws random numbers or changes a "
            "buffer, and did not when it was tried out, in another mode (training, evaluation) or "
            "with other attributes; expected the same: set them before the first step, or make "
            "another TrainStep for each"
        )
    return made


def _forward(number: int, tensors: list[Tensor], splits: list[int]) -> list[Tensor]:
    known = _by_number[number]
    made, inputs = _run(known, tensors, splits)
    leaves = [made] if isinstance(made, Tensor) else tree_leaves(made)
    results = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    plain = [None if isinstance(leaf, Tensor) else (leaf,) for leaf in leaves]
    if plain != [None if isinstance(leaf, Like) else (leaf,) for leaf in known.learned.leaves]:
        raise known.call.otherwise("gives other results")
    likes, size = known.learned.results, known.call.size(tensors)
    pairs = zip(likes, results, strict=False)
    if len(likes) != len(results) or not all(like.fits(result, size) for like, result in pairs):
        raise known.call.otherwise("gives other results")
    with eagerly():  # a result may be a parameter
        ends = [get_gradient_edge(one) if one.requires_grad else None for one in results]
    handle = torch.empty(0, dtype=torch.uint8)
    handle.overlapc_graph = Graph(ends, inputs)  # type: ignore[attr-defined]
    handle.overlapc_held_bytes = known.learned.held(size)  # type: ignore[attr-defined]
    return [*_apart([result.detach() for result in results], tensors), handle]


def _forward_like(number: int, tensors: list[Tensor], splits: list[Any]) -> list[Tensor]:
    known = _by_number[number]
    learned, size = known.learned, known.call.size(tensors)
    made = [like.made(size) for like in learned.results]
    return [*made, torch.empty(learned.held(size), dtype=torch.uint8)]


def _backward(
    number: int, handle: Tensor, gradients: list[Tensor | None], size: list[int]
) -> list[Tensor]:
    known, graph = _by_number[number], handle.overlapc_graph  # type: ignore[attr-defined]
    given = [(e, g) for e, g in zip(graph.results, gradients, strict=True) if g is not None]
    pairs = zip(graph.inputs, known.learned.gradients, strict=True)
    wanted = [(tensor, like is not None) for tensor, like in pairs if tensor.requires_grad]
    with eagerly(), summing(graph.inputs):
        found = torch.autograd.grad(
            [end for end, _ in given],
            [tensor for tensor, _ in wanted],
            [gradient for _, gradient in given],
            retain_graph=True,
            allow_unused=True,
        )
    whole = len(given) == sum(known.learned.grows)
    gets = [each for _, each in wanted]
    got = [gradient is not None for gradient in found]
    if (whole and got != gets) or any(a and not b for a, b in zip(got, gets, strict=True)):
        raise known.call.otherwise("uses other inputs")
    made = [
        torch.zeros_like(tensor) if gradient is None else gradient
        for gradient, (tensor, gets) in zip(found, wanted, strict=True)
        if gets and not is_added(tensor)
    ]
    apart = iter(_apart(made, [gradient for _, gradient in given]))
    return [
        blank(gradient) if is_added(tensor) else next(apart)
        for gradient, (tensor, gets) in zip(found, wanted, strict=True)
        if gets
    ]


def _backward_like(
    number: int, handle: Tensor, gradients: list[Tensor | None], size: list[Any]
) -> list[Tensor]:
    learned = _by_number[number].learned
    found = [*size, *_open_sizes(gradients, learned.results)]
    likes = [like for like in learned.gradients if like is not None]
    return [like.made(found[0] if found else None) for like in likes]


def _open_sizes(gradients: Sequence[Tensor | None], likes: Sequence[Like]) -> list[Any]:
    """The open size of a call, in the shapes of gradients of its results."""
    pairs = [(g, like.sizes) for g, like in zip(gradients, likes, strict=True)]
    return [g.shape[sizes.index(None)] for g, sizes in pairs if g is not None and None in sizes]


def _apart(made: Sequence[Tensor], given: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors, each with its own memory, as an op's results must have."""
    taken = {tensor.untyped_storage()._cdata for tensor in given}
    apart = []
    for tensor in made:
        storage = tensor.untyped_storage()._cdata
        apart.append(tensor.clone() if storage in taken else tensor)
        taken.add(storage)
    return apart


def _define(name: str, schema: str, run: Any, like: Any, *tags: torch.Tag) -> Any:
    _library.define(name + schema, tags=tags)
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"overlapc::{name}", like, lib=_library)
    return getattr(torch.ops.overlapc, name).default


_FORWARD = "(int number, Tensor[] tensors, SymInt[] splits) -> Tensor[]"
_BACKWARD = "(int number, Tensor handle, Tensor?[] gradients, SymInt[] size) -> Tensor[]"
_forward_op = _define("opaque_forward", _FORWARD, _forward, _forward_like)
_random_op = _define(
    "opaque_forward_random",
    _FORWARD,
    _forward,
    _forward_like,
    torch.Tag.nondeterministic_seeded,
)
_backward_op = _define("opaque_backward", _BACKWARD, _backward, _backward_like)


class _Traced(torch.autograd.Function):
    """The autograd Function of one call, which runs its two ops."""

    @staticmethod
    def forward(ctx: Any, number: int, splits: list[Any], *tensors: Tensor) -> tuple[Tensor, ...]:
        learned = _by_number[number].learned
        op = _random_op if learned.draws else _forward_op
        *results, handle = op(number, list(tensors), splits)
        ctx.number, ctx.size = number, _by_number[number].call.size(tensors)
        ctx.save_for_backward(handle)
        ctx.set_materialize_grads(False)
        pairs = zip(results, learned.grows, strict=True)
        ctx.mark_non_differentiable(*[result for result, grows in pairs if not grows])
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        (handle,) = ctx.saved_tensors
        learned = _by_number[ctx.number].learned
        pairs = zip(gradients, learned.grows, strict=True)
        given = [gradient if grows else None for gradient, grows in pairs]
        some = sum(gradient is not None for gradient in given) < sum(learned.grows)
        if some and not learned.alike:
            raise CaptureError("only some of its results get gradients, and reach other inputs")
        opened = any(None in like.sizes for like in learned.gradients if like is not None)
        size = [ctx.size] if opened and not _open_sizes(given, learned.results) else []
        found = iter(_backward_op(ctx.number, handle, given, size))
        return None, None, *(None if like is None else next(found) for like in learned.gradients)


# --------------------------------------------------------------------------- of a graph


def explained(graph: fx.Graph) -> list[str]:
    """What runs as one op each in a graph, and what that communicates within."""
    called = _called_in(graph, _forward_op, _random_op)
    found = Counter((each.call.name, each.learned.collectives) for each in called)
    return [
        f"{count} {name} run as one op each"
        + (f"; within each no plan sees {inner} collective{'s' * (inner > 1)}" if inner else "")
        for (name, inner), count in found.items()
    ]


def groups_within(graph: fx.Graph) -> list[str]:
    """The process groups among which ops of the graph communicate within."""
    called = _called_in(graph, _forward_op, _random_op)
    return sorted(frozenset[str]().union(*(each.learned.groups for each in called)))


def adds_weights(graph: fx.Graph) -> bool:
    """Does a kernel of the graph add its weight's gradient to `main_grad`?"""
    return any(each.learned.adds for each in _called_in(graph, _backward_op))


def refuse_added_twice(graph: fx.Graph) -> None:
    """Raise for a weight whose gradient several ops add to `main_grad`: a plan may change their
    order, and with it the sum's last bits."""
    seen: set[int] = set()
    for each in _called_in(graph, _backward_op):
        module = each.call.module()
        if not each.learned.adds or module is None:
            continue
        weights = {id(weight) for weight in module.parameters() if hasattr(weight, "main_grad")}
        if not seen.isdisjoint(weights):
            raise CaptureError(
                f"a {type(module).__name__} runs more than once in a microbatch, or shares its "
                "weight, and adds the weight's gradient to main_grad each time; expected "
                "gradient_accumulation_fusion off (--no-gradient-accumulation-fusion)"
            )
        seen |= weights


def _called_in(graph: fx.Graph, *ops: Any) -> list[Opaque]:
    nodes = [node for op in ops for node in graph.find_nodes(op="call_function", target=op)]
    return [_by_number[node.args[0]] for node in nodes]


# --------------------------------------------------------------------------- in a trace


def begin_trace() -> None:
    global _trace
    _trace += 1


def called(
    module: nn.Module,
    function: Callable[..., Any],
    lasting: Mapping[str, Tensor],
    named: Mapping[str, Tensor],
    args: Any,
    kwargs: Any,
    forward: Callable[..., Any] | None = None,
    others: tuple[type, ...] = (),
) -> Any:
    """Runs in the place of a `function` of a module and its arguments while it is traced: of the
    module's forward, or of a method. `lasting` are its parameters and buffers; `named` are the
    traced tensors in their places. The `forward` of a whole module, if it is one, is what it has
    when nothing is traced. What was learned in an earlier trace is learned anew, since the module
    may have changed. Beside tensors and plain values it may be given objects of `others`."""
    known = known_of(module) if forward is not None else None
    leaves, spec = tree_flatten((args, kwargs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    tensors = [*(leaves[place] for place in places), *named.values()]
    open_leaf = (Tensor, torch.SymInt) if known is not None and known.splits else Tensor
    splits = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.SymInt)]
    plain = [None if isinstance(leaf, open_leaf) else leaf for leaf in leaves]
    strange = [leaf for leaf in plain if not isinstance(leaf, (*PLAIN, *others))]
    if strange or not tensors:
        found = f"a {type(strange[0]).__name__}" if strange else "no tensor"
        raise CaptureError(f"it is given {found}, expected tensors and plain values")
    needs = [torch.is_grad_enabled() and tensor.requires_grad for tensor in tensors]
    device = tensors[0].device.type
    autocast = (device, *autocast_now(device))
    opened = open_size(tensors)
    shapes = [(t.dtype, t.device, _known_sizes(t), t.stride()) for t in tensors]
    modes, whole = modes_of(module), forward is not None
    given = str(spec), repr(plain), repr(shapes), repr(modes), repr(needs), autocast
    key = _trace, function, *given
    calls = _known.setdefault(module, {})
    if key not in calls:
        call = Call(
            weakref.ref(module),
            function,
            spec,
            plain,
            places,
            splits,
            [*named],
            needs,
            autocast,
            modes,
            whole,
            has_ties(module),
            known,
            opened,
        )
        reached = Reached([module, forward] if whole and known is None else [])
        calls[key] = Opaque(call, learn(call, tensors, lasting, reached))
        _by_number[call.number] = calls[key]
    learned = calls[key].learned
    rows = [leaves[place] for place in splits]
    results = iter(_Traced.apply(calls[key].call.number, rows, *tensors))
    filled = [next(results) if isinstance(leaf, Like) else leaf for leaf in learned.leaves]
    return tree_unflatten(filled, learned.spec)


def _known_sizes(tensor: Tensor) -> tuple[int | None, ...]:
    return tuple(size if isinstance(size, int) else None for size in tensor.shape)
