"""Incoming gradients may have other strides than those with which a backward was traced.

AOTAutograd guesses that a gradient has the strides of its result, and copies a gradient that has
others. So such a backward may sum in another order than eager's. And if elements of a result share
memory, as those of `unfold`, a gradient with its strides has too little room. Within `as_they_come`
AOTAutograd passes gradients on uncopied. `given` then runs the backward on them if the traced ops
and their order are the same for these strides; else it copies, too, and reports that.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo.utils import detect_fake_mode
from torch._functorch._aot_autograd.schemas import MemoryFormatMeta
from torch._prims_common import suggest_memory_format
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from overlapc.passes.nodes import is_tangent
from overlapc.tools.shared_changes import Shared, replaced

aten = torch.ops.aten
# Ops whose backward formulas take gradients of any strides. Other formulas may first make a copy of
# another layout; a trace in which the copy was not needed does not show it.
_AS_THEY_LIE = {
    *(aten.mm.default, aten.bmm.default, aten.sum.default, aten.sum.dim_IntList),
    *(aten.view.default, aten._unsafe_view.default, aten.clone.default, aten.detach.default),
    *(aten.t.default, aten.transpose.int, aten.permute.default, aten.expand.default),
    *(aten.squeeze.dim, aten.squeeze.default, aten.unsqueeze.default, aten.alias.default),
    *(aten.slice.Tensor, aten.select.int, aten.slice_backward.default, aten.cat.default),
    *(aten.select_backward.default, aten.unfold_backward.default, aten.diagonal_backward.default),
    *(aten._softmax_backward_data.default, aten._log_softmax_backward_data.default),
    *(aten.native_layer_norm_backward.default, aten.embedding_dense_backward.default),
}
_thread = threading.local()  # guesses: those of this thread's trace


class _Any:
    """Equal to all sizes and strides."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = object.__hash__


@contextlib.contextmanager
def as_they_come() -> Iterator[None]:
    """Graphs that are traced within this context receive gradients uncopied, with any strides."""
    outer, _thread.guesses = getattr(_thread, "guesses", None), []
    try:
        with _changed:
            yield
        for guess in _thread.guesses:
            guess.memory_format, guess.size, guess.stride = None, _Any(), _Any()
    finally:
        _thread.guesses = outer


@contextlib.contextmanager
def _guessed() -> Iterator[None]:
    made = MemoryFormatMeta.from_tensor

    def guess(t: Tensor, *more: Any, **options: Any) -> MemoryFormatMeta | None:
        found = made(t, *more, **options)
        guesses = getattr(_thread, "guesses", None)
        if found is None or guesses is None or is_traceable_wrapper_subclass(t):
            return found
        if found.memory_format is None and torch._debug_has_internal_overlap(t):
            found = MemoryFormatMeta(memory_format=torch.contiguous_format)
        guesses.append(found)
        return found

    with replaced(MemoryFormatMeta, "from_tensor", staticmethod(guess)):
        yield


_changed = Shared(_guessed)


def given(
    run: Callable[[list[Any]], Any],
    backward: fx.GraphModule,
    may_differ: bool,
    say: Callable[[str], None],
) -> Callable[[list[Any]], Any]:
    """Return `run`, which takes its arguments boxed, for gradients of any strides. A backward that
    `may_differ` depends on its gradients' strides in ways that the trace does not show."""
    tangents = {
        i: node
        for i, node in enumerate(backward.graph.find_nodes(op="placeholder"))
        if is_tangent(node) and isinstance(node.meta.get("val"), Tensor)
    }
    known: dict[Any, bool] = {}  # strides -> may gradients be passed on uncopied?

    @functools.wraps(run)
    def called(arguments: list[Any]) -> Any:
        others = {}
        for i, node in tangents.items():
            came = arguments[i]
            if type(came) is Tensor and not _same(came, _strides(came, node.meta["val"])):
                others[i] = came
        key = tuple((i, came.shape, came.stride()) for i, came in others.items())
        if others and key not in known:
            came = {tangents[i]: tensor for i, tensor in others.items()}
            known[key] = not may_differ and _takes(backward, came)
        if others and not known[key]:
            for i, came in others.items():
                expected = _strides(came, tangents[i].meta["val"])
                say(
                    f"the gradient of a result of shape {tuple(came.shape)} came with strides "
                    f"{came.stride()}, not the traced {expected}: it is copied to the traced ones, "
                    "and what depends on strides, as the order of a sum, may differ from eager's"
                )
                arguments[i] = came.new_empty_strided(came.shape, expected).copy_(came)
        return run(arguments)

    called._boxed_call = True  # type: ignore[attr-defined]
    return called


def _takes(backward: fx.GraphModule, came: dict[fx.Node, Tensor]) -> bool:
    """Does the traced backward have the ops that eager runs for these gradients? Follows values
    with other strides through it, on fake tensors."""
    other: dict[fx.Node, Any] = {}

    def value(node: fx.Node) -> Any:
        return other.get(node, node.meta.get("val"))

    mode = detect_fake_mode([node.meta["val"] for node in came])
    if mode is None:
        return False
    sizes = mode.shape_env
    try:
        with mode, sizes.suppress_guards() if sizes is not None else contextlib.nullcontext():
            for node, tensor in came.items():
                other[node] = node.meta["val"].new_empty_strided(tensor.shape, tensor.stride())
            for node in backward.graph.nodes:
                if node.op == "output" or not any(each in other for each in node.all_input_nodes):
                    continue
                if not _as_it_lies(node) or _copied_for_a_view(node, value):
                    return False
                args, kwargs = fx.map_arg((node.args, node.kwargs), value)
                made = node.target(*args, **kwargs)
                if not all(map(_alike, tree_leaves(made), tree_leaves(node.meta["val"]))):
                    other[node] = made
    except Exception:  # no view of these strides exists, or fake tensors fail
        return False
    return True


def _as_it_lies(node: fx.Node) -> bool:
    tags = getattr(node.target, "tags", ())
    return node.target in _AS_THEY_LIE or torch.Tag.pointwise in tags


def _copied_for_a_view(node: fx.Node, value: Callable[[fx.Node], Any]) -> bool:
    """Is the node the copy of a `reshape` that needs none for these strides?"""
    if node.target is not aten.clone.default:
        return False
    source = value(node.all_input_nodes[0])
    for user in node.users:
        if user.target is aten._unsafe_view.default:
            with contextlib.suppress(RuntimeError):
                source.view(user.meta["val"].shape)
                return True
    return False


def _alike(one: Any, other: Any) -> bool:
    return not isinstance(one, Tensor) or _same(one, other.stride())


def _strides(came: Tensor, traced: Tensor) -> tuple[int, ...]:
    found = traced.stride()
    if all(isinstance(stride, int) for stride in (*found, *traced.shape)):
        return found
    # Traced with symbolic sizes: strides follow a memory format.
    order = suggest_memory_format(traced)
    return torch.empty_like(came, device="meta", memory_format=order).stride()


def _same(came: Tensor, strides: tuple[int, ...]) -> bool:
    """Are strides equal along every dimension of more than one element?"""
    pairs = zip(came.shape, came.stride(), strides, strict=True)
    return not came.numel() or all(size == 1 or one == other for size, one, other in pairs)


def is_hidden(graph: fx.GraphModule) -> bool:
    """Has the graph a custom Function, whose backward may depend on strides?"""
    return any(
        node.target is torch.ops.higher_order.autograd_function_apply
        for part in graph.modules()
        if isinstance(part, fx.GraphModule)
        for node in part.graph.nodes
    )
