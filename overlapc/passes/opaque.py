"""`called` makes a module that cannot be traced one op of the graph, with a handle.

An opaque module runs as eager runs it, with its own kernels and its own autograd. In a graph its
forward is `overlapc::opaque_forward`, which returns results and a *handle* that owns what autograd
keeps; its backward is `overlapc::opaque_backward`, which reads the handle. To a plan the handle is
a value like any other, with the size of what autograd keeps: it is saved, or recomputed by running
the forward again.

The module runs once on made-up inputs, to learn what it returns and keeps. A module that changes
its own state is refused, since it might run twice.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import DispatchKey
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.fx import _symbolic_trace
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_structure, tree_unflatten

from overlapc.errors import CaptureError, OverlapcError
from overlapc.passes.draws import random_states
from overlapc.passes.held import CONTAINERS, held_in, value_of
from overlapc.passes.shared_changes import replaced

# These are off while an op runs, but on where its module runs.
_AUTOGRAD = (
    DispatchKey.AutogradCPU,
    DispatchKey.AutogradCUDA,
    DispatchKey.AutogradOther,
    DispatchKey.ADInplaceOrView,
)
_NOTHING: AbstractContextManager[Any] = contextlib.nullcontext()
_PLAIN = (type(None), bool, int, float, str, enum.Enum, torch.dtype, torch.device)
_library = torch.library.Library("overlapc", "FRAGMENT")
_numbers = itertools.count()


@dataclass
class Graph:
    """What a forward keeps for its backward: the results at the ends of its autograd graph, and the
    inputs that may get a gradient."""

    results: list[Any]  # None where one requires no gradient
    inputs: list[Tensor]


@dataclass
class Learned:
    """What a module returned when it ran on noise; tensors are on the meta device."""

    spec: TreeSpec
    leaves: list[Any]
    gradients: list[Tensor | None]  # of the inputs
    held_bytes: int  # bytes that autograd keeps, without parameters
    draws: bool  # does it draw random numbers?

    @property
    def results(self) -> list[Tensor]:
        return [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]

    @property
    def grows(self) -> list[bool]:
        """Does a result require a gradient?"""
        return [result.requires_grad for result in self.results]


@dataclass(eq=False)
class Call:
    """A way in which a module is called: on which tensors, and how these and other values form its
    arguments. The tensors are those of the arguments, then the parameters called `names`."""

    module: weakref.ref[nn.Module]
    function: Callable[..., Any]  # `forward`, of its class or its own
    spec: TreeSpec
    leaves: list[Any]  # of the arguments, with None for tensors
    places: list[int]  # of the tensors among them
    names: list[str]
    needs: list[bool]  # does a tensor require a gradient?
    autocast: tuple[Any, ...]
    number: int = field(default_factory=_numbers.__next__)

    @cached_property
    def is_flat(self) -> bool:
        """Are the arguments the leaves, by position?"""
        flat: Any = (tuple(range(len(self.leaves))), {})
        return tree_structure(flat) == self.spec

    def otherwise(self, what: str) -> OverlapcError:
        return OverlapcError(
            f"a {type(self.module()).__name__}, which runs as one op, {what} than it did on "
            "noise; expected what it computes not to depend on values: make it traceable"
        )

    def run(
        self, tensors: Sequence[Tensor], lasting: Mapping[str, Tensor] | None = None
    ) -> tuple[Any, list[Tensor]]:
        """Call the module on leaves with these values; return its results and the leaves. `lasting`
        are its parameters and buffers, while a trace has put others into it."""
        module = self.module()
        assert module is not None, "the module of an opaque op is gone"
        pairs = zip(tensors, self.needs, strict=True)
        inputs = [tensor.detach().requires_grad_(needs) for tensor, needs in pairs]
        own: Mapping[str, Tensor] = lasting or {}
        if self.names and lasting is None:
            own = dict(module.named_parameters())
        swapped = dict(lasting or {})
        for i, name in enumerate(self.names, len(self.places)):
            inputs[i] = swapped[name] = nn.Parameter(inputs[i].detach(), self.needs[i])
            vars(inputs[i]).update(vars(own[name]))
        leaves = list(self.leaves)
        for place, tensor in zip(self.places, inputs, strict=False):
            leaves[place] = tensor
        args, kwargs = (leaves, {}) if self.is_flat else tree_unflatten(leaves, self.spec)
        with _eagerly(), _autocast(*self.autocast), _with(module, swapped):
            return self.function(module, *args, **kwargs), inputs


@dataclass(eq=False)
class Opaque:
    """A call and what was learned of it; the module keeps it alive."""

    call: Call
    learned: Learned


_known: weakref.WeakKeyDictionary[nn.Module, dict[Any, Opaque]] = weakref.WeakKeyDictionary()
_by_number: weakref.WeakValueDictionary[int, Opaque] = weakref.WeakValueDictionary()


# --------------------------------------------------------------------------- the ops


def _forward(number: int, tensors: list[Tensor]) -> list[Tensor]:
    known = _by_number[number]
    made, inputs = known.call.run(tensors)
    leaves = [made] if isinstance(made, Tensor) else tree_leaves(made)
    results = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    likes = known.learned.results
    if [_describe(result) for result in results] != [_describe(like) for like in likes]:
        raise known.call.otherwise("gives other results")
    ends = [get_gradient_edge(result) if result.requires_grad else None for result in results]
    handle = torch.empty(0, dtype=torch.uint8)
    handle.overlapc_graph = Graph(ends, inputs)  # type: ignore[attr-defined]
    handle.overlapc_held_bytes = known.learned.held_bytes  # type: ignore[attr-defined]
    return [*_apart([result.detach() for result in results], tensors), handle]


def _forward_like(number: int, tensors: list[Tensor]) -> list[Tensor]:
    learned = _by_number[number].learned
    likes = [_like(like, tensors[0].device) for like in learned.results]
    return [*likes, torch.empty(learned.held_bytes, dtype=torch.uint8)]


def _backward(
    number: int, handle: Tensor, gradients: list[Tensor | None], device: torch.device
) -> list[Tensor]:
    known, graph = _by_number[number], handle.overlapc_graph  # type: ignore[attr-defined]
    given = [(e, g) for e, g in zip(graph.results, gradients, strict=True) if g is not None]
    pairs = zip(graph.inputs, known.learned.gradients, strict=True)
    wanted = [(tensor, like is not None) for tensor, like in pairs if tensor.requires_grad]
    with _eagerly():
        found = torch.autograd.grad(
            [end for end, _ in given],
            [tensor for tensor, _ in wanted],
            [gradient for _, gradient in given],
            retain_graph=True,
            allow_unused=True,
        )
    whole = len(given) == sum(known.learned.grows)
    if whole and [g is not None for g in found] != [gets for _, gets in wanted]:
        raise known.call.otherwise("uses other inputs")
    made = [
        torch.zeros_like(tensor) if gradient is None else gradient
        for gradient, (tensor, gets) in zip(found, wanted, strict=True)
        if gets
    ]
    return _apart(made, [gradient for _, gradient in given])


def _backward_like(
    number: int, handle: Tensor, gradients: list[Tensor | None], device: torch.device
) -> list[Tensor]:
    likes = _by_number[number].learned.gradients
    return [_like(like, device) for like in likes if like is not None]


def _like(like: Tensor, device: torch.device) -> Tensor:
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)


def _describe(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.dtype, tensor.requires_grad


def _apart(made: Sequence[Tensor], given: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors, each with its own memory, as an op's results must have."""
    taken = {tensor.untyped_storage()._cdata for tensor in given}
    apart = []
    for tensor in made:
        storage = tensor.untyped_storage()._cdata
        apart.append(tensor.clone() if storage in taken else tensor)
        taken.add(storage)
    return apart


