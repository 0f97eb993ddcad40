"""`Call` runs a module as eager runs it; `learn` finds out on noise what it returns and keeps.

A call whose tensors have one *open* size, which depends on data (how many tokens an expert gets),
is learned at three; each size that it returns must be the open one or always the same.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C import DispatchKey
from torch.autograd.graph import saved_tensors_hooks
from torch.fx import _symbolic_trace
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import TreeSpec, tree_flatten, tree_structure, tree_unflatten

from overlapc.core.errors import CaptureError, OverlapcError
from overlapc.passes.draws import random_states
from overlapc.passes.opaque.reached import Reached
from overlapc.passes.opaque.unchanged import unchanged
from overlapc.passes.summed import aside, blank, copy_of, is_added, is_aside, summing
from overlapc.state.known import Known, restoring
from overlapc.state.module_state import PLAIN
from overlapc.tools.issued import issued, issued_since
from overlapc.tools.reach import autograd_nodes
from overlapc.tools.shared_changes import replaced

# These are off while an op runs, but on where its module runs.
_AUTOGRAD = (
    DispatchKey.AutogradCPU,
    DispatchKey.AutogradCUDA,
    DispatchKey.AutogradOther,
    DispatchKey.ADInplaceOrView,
)
_NOTHING: AbstractContextManager[Any] = contextlib.nullcontext()
_OPEN = (24, 40, 56)  # what is tried in the place of an open size
_GROWS = "what it returns or keeps does not grow as its data-dependent size"
_numbers = itertools.count()
_around: list[Callable[[], AbstractContextManager[None]]] = []


@dataclass(frozen=True)
class Like:
    """What is known of a tensor before it is there. A size of None is the open one of its call."""

    sizes: tuple[int | None, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    @staticmethod
    def of(tensor: Tensor) -> Like:
        return Like(
            tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad
        )

    def shape(self, size: Any) -> tuple[Any, ...]:
        return tuple(size if each is None else each for each in self.sizes)

    def made(self, size: Any) -> Tensor:
        """One without values; its open size is `size`."""
        kind: Any = {"dtype": self.dtype, "device": self.device}
        if None in self.sizes:
            return torch.empty(self.shape(size), **kind)
        return torch.empty_strided(self.sizes, self.strides, **kind)

    def fits(self, tensor: Tensor, size: Any) -> bool:
        if None in self.sizes and not tensor.is_contiguous():
            return False
        strides = tensor.stride() if None in self.sizes else self.strides
        return Like.of(tensor) == replace(self, sizes=self.shape(size), strides=strides)


@dataclass
class Learned:
    """What a module returned when it ran on noise; tensors are Likes."""

    spec: TreeSpec
    leaves: list[Any]
    gradients: list[Like | None]  # of the inputs
    held_bytes: int  # bytes that autograd keeps, without parameters
    draws: bool  # does it draw random numbers?
    alike: bool  # do gradients of all results reach the same inputs?
    adds: bool = False  # does its backward add a weight's gradient to `main_grad`?
    collectives: int = 0  # how many a forward and a backward issue
    groups: frozenset[str] = frozenset()  # process groups among which they communicate
    held_each: int = 0  # bytes more for each one of the open size

    @property
    def results(self) -> list[Like]:
        return [leaf for leaf in self.leaves if isinstance(leaf, Like)]

    @property
    def grows(self) -> list[bool]:
        """Does a result require a gradient?"""
        return [result.requires_grad for result in self.results]

    def held(self, size: Any) -> Any:
        return self.held_bytes + self.held_each * size if self.held_each else self.held_bytes


@dataclass(eq=False)
class Call:
    """A way in which a module is called: on which tensors, and how these and other values form its
    arguments. The tensors are those of the arguments, then the module's parameters and buffers
    called `names`."""

    module: weakref.ref[nn.Module]
    function: Callable[..., Any]  # of the module and the arguments: its `forward`, or a method
    spec: TreeSpec
    leaves: list[Any]  # of the arguments, with None for tensors and splits
    places: list[int]  # of the tensors among them
    splits: list[int]  # places of numbers that depend on data: rows of the first tensor, in parts
    names: list[str]
    needs: list[bool]  # does a tensor require a gradient?
    autocast: tuple[Any, ...]
    modes: list[bool]  # of its modules, in which it was tried out: do they train?
    whole: bool  # a whole module, of whose state nothing else takes care?
    ties: bool  # has the module a parameter or buffer under several names?
    known: Known | None  # what is known of the module
    open: tuple[int, int] | None  # tensor and dimension of an open size
    number: int = field(default_factory=_numbers.__next__)

    @cached_property
    def is_flat(self) -> bool:
        """Are the arguments the leaves, by position?"""
        flat: Any = (tuple(range(len(self.leaves))), {})
        return tree_structure(flat) == self.spec

    @property
    def name(self) -> str:
        """Of the module's class, or of the function."""
        named = type(self.module()) if self.whole else self.function
        return str(getattr(named, "__name__", named))

    @property
    def group(self) -> Any:
        """The process group in which the function itself exchanges data, past torch.distributed.
        (Such a one may also say what runs `on_noise` in its place.)"""
        return getattr(self.function, "exchanges_in", None)

    def size(self, tensors: Sequence[Tensor]) -> Any:
        """The open size, if there is one."""
        return None if self.open is None else tensors[self.open[0]].shape[self.open[1]]

    def otherwise(self, what: str) -> OverlapcError:
        return OverlapcError(
            f"a {type(self.module()).__name__}, which runs as one op, {what} than it did when it "
            "was tried out on noise; expected that to depend neither on values nor on attributes "
            "that change: make it traceable, or set these before the first step"
        )

    def run(
        self,
        tensors: Sequence[Tensor],
        splits: Sequence[int] = (),
        lasting: Mapping[str, Tensor] | None = None,
    ) -> tuple[Any, list[Tensor]]:
        """Call the module on leaves with these values; return its results and the leaves. `lasting`
        are its parameters and buffers, while a trace has put others into it."""
        module = self.module()
        assert module is not None, "the module of an opaque op is gone"
        pairs = zip(tensors, self.needs, strict=True)
        inputs = [tensor.detach().requires_grad_(needs) for tensor, needs in pairs]
        own: Mapping[str, Tensor] = lasting or {}
        if self.names and lasting is None:
            own = tensors_of(module)
        swapped = dict(lasting or {})
        for i, name in enumerate(self.names, len(self.places)):
            if isinstance(own[name], nn.Parameter):
                inputs[i] = copy_of(own[name], inputs[i].detach(), self.needs[i])
            swapped[name] = inputs[i]
        leaves = list(self.leaves)
        for place, tensor in zip(self.places, inputs, strict=False):
            leaves[place] = tensor
        for place, rows in zip(self.splits, splits, strict=True):
            leaves[place] = rows
        args, kwargs = (leaves, {}) if self.is_flat else tree_unflatten(leaves, self.spec)
        function = self.function
        if is_aside():
            function = getattr(function, "on_noise", function)
        with eagerly(), _autocast(*self.autocast), self._with(swapped):
            return function(module, *args, **kwargs), inputs

    def _with(self, swapped: dict[str, Tensor]) -> AbstractContextManager[Any]:
        """Put these in the place of the module's tensors, also by other names of the same."""
        if not swapped:
            return _NOTHING
        ties, module = self.ties, self.module()
        assert module is not None
        return _reparametrize_module(module, swapped, tie_weights=ties, stack_weights=ties)


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Its parameters and buffers, by name."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def modes_of(module: nn.Module) -> list[bool]:
    """Which of its modules train."""
    return [each.training for each in module.modules()]


