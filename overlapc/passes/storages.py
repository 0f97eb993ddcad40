"""Functions that say how many bytes a value takes, and which values share a storage."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

UNBACKED_HINT = 8192  # assumed elements along a dimension of unknown size


def storage_bytes(val: Any) -> int:
    """Count the bytes of a value's storage."""
    total = 0
    for tensor in tensors_of(val):
        try:
            total += hint(tensor.untyped_storage().nbytes())
        except (RuntimeError, NotImplementedError):
            numel = 1
            for size in tensor.shape:
                numel *= hint(size)
            total += numel * tensor.element_size()
    return total


def hint(size: Any) -> int:
    """Return a symbolic size as a number: its example value, or UNBACKED_HINT for unknown ones."""
    if isinstance(size, int):
        return size
    node = size.node
    if node.has_hint():
        return int(node.hint)
    expr = node.expr
    known = {s: UNBACKED_HINT for s in expr.free_symbols}
    known |= {s: _taken(size)[s] for s in expr.free_symbols if s in _taken(size)}
    examples = getattr(node.shape_env, "backed_var_to_val", None)
    if examples is None:  # its name in older releases
        examples = node.shape_env.var_to_val
    known |= {s: int(examples[s]) for s in expr.free_symbols if s in examples}
    return max(0, int(expr.xreplace(known)))


def take_as_even(graph: fx.Graph) -> None:
    """Take loads of experts, which depend on data, as even: of the rows of an all-to-all each rank
    gets and sends as many."""
    for node in graph.nodes:
        if "c10d_functional.all_to_all_single." not in str(node.target):
            continue
        rows = node.args[0].meta["val"].shape[0]
        for splits in node.args[1:3] if _is_taken(rows) else ():
            for given in splits or ():
                size = given.meta.get("val") if isinstance(given, fx.Node) else given
                if not _is_taken(size) and size.node.expr.is_symbol:
                    _taken(size)[size.node.expr] = hint(rows) // len(splits)


def _taken(size: torch.SymInt) -> dict[Any, int]:
    """By symbol: what its graph's sizes that depend on data are taken as."""
    found: dict[Any, int] = size.node.shape_env.var_to_hint_override
    return found


def _is_taken(size: Any) -> bool:
    """Is it a number, has it an example, or is it known what it is taken as?"""
    if not isinstance(size, torch.SymInt) or size.node.has_hint():
        return True
    return _taken(size).keys() >= size.node.expr.free_symbols


def aliases(node: fx.Node) -> list[fx.Node]:
    """Return the inputs that an output of this node may share storage with, by its schema."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not any(r.alias_info is not None for r in schema.returns):
        return []
    return [n for n in node.all_input_nodes]


def is_view(node: fx.Node) -> bool:
    """Does the op's kernel return its input's storage, although its schema may not say so?"""
    name = str(node.target)
    return name.startswith(("aten._unsafe_view.", "aten._reshape_alias.", "aten.detach."))


def same_storage(a: fx.Node, b: fx.Node) -> bool:
    """Do two values that an aliasing op joins share a storage? Fake tensors share as real ones
    do."""
    mine, theirs = tensors_of(a.meta.get("val")), tensors_of(b.meta.get("val"))
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


def tensors_of(val: Any) -> list[torch.Tensor]:
    if isinstance(val, torch.Tensor):
        return [val]
    if isinstance(val, dict):
        val = list(val.values())
    if isinstance(val, (tuple, list)):
        return [t for item in val for t in tensors_of(item)]
    return []


def may_overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """May the memory ranges of the two tensors, first to last element, overlap?"""
    if one.untyped_storage()._cdata != other.untyped_storage()._cdata:
        return False
    (begin, end), (start, stop) = extent(one), extent(other)
    return begin < stop and start < end


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The bytes of its storage, from and to, among which the tensor's are."""
    size = tensor.element_size()
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    length = 1 + sum((rows - 1) * stride for rows, stride in steps) if tensor.numel() else 0
    return tensor.storage_offset() * size, (tensor.storage_offset() + length) * size
