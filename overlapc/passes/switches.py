"""PyTorch's switches that say by which kernels an op computes while it runs, and how precisely.

A graph is traced with the switches of its forward. They may be others when its backward runs
(`with tf32(): loss = model(x)`, then `loss.backward()`). Eager's forward ran with the first and its
backward runs with the second; what a backward graph recomputes is of the forward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import fx

# As torch._C names them, behind `_get_` and `_set_`; in the order in which they are set. Each
# release of PyTorch has most of them.
_NAMES = (
    "float32_matmul_precision",
    "cublas_allow_tf32",
    "cublas_allow_fp16_accumulation",
    "cublas_allow_fp16_reduced_precision_reduction",
    "cublas_allow_bf16_reduced_precision_reduction",
    "cudnn_allow_tf32",
    "cudnn_benchmark",
    "cudnn_deterministic",
    "cudnn_enabled",
    "mkldnn_deterministic",
    "mkldnn_enabled",
    "nnpack_enabled",
    "blas_preferred_backend",
)
_FLAGS = tuple(name for name in _NAMES if hasattr(torch._C, f"_get_{name}"))
_PRECISIONS = tuple(
    (backend, op)
    for backend in ("generic", "cuda", "mkldnn")
    for op in (("all",) if backend == "generic" else ("all", "matmul", "conv", "rnn"))
)

Switches = Mapping[Any, Any]


def switches() -> Switches:
    """How the switches are set now. Those that cannot be read are left out: PyTorch refuses to read
    its older ones where its newer ones have been set."""
    found: dict[Any, Any] = {}
    for name in _FLAGS:
        with contextlib.suppress(RuntimeError):
            found[name] = getattr(torch._C, f"_get_{name}")()
    for pair in _PRECISIONS:
        with contextlib.suppress(RuntimeError):
            found[pair] = torch._C._get_fp32_precision_getter(*pair)
    deterministic = torch.are_deterministic_algorithms_enabled()
    found["deterministic"] = deterministic, torch.is_deterministic_algorithms_warn_only_enabled()
    return found


@contextlib.contextmanager
def switched(wanted: Switches) -> Iterator[None]:
    """Within this context the switches are as `wanted`."""
    before = switches()
    _switch(wanted)
    try:
        yield
    finally:
        _switch(before)


def _switch(wanted: Switches) -> None:
    for name in _FLAGS:
        if name in wanted:
            value = wanted[name]
            getattr(torch._C, f"_set_{name}")(*(value if isinstance(value, tuple) else (value,)))
    for pair in _PRECISIONS:
        if pair in wanted:
            torch._C._set_fp32_precision_setter(*pair, wanted[pair])
    on, warn_only = wanted["deterministic"]
    torch.use_deterministic_algorithms(on, warn_only=warn_only)


def as_in_forward(
    backward: fx.GraphModule, run: Callable[[list[Any]], Any], forwards: Switches
) -> Callable[[list[Any]], Any]:
    """`run`, the code of a backward graph. Where it is called with other switches than `forwards`,
    what it recomputes is computed with these. It is then interpreted, which takes longer."""
    if not any(map(_is_recomputed, backward.graph.nodes)):
        return run

    def called(arguments: list[Any]) -> Any:
        if switches() == forwards:
            return run(arguments)
        return _Interpreter(backward, forwards).boxed_run(arguments)

    called._boxed_call = True  # type: ignore[attr-defined]
    return called


class _Interpreter(fx.Interpreter):
    def __init__(self, backward: fx.GraphModule, forwards: Switches) -> None:
        super().__init__(backward)
        self.forwards = forwards

    def run_node(self, n: fx.Node) -> Any:
        if not _is_recomputed(n):
            return super().run_node(n)
        with switched(self.forwards):
            return super().run_node(n)


def _is_recomputed(node: fx.Node) -> bool:
    return node.op == "call_function" and node.meta.get("partitioner_tag") == "is_forward"
