"""Within `as_eager` AOTAutograd traces the ops that eager runs.

For some ops PyTorch traces other kernels than eager runs, and results differ in the last bits.
Within the context,

- eager's own kernels are traced where PyTorch has Python decompositions for them (`_KERNELS`);
- singular values and eigenvalues that need no gradient are computed without vectors;
- ops that change a tensor in place keep its strides (`overlapc.passes.exact.functional`);
- results have the strides of real ones (`overlapc.passes.exact.layouts`);
- autocast casts a parameter once in its region, as its cache does in eager;
- the backward is traced outside of autocast, where PyTorch's documentation wants it called.

The context changes PyTorch's tables, which belong to the process. The first thread to enter changes
them, the last to leave restores them.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch._dynamo.variables import TorchInGraphFunctionVariable
from torch._functorch import config as functorch_config
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from overlapc.passes.exact.functional import twins_traced
from overlapc.passes.exact.layouts import Strides, is_under_fakes, real_strides
from overlapc.tools.shared_changes import Shared

aten = torch.ops.aten

# Ops for which eager has kernels, but a trace uses the decompositions of torch/_decomp. Batch
# norm's decomposition stays, because it shows the change of the running statistics; cuDNN's batch
# norm is another kernel, which has a twin that shows it.
# fmt: off
_KERNELS = (
    "dropout", "gru", "lstm", "rnn_tanh", "rnn_relu", "hardshrink", "softshrink",
    "cudnn_batch_norm",
)
# fmt: on
_LOSSES = ("multi_margin_loss", "multilabel_margin_loss_forward")
_PREFIXES = ("upsample_", "_upsample_")

# Dynamo's settings, so that neither data-dependent sizes nor RNNs end a graph, and `addcmul_` and
# `addcdiv_` are traced unchanged.
CAPTURE = {
    "capture_scalar_outputs": True,
    "capture_dynamic_output_shape_ops": True,
    "allow_rnn": True,
    "enable_dynamo_decompositions": False,
}

# Functions that Dynamo would split into ops that round more often.
_TAKEN_APART = (torch.addcdiv, torch._foreach_lerp_)

_COMPOSITE = DispatchKey.CompositeImplicitAutograd
_KEYS = (_COMPOSITE, DispatchKey.Autograd)
_TURNS_OFF = "disable_autocast_cache"
_AUTOCAST = {"cpu": DispatchKey.AutocastCPU, "cuda": DispatchKey.AutocastCUDA}

_thread = threading.local()  # trace: the trace that this thread makes


@contextlib.contextmanager
def as_eager(inputs: Iterable[Any] = ()) -> Iterator[None]:
    """Make AOTAutograd trace the ops that eager runs on these inputs.

    Fake inputs stand for another machine's, likely a GPU's, where dropout is one op.
    """
    fused = are_fake(inputs)
    trace = _Trace(fused, asks=not (fused or is_under_fakes()))
    for device in _AUTOCAST:
        trace.enter(device)
    outer, _thread.trace = _current(), trace
    try:
        with _changed, _backward_outside_autocast():
            yield
    finally:
        _thread.trace = outer


def are_fake(inputs: Iterable[Any]) -> bool:
    """Is any of the inputs a fake tensor?"""
    tensors = [t for t in inputs if isinstance(t, Tensor)]
    return any(isinstance(t, FakeTensor) or t.is_meta for t in tensors)


@dataclass
class _Trace:
    fused: bool
    casts: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # by autocast
    asks: bool = False  # kernels for the strides of their results
    strides: dict[Any, Strides] = field(default_factory=dict)  # those, by op and inputs
    # For each device: is autocast on, and was that set within a backward?
    regions: dict[str, tuple[bool, bool]] = field(default_factory=dict)

    def enter(self, device: str) -> None:
        self.regions[device] = torch.is_autocast_enabled(device), _in_backward()


def _in_backward() -> bool:
    return torch._C._current_autograd_node() is not None


def _current() -> _Trace | None:
    return getattr(_thread, "trace", None)


def _strides_here() -> dict[Any, Strides] | None:
    """The strides that this thread's trace has found; None if it asks for none."""
    trace = _current()
    return trace.strides if trace is not None and trace.asks else None


@contextlib.contextmanager
def _changes() -> Iterator[None]:
    with (
        _eager_kernels(),
        _replaced(aten.dropout.default, _dropout),
        _values_alone(),
        _casts_once(),
        twins_traced(),
        real_strides(_strides_here),
    ):
        yield


_changed = Shared(_changes)


def _backward_outside_autocast() -> contextlib.AbstractContextManager[Any]:
    if hasattr(functorch_config, "backward_pass_autocast"):
        patched: Any = functorch_config.patch(backward_pass_autocast="off")
        return patched  # type: ignore[no-any-return]
    return contextlib.nullcontext()


@contextlib.contextmanager
def _eager_kernels() -> Iterator[None]:
    """Remove the Python kernels that replace eager's while tracing."""
    taken = []
    for name in dir(aten):
        if name in _KERNELS + _LOSSES or name.startswith(_PREFIXES):
            packet = getattr(aten, name)
            for op in (getattr(packet, overload) for overload in packet.overloads()):
                for key in _KEYS:
                    if key in op.py_kernels:
                        taken.append((op, key, op.py_kernels.pop(key)))
                        op._dispatch_cache.clear()
    try:
        yield
    finally:
        for op, key, kernel in taken:
            op.py_kernels[key] = kernel
            op._dispatch_cache.clear()


@contextlib.contextmanager
def _undivided() -> Iterator[None]:
    handlers = TorchInGraphFunctionVariable._get_handlers()
    taken = {function: handlers.pop(function, None) for function in _TAKEN_APART}
    try:
        yield
    finally:
        handlers.update({function: part for function, part in taken.items() if part is not None})