def _autocast(device: str, *settings: Any) -> AbstractContextManager[Any]:
    """Autocast with these settings; as they are in most steps, that is nothing to do."""
    return _NOTHING if settings == _autocast_now(device) else torch.autocast(device, *settings)


def _autocast_now(device: str) -> tuple[Any, ...]:
    return (
        torch.get_autocast_dtype(device),
        torch.is_autocast_enabled(device),
        torch.is_autocast_cache_enabled(),
    )


def _with(module: nn.Module, swapped: dict[str, Tensor]) -> AbstractContextManager[Any]:
    return _reparametrize_module(module, swapped) if swapped else _NOTHING


@contextlib.contextmanager
def _eagerly() -> Iterator[None]:
    """Run the block as if outside of an op: with autograd, and without modes."""
    include = torch._C._dispatch_tls_local_include_set().add(DispatchKey.ADInplaceOrView)
    exclude = torch._C._dispatch_tls_local_exclude_set()
    for key in _AUTOGRAD:
        exclude = exclude.remove(key)
    with torch._C._ForceDispatchKeyGuard(include, exclude), torch.enable_grad():
        yield


def _define(name: str, schema: str, run: Any, like: Any, *tags: torch.Tag) -> Any:
    _library.define(name + schema, tags=tags)
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"overlapc::{name}", like, lib=_library)
    return getattr(torch.ops.overlapc, name).default


