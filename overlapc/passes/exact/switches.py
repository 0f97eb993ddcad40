"""PyTorch's switches that say by which kernels an op computes while it runs, and how precisely.

They may be others in a backward than in its forward (`with tf32(): loss = model(x)`, then
`loss.backward()`). What a backward graph recomputes belongs to the forward: it has to be computed
with the forward's switches, and the gradients with those of now.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import fx

# As torch._C names them, behind `_get_` and `_set_`. They are set in this order: a later one may
# change what an earlier one has set. Each release of PyTorch has most of them.
_NAMES = (
    "cublas_allow_tf32",
    "float32_matmul_precision",
    "cublas_allow_fp16_accumulation",
    "cublas_allow_fp16_reduced_precision_reduction",
    "cublas_allow_bf16_reduced_precision_reduction",
    "cpu_allow_fp16_reduced_precision_reduction",
    "cudnn_allow_tf32",
    "cudnn_benchmark",
    "cudnn_deterministic",
    "cudnn_enabled",
    "mkldnn_deterministic",
    "mkldnn_enabled",
    "nnpack_enabled",
    "blas_preferred_backend",
    "linalg_preferred_backend",
)
_FLAGS = tuple(name for name in _NAMES if hasattr(torch._C, f"_get_{name}"))
# An op's precision follows its backend's, and that the generic one, unless it is set itself.
_PRECISIONS = (
    ("generic", "all"),
    *((backend, op) for backend in ("cuda", "mkldnn") for op in ("all", "matmul", "conv", "rnn")),
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
    try:
        _switch(wanted)
        yield
    finally:
        _switch(before)


def changed(before: Switches) -> str:
    """Which switches are others now, in words; empty if none is."""
    now = switches()
    names = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    return ", ".join(f"{_said(key)} was {before.get(key)} and is {now.get(key)}" for key in names)


def _said(key: Any) -> str:
    return f"fp32_precision of {key[0]} {key[1]}" if isinstance(key, tuple) else str(key)


def _switch(wanted: Switches) -> None:
    """Set what is otherwise. (What is not set explicitly follows what is above it.)"""
    for name in _FLAGS:
        if name in wanted and _now(name) != wanted[name]:
            value = wanted[name]
            getattr(torch._C, f"_set_{name}")(*(value if isinstance(value, tuple) else (value,)))
    for pair in _PRECISIONS:
        if pair in wanted and torch._C._get_fp32_precision_getter(*pair) != wanted[pair]:
            torch._C._set_fp32_precision_setter(*pair, wanted[pair])
    on, warn_only = wanted["deterministic"]
    torch._C._set_deterministic_algorithms(on, warn_only=warn_only)


def _now(name: str) -> Any:
    try:
        return getattr(torch._C, f"_get_{name}")()
    except RuntimeError:  # it cannot be read: it is not as wanted
        return None


class InForwardsWay:
    """Runs a backward graph so that what it recomputes is computed with the switches with which
    `forward`, the code of its forward graph, last ran."""

    def __init__(self) -> None:
        self._forwards = switches()

    def forward(self, run: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
        def called(arguments: list[Any]) -> Any:
            self._forwards = switches()
            return run(arguments)

        called._boxed_call = True  # type: ignore[attr-defined]
        return called

    def backward(
        self, module: fx.GraphModule, run: Callable[[list[Any]], Any]
    ) -> Callable[[list[Any]], Any]:
        """`run`, the code of the backward graph; with other switches it is interpreted, which takes
        longer."""
        if not any(map(_is_recomputed, module.graph.nodes)):
            return run

        def called(arguments: list[Any]) -> Any:
            now = switches()
            if now == self._forwards:
                return run(arguments)
            try:
                return _Interpreter(module, self._forwards, now).boxed_run(arguments)
            finally:
                _switch(now)

        called._boxed_call = True  # type: ignore[attr-defined]
        return called


class _Interpreter(fx.Interpreter):
    def __init__(self, module: fx.GraphModule, forwards: Switches, backwards: Switches) -> None:
        super().__init__(module)
        self.forwards, self.backwards, self.now = forwards, backwards, backwards

    def run_node(self, n: fx.Node) -> Any:
        wanted = self.forwards if _is_recomputed(n) else self.backwards
        if n.op == "call_function" and wanted is not self.now:
            _switch(wanted)
            self.now = wanted
        return super().run_node(n)


def _is_recomputed(node: fx.Node) -> bool:
    """A random op that is recomputed is another one, which takes the generator's state."""
    tagged = node.meta.get("partitioner_tag") == "is_forward" or "rng_state" in str(node.target)
    return node.op == "call_function" and tagged
