"""For some ops PyTorch traces other strides than eager's kernels give their results.

A trace decides by strides: `reshape` becomes a view or a copy, `contiguous` an op or none. Where
they are not eager's, a view of the trace may not exist when the graph runs, and a sum may be in
another order. So while a trace is made, the kernel itself is asked: it runs once, on memory of the
same sizes and strides, for each such op of another form.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import (
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from overlapc.tools.shared_changes import replaced

aten = torch.ops.aten

# Found by running the ops of PyTorch's own op tests, and layers, forwards and backwards, on inputs
# and gradients of several layouts, both real and fake, with torch 2.11, 2.12 and 2.13. (fft, the
# scatters and pads differ before 2.13.)
_OTHERWISE = {
    aten._batch_norm_with_update_functional.default,
    aten._fft_c2c.default,
    aten._fft_c2r.default,
    aten._fft_r2c.default,
    aten._log_softmax_backward_data.default,
    aten._native_batch_norm_legit.default,
    aten._native_batch_norm_legit.no_stats,
    aten._native_batch_norm_legit_functional.default,
    aten.batch_norm_backward.default,
    aten.binary_cross_entropy_backward.default,
    aten.channel_shuffle.default,
    aten.copysign.Tensor,
    aten.cudnn_batch_norm.default,
    aten.cudnn_batch_norm_backward.default,
    aten.diagonal_scatter.default,
    aten.div.Tensor_mode,
    aten.elu_backward.default,
    aten.floor_divide.default,
    aten.glu_backward.default,
    aten.hardsigmoid_backward.default,
    aten.hardswish_backward.default,
    aten.hardtanh_backward.default,
    aten.heaviside.default,
    aten.huber_loss.default,
    aten.huber_loss_backward.default,
    aten.leaky_relu_backward.default,
    aten.log_sigmoid_backward.default,
    aten.log_sigmoid_forward.default,
    aten.logaddexp.default,
    aten.logaddexp2.default,
    aten.logical_and.default,
    aten.logical_or.default,
    aten.logical_xor.default,
    aten.logit_backward.default,
    aten.max_unpool2d.default,
    aten.max_unpool3d.default,
    aten.mse_loss_backward.default,
    aten.native_batch_norm.default,
    aten.native_batch_norm_backward.default,
    aten.native_dropout_backward.default,
    aten.native_layer_norm_backward.default,
    aten.nll_loss2d_forward.default,
    aten.pow.Scalar,
    aten.reflection_pad1d.default,
    aten.reflection_pad1d_backward.default,
    aten.reflection_pad2d.default,
    aten.reflection_pad2d_backward.default,
    aten.reflection_pad3d.default,
    aten.reflection_pad3d_backward.default,
    aten.replication_pad1d.default,
    aten.replication_pad1d_backward.default,
    aten.replication_pad2d.default,
    aten.replication_pad2d_backward.default,
    aten.replication_pad3d.default,
    aten.replication_pad3d_backward.default,
    aten.select_scatter.default,
    aten.slice_scatter.default,
    aten.smooth_l1_loss_backward.default,
    aten.soft_margin_loss_backward.default,
    aten.softplus_backward.default,
    aten.special_xlog1py.default,
    aten.threshold_backward.default,
    aten.xlogy.Tensor,
}
Strides = list[tuple[int, ...] | None]


@contextlib.contextmanager
def real_strides(known: Callable[[], dict[Any, Strides] | None]) -> Iterator[None]:
    """Within this context fake results have the strides of real ones, in a thread for which `known`
    returns what it has found so far."""

    def dispatch(
        mode: FakeTensorMode, op: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        made = before(mode, op, types, args, kwargs or {})
        found = known() if op in _OTHERWISE else None
        if found is None:
            return made
        return _restrided(mode, made, _asked(found, op, args, kwargs or {}))

    with replaced(FakeTensorMode, "dispatch", dispatch) as before:
        yield


def is_under_fakes() -> bool:
    """Are all tensors that are made here fake? Then they stand for another machine's."""
    return any(isinstance(m, FakeTensorMode) for m in _get_current_dispatch_mode_stack())


def _asked(known: dict[Any, Strides], op: Any, args: Any, kwargs: Any) -> Strides:
    """The strides of the op's results by its kernel; none, if it cannot run here."""
    leaves, spec = tree_flatten((args, kwargs))
    forms = [_form(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if any(not isinstance(n, int) for t in tensors for n in (*t.shape, *t.stride())):
        return []
    key = op, str(spec), repr(forms)
    if key not in known:
        with (
            torch.no_grad(),
            torch._C._DisableAutocast(),
            _disable_current_modes(),
            torch._C._DisablePythonDispatcher(),
        ):
            given, named = tree_unflatten(tree_map_only(Tensor, _empty, leaves), spec)
            try:
                made = op(*given, **named)
            except (RuntimeError, IndexError):  # no memory is left for it: the fake strides stay
                return []
        known[key] = [x.stride() if isinstance(x, Tensor) else None for x in tree_leaves(made)]
    return known[key]


def _form(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device


def _empty(like: Tensor) -> Tensor:
    made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
    return made if made.is_floating_point() or made.is_complex() else made.zero_()  # an index


def _restrided(mode: FakeTensorMode, made: Any, strides: Strides) -> Any:
    leaves, spec = tree_flatten(made)
    for i, (leaf, real) in enumerate(zip(leaves, strides, strict=False)):
        if isinstance(leaf, FakeTensor) and real is not None and leaf.stride() != real:
            with mode:
                leaves[i] = leaf.new_empty_strided(leaf.shape, real)
    return tree_unflatten(leaves, spec)
