"""Twins, `overlapc::NAME`, do what eager does for ops that behave differently when traced.

In place. A traced graph changes nothing in place: `x.sigmoid_()` becomes `sigmoid(x)`, which makes
a new tensor with its own strides. If these differ from the strides of `x`, results differ, too:
random numbers are drawn in the order of memory, and the rest of a row after its last full vector is
computed by scalar instructions. So on such an `x`, `x.sigmoid_()` is traced as
`overlapc::sigmoid_in_place(x, strides)`, which runs `sigmoid_` on a copy of `x` with these strides.

With autograd. oneDNN's LSTM keeps the values for its backward only while autograd is on, but a
traced graph runs without autograd. `overlapc::mkldnn_rnn_layer_trained` switches it on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch._ops import OpOverload
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

aten = torch.ops.aten

# These compute each element the same way at any place in memory: arithmetic that rounds once, and
# choices.
# fmt: off
_ALIKE = (
    "abs", "add", "bitwise_and", "bitwise_left_shift", "bitwise_not", "bitwise_or",
    "bitwise_right_shift", "bitwise_xor", "ceil", "clamp", "clamp_max", "clamp_min", "clip",
    "conj_physical", "div", "floor", "hardtanh", "leaky_relu", "logical_and", "logical_not",
    "logical_or", "logical_xor", "mul", "nan_to_num", "neg", "nextafter", "relu", "round", "sgn",
    "sign", "sub", "trunc",
)
# fmt: on
# Pointwise ops that PyTorch does not tag as such.
_POINTWISE = ("gelu_", "hardswish_", "mish_", "random_")
# Their functional forms make a contiguous tensor of any input.
_MAKES_CONTIGUOUS = (aten.bernoulli_.float, aten.bernoulli_.Tensor)

_library = torch.library.Library("overlapc", "FRAGMENT")


@contextlib.contextmanager
def twins_traced() -> Iterator[None]:
    """Within this context functionalisation puts the twins into graphs, in every thread."""
    rules = {op: _in_place_rule(op) for op in _in_place_ops()}
    rules[aten.mkldnn_rnn_layer.default] = _rule(aten.mkldnn_rnn_layer.default, _trained)
    rules[aten.cudnn_batch_norm.default] = _rule(aten.cudnn_batch_norm.default, _normed)
    rules = {op: r for op, r in rules.items() if FunctionalTensorMode not in op.python_key_table}
    for op, rule in rules.items():
        op.python_key_table[FunctionalTensorMode] = rule
        op._dispatch_cache.clear()
    try:
        yield
    finally:
        for op in rules:
            del op.python_key_table[FunctionalTensorMode]
            op._dispatch_cache.clear()


def _rule(op: OpOverload, instead: Callable[..., Any]) -> Callable[..., Any]:
    """Make functionalisation replace `op` by `instead`, unless that asks for the default."""

    def rule(mode: FunctionalTensorMode, *args: Any, **kwargs: Any) -> Any:
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if all(type(t) in (Tensor, FunctionalTensor) for t in given):
            made = instead(mode, *args, **kwargs)
            if made is not NotImplemented:
                return made
        with mode:
            return op._op_dk(DispatchKey.Python, *args, **kwargs)

    return rule


def _inner(given: Any) -> Any:
    return tree_map_only(FunctionalTensor, FunctionalTensor.from_functional, given)


# --------------------------------------------------------------------------- in place


@lru_cache
def _in_place_ops() -> tuple[OpOverload, ...]:
    """Every op of aten that changes only its first argument, by pointwise math or at random."""
    found = []
    for name in dir(aten):
        if not name.endswith("_") or name.startswith("_") or name.endswith("__"):
            continue
        packet = getattr(aten, name)
        for op in (getattr(packet, overload) for overload in packet.overloads()):
            written = [a.alias_info is not None for a in op._schema.arguments]
            known = {torch.Tag.pointwise, torch.Tag.nondeterministic_seeded} & {*op.tags}
            if (known or name in _POINTWISE) and written[:1] == [True] and sum(written) == 1:
                found.append(op)
    return tuple(found)


def _in_place_rule(op: OpOverload) -> Callable[..., Any]:
    def keep_strides(_mode: FunctionalTensorMode, x: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(x, FunctionalTensor) or not _strides_matter(op, x, kwargs):
            return NotImplemented
        inner, given, named = _inner((x, args, kwargs))
        x.replace_(_in_place_twin(op)(inner, x.stride(), *given, **named))
        x.commit_update()
        x.sync()
        return x

    return _rule(op, keep_strides)


def _strides_matter(op: OpOverload, x: FunctionalTensor, kwargs: dict[str, Any]) -> bool:
    """Would the functional form give other results, or a tensor of other strides?

    A view gets its strides back from its base, but PyTorch does not treat the results of
    `unsafe_chunk` as views.
    """
    if op in _MAKES_CONTIGUOUS:
        return not x.is_contiguous()
    if torch._prims_common.is_non_overlapping_and_dense_or_false(x):
        return False
    alike = (
        op._schema.name.removeprefix("aten::")[:-1] in _ALIKE and not kwargs and not x.is_complex()
    )
    return not alike or torch._is_functional_tensor_base(x.elem)


@lru_cache
def _in_place_twin(op: OpOverload) -> Callable[..., Tensor]:
    """`overlapc::NAME_in_place(Tensor self, SymInt[] stride, ...)`."""
    old, arguments = str(op._schema).removeprefix("aten::").split("(Tensor(a!) self", 1)
    name, _, overload = old.partition(".")
    name = f"{name.rstrip('_')}_in_place"
    random = torch.Tag.nondeterministic_seeded in op.tags

    def run(x: Tensor, stride: Any, *args: Any, **kwargs: Any) -> Tensor:
        changed = empty(x, stride)
        made: Tensor = op(changed if random else changed.copy_(x), *args, **kwargs)
        return made

    def empty(x: Tensor, stride: Any, *_: Any, **__: Any) -> Tensor:
        return torch.empty_strided(x.shape, stride, dtype=x.dtype, device=x.device)

    return _define(
        f"{name}.{overload}" if overload else name,
        f"(Tensor self, SymInt[] stride{arguments.rpartition(' -> ')[0]} -> Tensor",
        run,
        empty,
        (torch.Tag.nondeterministic_seeded,) if random else (),
    )


def _define(
    name: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any], tags: Any = ()
) -> Callable[..., Any]:
    _library.define(name + schema, tags=tags)
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"overlapc::{name}", fake, lib=_library)
    packet, _, overload = name.partition(".")
    made: Callable[..., Any] = getattr(getattr(torch.ops.overlapc, packet), overload or "default")
    return made


# --------------------------------------------------------------------------- with autograd


def _trained(mode: FunctionalTensorMode, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return NotImplemented
    made = _trained_twin()(*_inner(args), **_inner(kwargs))
    with mode:
        return tree_map_only(Tensor, FunctionalTensor.to_functional, made)


@lru_cache
def _trained_twin() -> Callable[..., Any]:
    op = aten.mkldnn_rnn_layer.default

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.enable_grad(), torch._C._AutoDispatchBelowAutograd():
            return op(*args, **kwargs)

    name = "mkldnn_rnn_layer_trained"
    return _define(name, str(op._schema).removeprefix("aten::mkldnn_rnn_layer"), run, op)


def _normed(
    mode: FunctionalTensorMode,
    x: Any,
    weight: Any,
    bias: Any,
    mean: Any,
    var: Any,
    training: bool,
    factor: float,
    eps: float,
) -> Any:
    """cuDNN's batch norm: it changes the running statistics, which its schema does not say."""
    if not training or mean is None:
        return NotImplemented
    given = _inner((x, weight, bias, mean, var))
    *made, new_mean, new_var = _normed_twin()(*given, training, factor, eps)
    for buffer, new in ((mean, new_mean), (var, new_var)):
        buffer.replace_(new)
        buffer.commit_update()
        buffer.sync()
    with mode:
        return tree_map_only(Tensor, FunctionalTensor.to_functional, tuple(made))


@lru_cache
def _normed_twin() -> Callable[..., Any]:
    op = aten.cudnn_batch_norm.default

    def run(x: Tensor, weight: Tensor, bias: Any, mean: Tensor, var: Tensor, *more: Any) -> Any:
        mean, var = mean.clone(), var.clone()
        return (*op(x, weight, bias, mean, var, *more), mean, var)

    arguments, _, result = str(op._schema).removeprefix("aten::cudnn_batch_norm").rpartition(")")
    arguments = arguments.replace("Tensor? running", "Tensor running")
    return _define("cudnn_batch_norm_changing", f"{arguments}, Tensor, Tensor){result}", run, run)