undivided = Shared(_undivided)  # while Dynamo traces


@contextlib.contextmanager
def _replaced(op: OpOverload, kernel: Callable[..., Any]) -> Iterator[None]:
    for key in _KEYS:
        op.py_kernels[key] = kernel
    op._dispatch_cache.clear()
    try:
        yield
    finally:
        for key in _KEYS:
            del op.py_kernels[key]
        op._dispatch_cache.clear()


def _dropout(x: Tensor, p: float, train: bool) -> Tensor:
    trace = _current()
    if train and 0 < p < 1 and (trace is None or trace.fused):
        return aten.native_dropout(x, p, train)[0]  # type: ignore[no-any-return]
    made: Tensor = aten.dropout.default._op_dk(_COMPOSITE, x, p, train)
    return made


@contextlib.contextmanager
def _values_alone() -> Iterator[None]:
    """Compute values alone where no gradient is needed. PyTorch assumes that every tensor of a
    trace needs a gradient and computes vectors, too; the values then differ in their last bits."""
    with contextlib.ExitStack() as stack:
        for op, alone in _VALUES.items():
            stack.enter_context(_replaced(op, functools.partial(_values, op, alone)))
        yield


def _values(op: OpOverload, alone: Callable[..., Tensor], x: Tensor, *args: Any, **kw: Any) -> Any:
    if x.requires_grad and torch.is_grad_enabled():
        return op._op_dk(_COMPOSITE, x, *args, **kw)
    return alone(x, *args, **kw)


_VALUES: dict[OpOverload, Callable[..., Tensor]] = {
    aten.linalg_svdvals.default: lambda x, driver=None: aten._linalg_svd(
        x, False, compute_uv=False, driver=driver
    )[1],
    aten.linalg_eigvalsh.default: lambda x, UPLO="L": aten._linalg_eigh(x, UPLO, False)[0],
    aten.linalg_eigvals.default: aten._linalg_eigvals.default,
}


# --------------------------------------------------------------------------- autocast's cache


@contextlib.contextmanager
def _casts_once() -> Iterator[None]:
    """As in eager, autocast remembers the casts of parameters until its region ends.

    Autocast's own cache does not recognise a trace's tensors as parameters. PyTorch turns the cache
    off while tracing; this restores the user's setting.
    """
    import torch._functorch._aot_autograd.collect_metadata_analysis as metadata_pass
    import torch.fx.experimental.proxy_tensor as graph_pass

    clear: Callable[[], None] = torch.clear_autocast_cache
    enable: Callable[..., None] = torch.set_autocast_enabled

    def enable_here(*args: Any) -> None:
        enable(*args)
        trace = _current()
        if trace is not None:
            trace.enter(args[0] if isinstance(args[0], str) else "cuda")

    def clear_both() -> None:
        trace = _current()
        if trace is not None:
            trace.casts.clear()
        clear()

    torch.clear_autocast_cache, torch.set_autocast_enabled = clear_both, enable_here
    off = {m: getattr(m, _TURNS_OFF) for m in (metadata_pass, graph_pass) if hasattr(m, _TURNS_OFF)}
    for module in off:
        setattr(module, _TURNS_OFF, contextlib.nullcontext)
    try:
        with _replaced(aten.to.dtype, _cast):
            yield
    finally:
        for module, function in off.items():
            setattr(module, _TURNS_OFF, function)
        torch.clear_autocast_cache, torch.set_autocast_enabled = clear, enable


def _cast(x: Tensor, dtype: torch.dtype, *args: Any, **kwargs: Any) -> Tensor:
    trace = _current()
    if trace is None or not _is_cached(trace, x, dtype):
        made: Tensor = aten.to.dtype._op_dk(_COMPOSITE, x, dtype, *args, **kwargs)
        return made
    if id(x) not in trace.casts:
        with torch.set_grad_enabled(torch.is_grad_enabled() or _KEPT_WITH_GRADIENT):
            trace.casts[id(x)] = x, aten.to.dtype._op_dk(_COMPOSITE, x, dtype, *args, **kwargs)
    return trace.casts[id(x)][1]


def _kept_with_gradient() -> bool:
    """Does a cast that autocast made and cached under `no_grad` have a gradient when it is reused?
    Not in older releases."""
    with torch.inference_mode(False), torch.autocast("cpu", torch.bfloat16):
        weight = torch.ones(1, 1, device="cpu", dtype=torch.float32, requires_grad=True)
        with torch.no_grad():
            torch.mm(weight, weight)
        with torch.enable_grad():
            return torch.mm(weight, weight).requires_grad


_KEPT_WITH_GRADIENT = _kept_with_gradient()


def _is_cached(trace: _Trace, x: Tensor, dtype: torch.dtype) -> bool:
    """Does autocast make this cast, and would it cache it in eager? The rule is `cached_cast` in
    aten/src/ATen/autocast_mode.cpp, which runs with autocast's key excluded. The key is also
    excluded outside of autocast, and in a backward unless that enters a region of its own."""
    if not isinstance(x, FunctionalTensor):  # or a number, which ops treat as a tensor
        return False
    key = _AUTOCAST.get(x.device.type)
    if key is None or not torch._C._dispatch_tls_local_exclude_set().has(key):
        return False
    if trace.regions.get(x.device.type) != (True, _in_backward()):
        return False
    if (x.dtype, dtype) != (torch.float32, torch.get_autocast_dtype(x.device.type)):
        return False
    given = torch._from_functional_tensor(x.elem)
    is_parameter = given.requires_grad and given.is_leaf and not given._is_view()
    return is_parameter and x.requires_grad and torch.is_autocast_cache_enabled()
