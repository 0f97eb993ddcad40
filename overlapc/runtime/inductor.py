"""`backend="inductor"` compiles the forward and backward graphs with their order pinned.

Inductor calls overlapc's partition function on its own, decomposed joint graph. Its scheduler may
fuse neighbours but must not move ops past each other, so its reordering passes are off.
"""

from __future__ import annotations

import inspect
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx
from torch._inductor.compile_fx import compile_fx
from torch._inductor.custom_graph_pass import CustomPartitionerFn

_ORDER_PINNED: dict[str, Any] = {
    "reorder_for_peak_memory": False,
    "reorder_for_compute_comm_overlap": False,
    "reorder_for_locality": False,
    "fx_graph_cache": False,
}

# Inductor deep-copies its configuration; a key in it keeps graphs and tensors out of the copies.
_partitions: dict[str, Callable[..., Any]] = {}


class _Partitioner(CustomPartitionerFn):
    def __init__(self, key: str) -> None:
        self.key = key

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[Any], **options: Any) -> Any:
        options.pop("compiler", None)
        return _partitions[self.key](gm, joint_inputs, **options)

    def uuid(self) -> str:
        return self.key


def compile_with_inductor(
    gm: fx.GraphModule, example_inputs: Sequence[Any], partition: Callable[..., Any]
) -> Callable[..., Any]:
    """Compile a graph of Dynamo's with Inductor, planned by `partition`."""
    key = uuid.uuid4().hex
    _partitions[key] = partition
    options = {**_ORDER_PINNED, "custom_partitioner_fn": _Partitioner(key)}
    try:
        known = set(inspect.signature(compile_fx).parameters)
        assert "config_patches" in known
        return compile_fx(gm, list(example_inputs), config_patches=options)
    finally:
        del _partitions[key]