def open_size(tensors: Sequence[Tensor]) -> tuple[int, int] | None:
    """Tensor and dimension of a size that depends on data; None if there is none. Raise if there
    are several."""
    found: dict[str, tuple[int, int]] = {}
    for i, tensor in enumerate(tensors):
        for d, size in enumerate(tensor.shape):
            if not isinstance(size, int):
                found.setdefault(str(size), (i, d))
        if not all(isinstance(stride, int) for stride in tensor.stride()):
            raise CaptureError("it is given a tensor whose layout depends on data")
    if len(found) > 1:
        raise CaptureError("it is given tensors of several data-dependent sizes")
    return next(iter(found.values()), None)


def autocast_now(device: str) -> tuple[Any, ...]:
    return (
        torch.get_autocast_dtype(device),
        torch.is_autocast_enabled(device),
        torch.is_autocast_cache_enabled(),
    )


def _autocast(device: str, *settings: Any) -> AbstractContextManager[Any]:
    """Autocast with these settings; as they are in most steps, that is nothing to do."""
    return _NOTHING if settings == autocast_now(device) else torch.autocast(device, *settings)


def has_ties(module: nn.Module) -> bool:
    """Has it a parameter or buffer under several names?"""
    return any(
        len([*named()]) < len([*named(remove_duplicate=False)])
        for named in (module.named_parameters, module.named_buffers)
    )


