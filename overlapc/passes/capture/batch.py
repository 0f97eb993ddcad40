"""`of_batch` gives a captured graph the sizes of another batch, without tracing it again.

The graph is captured with `MANY` sequences: a prime, and larger than any dimension that does not
depend on the batch. So that prime divides a size if, and only if, the size is proportional to the
batch. A batch of one is not: a dimension of 1 makes views of what are copies otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from overlapc.core.errors import CaptureError
from overlapc.passes.nodes import signature_of
from overlapc.passes.storages import tensors_of
from overlapc.passes.trace import Captured

MANY = 1_000_003


@contextmanager
def of_batch(captured: Captured, count: int) -> Iterator[Captured]:
    """While it lasts, the graph, captured with `MANY` sequences, is as if captured with `count`, at
    least two. Numbers among the arguments of its ops stay as they are: no signature has them."""
    if count < 2:
        raise CaptureError(f"a batch of {count}: expected 2 or more, which are traced alike")
    nodes = [node for node in captured.joint.graph.nodes if "val" in node.meta]
    before = [node.meta["val"] for node in nodes]
    trace = captured.trace
    try:
        with unset_fake_temporarily():
            for node, val in zip(nodes, before, strict=True):
                node.meta["val"] = _resized(val, count)
        storages = {value.storage for value in trace.values}
        bytes_of = {
            node.name: _storage_bytes(val, count)
            for node, val in zip(nodes, before, strict=True)
            if node.name in storages
        }
        values = [replace(value, bytes=bytes_of[value.storage]) for value in trace.values]
        by_name = {node.name: node for node in captured.joint.graph.nodes}
        ops = [replace(op, signature=signature_of(by_name[op.name], {})) for op in trace.ops]
        yield replace(captured, trace=replace(trace, ops=tuple(ops), values=tuple(values)))
    finally:
        for node, val in zip(nodes, before, strict=True):
            node.meta["val"] = val


def _resized(val: Any, count: int) -> Any:
    """The value's tensors, without data, as they are in another batch."""
    if isinstance(val, (tuple, list)):
        return type(val)(_resized(item, count) for item in val)
    if not isinstance(val, torch.Tensor):
        return val
    shape, stride = ([_size(n, count) for n in sizes] for sizes in (val.shape, val.stride()))
    return torch.empty_strided(shape, stride, dtype=val.dtype, device="meta")


def _storage_bytes(val: Any, count: int) -> int:
    return sum(_size(t.untyped_storage().nbytes(), count) for t in tensors_of(val))


def _size(size: Any, count: int) -> int:
    if not isinstance(size, int):
        raise CaptureError(f"a size {size}: expected numbers alone where batches are compared")
    return size if size % MANY else size // MANY * count


__all__ = ["MANY", "of_batch"]