_FORWARD = "(int number, Tensor[] tensors) -> Tensor[]"
_BACKWARD = "(int number, Tensor handle, Tensor?[] gradients, Device device) -> Tensor[]"
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
    def forward(ctx: Any, number: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        learned = _by_number[number].learned
        op = _random_op if learned.draws else _forward_op
        *results, handle = op(number, list(tensors))
        ctx.number, ctx.device = number, tensors[0].device
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
        found = iter(_backward_op(ctx.number, handle, given, ctx.device))
        return None, *(None if like is None else next(found) for like in learned.gradients)


# --------------------------------------------------------------------------- what is learned


def _learned(call: Call, tensors: Sequence[Tensor], lasting: Mapping[str, Tensor]) -> Learned:
    """Run the module, forward and backward, on noise."""
    module = call.module()
    assert module is not None
    with (
        _disable_current_modes(),
        replaced(_symbolic_trace, "_is_fx_tracing_flag", False),  # else torch.compile refuses
        torch.random.fork_rng(),
        _unchanged(module, lasting),
    ):
        given = [_made_up(tensor) for tensor in tensors[: len(call.places)]]
        given += [lasting[name].detach() for name in call.names]
        kept: dict[int, Tensor] = {}

        def keep(tensor: Tensor) -> Tensor:
            kept[tensor.untyped_storage()._cdata] = tensor
            return tensor

        before = random_states()
        with _hooked(keep):
            made, inputs = call.run(given, lasting)
        draws = not all(map(torch.equal, before, random_states()))
        leaves, spec = tree_flatten(made)
        for leaf in leaves:
            if not isinstance(leaf, (Tensor, *_PLAIN)):
                raise CaptureError(f"it returns a {type(leaf).__name__}, expected tensors")
        for tensor in inputs[: len(call.places)]:
            keep(tensor)
        gradients = iter(_gradients_of_ones(leaves, inputs))
        storages = {tensor.untyped_storage()._cdata for tensor in lasting.values()}
        return Learned(
            spec,
            [_meta(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves],
            [_meta(next(gradients)) if tensor.requires_grad else None for tensor in inputs],
            sum(t.untyped_storage().nbytes() for key, t in kept.items() if key not in storages),
            draws,
        )


@contextlib.contextmanager
def _hooked(keep: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Call `keep` for what autograd keeps, also during a trace, which ignores hooks."""
    tracing = torch._C._autograd._saved_tensors_hooks_set_tracing(False)
    try:
        with saved_tensors_hooks(keep, lambda tensor: tensor):
            yield
    finally:
        torch._C._autograd._saved_tensors_hooks_set_tracing(tracing)


def _gradients_of_ones(leaves: Sequence[Any], inputs: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """The gradients of the inputs that may get one."""
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    results = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not results:
        return [None] * len(wanted)
    ones = [torch.ones_like(result) for result in results]
    with _eagerly():
        found: Sequence[Tensor | None] = torch.autograd.grad(
            results, wanted, ones, allow_unused=True
        )
    return found


def _meta(tensor: Tensor | None) -> Tensor | None:
    if tensor is None:
        return None
    return tensor.detach().to("meta").requires_grad_(tensor.requires_grad)


def _made_up(tensor: Tensor) -> Tensor:
    if any(not isinstance(size, int) for size in tensor.shape):
        raise CaptureError("it is given a tensor of data-dependent size")
    new = torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )
    return new.normal_() if tensor.is_floating_point() else new.zero_()


@contextlib.contextmanager
def _unchanged(module: nn.Module, lasting: Mapping[str, Tensor]) -> Iterator[None]:
    """Refuse a module whose state changes in the block, and restore that state."""
    attributes = {each: dict(vars(each)) for each in module.modules()}
    containers = [
        (name, held_in(value))
        for before in attributes.values()
        for name, value in before.items()
        if isinstance(value, CONTAINERS)
    ]
    values = [value_of(tensor) for tensor in lasting.values()]
    try:
        yield
    finally:
        changed = []
        for each, before in attributes.items():
            now = vars(each)
            changed += [name for name in now if before.get(name, now) is not now[name]]
            now.clear()
            now.update(before)
        changed += [name for name, restore in containers if restore()]
        written = [restore() for restore in values]
    if changed:
        raise CaptureError(f"it changes its attribute {changed[0]!r}, and might run twice")
    if any(written):
        raise CaptureError("it changes a parameter or buffer, and might run twice")


# --------------------------------------------------------------------------- in a trace


def called(
    module: nn.Module,
    function: Callable[..., Any],
    lasting: Mapping[str, Tensor],
    named: Mapping[str, Tensor],
    args: Any,
    kwargs: Any,
) -> Any:
    """Runs in the place of a module's forward while it is traced. `lasting` are its parameters and
    buffers; `named` are the traced tensors that replace its parameters."""
    leaves, spec = tree_flatten((args, kwargs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    tensors = [*(leaves[place] for place in places), *named.values()]
    plain = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    if not tensors or not all(isinstance(leaf, _PLAIN) for leaf in plain):
        raise CaptureError("it is given something else than tensors and plain values")
    needs = [torch.is_grad_enabled() and tensor.requires_grad for tensor in tensors]
    device = tensors[0].device.type
    autocast = (device, *_autocast_now(device))
    shapes = [(t.dtype, t.device, tuple(t.shape), t.stride()) for t in tensors]
    modes = [each.training for each in module.modules()]
    given = str(spec), repr(plain), repr(shapes), repr(modes), repr(needs), autocast
    key = function.__qualname__, *given
    known = _known.setdefault(module, {})
    if key not in known:
        call = Call(weakref.ref(module), function, spec, plain, places, [*named], needs, autocast)
        known[key] = Opaque(call, _learned(call, tensors, lasting))
        _by_number[call.number] = known[key]
    learned = known[key].learned
    results = iter(_Traced.apply(known[key].call.number, *tensors))
    filled = [next(results) if isinstance(leaf, Tensor) else leaf for leaf in learned.leaves]
    return tree_unflatten(filled, learned.spec)