@contextlib.contextmanager
def eagerly() -> Iterator[None]:
    """Run the block as if outside of an op: with autograd, and without modes."""
    include = torch._C._dispatch_tls_local_include_set().add(DispatchKey.ADInplaceOrView)
    exclude = torch._C._dispatch_tls_local_exclude_set()
    for key in _AUTOGRAD:
        exclude = exclude.remove(key)
    with torch._C._ForceDispatchKeyGuard(include, exclude), torch.enable_grad():
        yield


# --------------------------------------------------------------------------- what is learned


@contextlib.contextmanager
def learned_within(make: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """In the block, calls are tried out within the contexts that `make` makes."""
    _around.append(make)
    try:
        yield
    finally:
        _around.remove(make)


def learn(
    call: Call, tensors: Sequence[Tensor], lasting: Mapping[str, Tensor], reached: Reached
) -> Learned:
    """Run the module, forward and backward, on noise."""
    if call.open is None:
        made, group = _learned(call, tensors, lasting, reached, 0), call.group
        return made if group is None else _agreed(made, group, tensors[0].device)
    few, more, most = (_learned(call, tensors, lasting, reached, size) for size in _OPEN)
    found = _at_any_size(few, more, _OPEN[:2])
    if found != _at_any_size(more, most, _OPEN[1:]):
        raise CaptureError(_GROWS)
    return found


def _agreed(learned: Learned, group: Any, device: torch.device) -> Learned:
    """All ranks of the group plan for the most bytes that one of them keeps."""
    most = torch.tensor(learned.held_bytes, device=device)
    dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
    return replace(learned, held_bytes=int(most), groups=learned.groups | {group.group_name})


def _at_any_size(one: Learned, other: Learned, sizes: tuple[int, ...]) -> Learned:
    """What a call does at any open size, from what it did at two."""
    few, more = sizes
    held_each, rest = divmod(other.held_bytes - one.held_bytes, more - few)
    if rest or (one.spec, one.draws, one.alike) != (other.spec, other.draws, other.alike):
        raise CaptureError(_GROWS)
    return replace(
        one,
        leaves=[_at_any(a, b, sizes) for a, b in zip(one.leaves, other.leaves, strict=True)],
        gradients=[
            _at_any(a, b, sizes) for a, b in zip(one.gradients, other.gradients, strict=True)
        ],
        held_bytes=one.held_bytes - held_each * few,
        held_each=held_each,
    )


def _at_any(one: Any, other: Any, tried: tuple[int, ...]) -> Any:
    if one == other:
        return one
    if isinstance(one, Like) and isinstance(other, Like) and len(one.sizes) == len(other.sizes):
        pairs = zip(one.sizes, other.sizes, strict=True)
        sizes = tuple(None if pair == tried else pair[0] for pair in pairs)
        found = replace(one, sizes=sizes, strides=())
        same = replace(found, sizes=found.shape(tried[1])) == replace(other, strides=())
        if same and _is_contiguous(one) and _is_contiguous(other):
            return found
    raise CaptureError(_GROWS)


def _is_contiguous(like: Like) -> bool:
    return replace(like, device=torch.device("meta")).made(None).is_contiguous()


def _learned(
    call: Call,
    tensors: Sequence[Tensor],
    lasting: Mapping[str, Tensor],
    reached: Reached,
    size: int,
) -> Learned:
    module, known = call.module(), call.known
    assert module is not None
    kept_as_it_is = unchanged(module, lasting, reached) if known is None else restoring(module)
    with (
        _disable_current_modes(),
        replaced(_symbolic_trace, "_is_fx_tracing_flag", False),  # else torch.compile refuses
        torch._C._DisablePythonDispatcher(),  # else it compiles once more when the op runs
        torch.random.fork_rng(),
        kept_as_it_is,
        aside(),
        contextlib.ExitStack() as stack,
    ):
        for make in _around:
            stack.enter_context(make())
        arguments = [_made_up(tensor, size) for tensor in tensors[: len(call.places)]]
        given = [*arguments, *(lasting[name].detach() for name in call.names)]
        kept: dict[int, Tensor] = {}

        def keep(tensor: Tensor) -> Tensor:
            kept[tensor.untyped_storage()._cdata] = tensor
            return tensor

        splits = _parts(arguments[0].shape[0], len(call.splits)) if call.splits else []
        before, versions = random_states(), [tensor._version for tensor in arguments]
        collectives = issued()
        with _hooked(keep):
            made, inputs = call.run(given, splits, lasting)
        if [tensor._version for tensor in arguments] != versions:
            raise CaptureError("it changes a tensor that it is given")
        draws = not all(map(torch.equal, before, random_states()))
        leaves, spec = tree_flatten(made)
        for leaf in leaves:
            if isinstance(leaf, float) or not isinstance(leaf, (Tensor, *PLAIN)):
                raise CaptureError(f"it returns a {type(leaf).__name__}, expected tensors")
        _refuse_aliases(leaves, inputs[: len(call.places)])
        _refuse_other_leaves(leaves, inputs)
        for tensor in inputs[: len(call.places)]:
            keep(tensor)
        with summing(inputs):
            gradients, alike = _gradients_of_ones(leaves, inputs, again=known is None)
        within = issued_since(collectives)
        left = iter(gradients)
        storages = {tensor.untyped_storage()._cdata for tensor in lasting.values()}
        return Learned(
            spec,
            [Like.of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves],
            [_like(next(left), tensor) if tensor.requires_grad else None for tensor in inputs],
            sum(t.untyped_storage().nbytes() for key, t in kept.items() if key not in storages),
            draws,
            alike,
            any(map(is_added, inputs)),
            sum(within.values()),
            frozenset(within),
        )


def _parts(rows: int, count: int) -> list[int]:
    return [rows // count + (i < rows % count) for i in range(count)]


def _refuse_aliases(leaves: Sequence[Any], arguments: Sequence[Tensor]) -> None:
    """Refuse results that have the memory of arguments: a later write would reach these."""
    taken = {tensor.untyped_storage()._cdata for tensor in arguments}
    for leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata in taken:
            raise CaptureError("it returns a tensor that it is given, or a view of it")


def _like(gradient: Tensor | None, of: Tensor) -> Like | None:
    if gradient is None:
        return None
    return Like.of(blank(gradient) if is_added(of) else gradient)


def _refuse_other_leaves(leaves: Sequence[Any], inputs: Sequence[Tensor]) -> None:
    """Refuse a function whose results depend on other tensors that get gradients: a parameter that
    its closure holds, say."""
    known = {id(tensor) for tensor in inputs}
    results = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
    found = [result for result in results if result.grad_fn is None]
    found += [node.variable for node in autograd_nodes(results) if hasattr(node, "variable")]
    if any(id(tensor) not in known for tensor in found):
        raise CaptureError("it reads a parameter that it is not given and its module has not")


@contextlib.contextmanager
def _hooked(keep: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Call `keep` for what autograd keeps, also during a trace, which ignores hooks."""
    tracing = torch._C._autograd._saved_tensors_hooks_set_tracing(False)
    try:
        with saved_tensors_hooks(keep, lambda tensor: tensor):
            yield
    finally:
        torch._C._autograd._saved_tensors_hooks_set_tracing(tracing)


def _gradients_of_ones(
    leaves: Sequence[Any], inputs: Sequence[Tensor], again: bool
) -> tuple[Sequence[Tensor | None], bool]:
    """The gradients of the inputs that may get one, and whether each result alone gives them to the
    same inputs. If the backward cannot run `again`, it may be that they do not."""
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    results = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not results or not wanted:
        return [None] * len(wanted), True

    def gradients(of: Sequence[Tensor]) -> Sequence[Tensor | None]:
        ones = [torch.ones_like(result) for result in of]
        found: Sequence[Tensor | None] = torch.autograd.grad(
            of, wanted, ones, retain_graph=True, allow_unused=True
        )
        return found

    with eagerly():
        found = gradients(results)
        if len(results) > 1 and not again:
            return found, False
        each = [gradients([result]) for result in results] if len(results) > 1 else []
    reached = [[g is not None for g in one] for one in (found, *each)]
    return found, all(one == reached[0] for one in reached)


def _made_up(tensor: Tensor, size: int) -> Tensor:
    shape = [each if isinstance(each, int) else size for each in tensor.shape]
    strides, device = tensor.stride(), tensor.device
    new = torch.empty_strided(shape, strides, dtype=tensor.dtype, device=device)
    return new.normal_() if tensor.is_floating_point() else new.zero_()
