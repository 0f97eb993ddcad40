"""`standing_in` replaces parts of Megatron while a model chunk is traced, and restores them
afterwards.

A graph must not share scratch memory between layers, remember tensors between calls, recompute by
itself, or write to a log. Each random op's node notes its random stream; `in_streams` makes the
emitted op draw from that stream.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx import traceback

from overlapc.core.errors import CaptureError
from overlapc.megatron import experts, fused, packed, recompute
from overlapc.megatron.changes import DATA, restored
from overlapc.megatron.outside import modules_of
from overlapc.passes.emit.parts import Part
from overlapc.passes.trace import Captured
from overlapc.state.snapshot import answers, is_a

STREAM = "overlapc_stream"  # key of a node's note of its random stream
Change = tuple[Any, str, Any]  # owner, attribute, value while tracing
_WRITERS = {"save_loss_to_tracker", "save_metrics_to_tracker"}  # static methods of helper classes


@dataclass
class Taps:
    """Tensors that the model writes to a log. They become results of the graph, and are written to
    the log when the graph runs."""

    values: list[Tensor] = field(default_factory=list)  # those of the current trace
    names: list[str] = field(default_factory=list)  # what they are logged as
    notes: list[tuple[int, Callable[..., None]]] = field(default_factory=list)

    def clear(self) -> None:
        self.values.clear()
        self.names.clear()
        self.notes.clear()

    def replay(self, values: list[Tensor]) -> None:
        for count, write in self.notes:
            write(*values[:count])
            values = values[count:]


@contextlib.contextmanager
def standing_in(model: nn.Module, taps: Taps) -> Iterator[None]:
    """Make Megatron traceable within the block."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(restored(model))
        stack.enter_context(_swapped(FunctionalTensor, "data", DATA))
        for make in (_memory, _recompute, _linear, _caches, _scatter, _packed):
            for owner, name, new in make():
                stack.enter_context(_swapped(owner, name, new))
        stack.enter_context(fused.one_op_each(model, modules_of(model)))
        logs, numbers = _logs(taps, modules_of(model)), _numbers(model)
        stood_in = itertools.chain(logs, numbers, _helpers(model), experts.stand_ins(model))
        for owner, name, new in stood_in:
            stack.enter_context(_swapped(owner, name, new))
        for scaler in scalers():
            stack.callback(
                setattr, scaler, "main_loss_backward_scale", scaler.main_loss_backward_scale
            )
        yield


def scalers() -> list[Any]:
    """The autograd Functions whose backward multiplies by their `main_loss_backward_scale`: for the
    losses that experts, multi-token prediction and sparse attention add, and for a user's own. (All
    ranks list them alike.)"""
    found, left = {}, [torch.autograd.Function]
    while left:
        kind = left.pop()
        left += kind.__subclasses__()
        if "main_loss_backward_scale" in vars(kind):
            found[f"{kind.__module__}.{kind.__qualname__}"] = kind
    return [found[name] for name in sorted(found)]


def in_streams(captured: Captured, forward: Part) -> None:
    """Make the random ops of a forward draw from the streams in which they were traced."""
    stream_of = {
        node.name: node.meta.get("custom", {}).get(STREAM) for node in captured.joint.graph.nodes
    }
    for node, name in forward.names.items():
        stream = stream_of.get(name)
        if node.op == "call_function" and stream and captured.trace.op[name].random:
            node.args = (stream, node.target, *node.args)
            node.target = draw_in
    forward.module.recompile()


def draw_in(stream: str, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    with get_cuda_rng_tracker().fork(stream):
        return target(*args, **kwargs)


# --------------------------------------------------------------------------- stand-ins


def _memory() -> Iterator[Change]:
    utils = import_module("megatron.core.utils")

    def fresh(self: Any, shape: Any, dtype: Any, name: str, *_: Any, **__: Any) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=torch.cuda.current_device())

    yield utils.GlobalMemoryBuffer, "get_tensor", fresh

    def viewless(inp: Tensor, requires_grad: bool, keep_graph: bool) -> Tensor:
        """Replaces Megatron's function that hides a view by `.data =` on an empty tensor. As with
        Megatron's, autograd sums the gradients of the result before it adds them to other gradients
        of the view."""
        return inp if inp._base is None else inp.view_as(inp)

    yield from _everywhere(utils, "make_viewless_tensor", viewless)
    random = import_module("megatron.core.tensor_parallel.random")

    @contextlib.contextmanager
    def fork(
        self: Any, name: str = random._MODEL_PARALLEL_RNG_TRACKER_NAME, *_: Any, **__: Any
    ) -> Iterator[None]:
        with traceback.annotate({STREAM: name}):
            yield

    for kind in {random.CudaRNGStatesTracker, type(random.get_cuda_rng_tracker())}:
        yield kind, "fork", fork


def _recompute() -> Iterator[Change]:
    """Switch off Megatron's own recompute: constructors have read the flags, so functions are
    replaced."""
    for module, name, new in recompute.stand_ins():
        yield from _everywhere(module, name, new)


def _packed() -> Iterator[Change]:
    for module, name, new in packed.stand_ins():
        yield from _everywhere(module, name, new)


def _linear() -> Iterator[Change]:
    """Trace a weight gradient as a product; `gradients.fuse` then adds it in the same kernel."""
    layers = import_module("megatron.core.tensor_parallel.layers")
    linear = layers.LinearWithGradAccumulationAndAsyncCommunication
    real = linear.forward
    place = list(inspect.signature(real).parameters).index("gradient_accumulation_fusion")

    def forward(*args: Any) -> Any:
        return real(*args[:place], False, *args[place + 1 :])

    yield linear, "forward", staticmethod(forward)


def _scatter() -> Iterator[Change]:
    mappings = import_module("megatron.core.tensor_parallel.mappings")
    real = mappings._reduce_scatter_along_first_dim
    signature = inspect.signature(real)

    def scatter(*args: Any, **kwargs: Any) -> Tensor:
        given = signature.bind(*args, **kwargs).arguments
        whole, group, rows = given["input_"], given["group"], given.get("input_split_sizes")
        if rows is not None and group.size() > 1:
            return _sum_of_two(whole, list(rows), group)
        out: Tensor = real(*args, **kwargs)
        return out

    yield from _everywhere(mappings, real.__name__, scatter)


def _sum_of_two(whole: Tensor, rows: Sequence[Any], group: Any) -> Tensor:
    """Reduce and scatter uneven parts by an exchange and a sum. Megatron takes the size of a rank's
    part out of a list, by the rank's number; here all ranks' graphs read the same numbers."""
    if group.size() > 2:
        raise CaptureError(
            f"it reduces and scatters uneven parts of {group.size()} ranks, expected two: in "
            "which order Megatron sums more is unknown; pass --expert-tensor-parallel-size 2 or 1"
        )
    counts = torch.stack([torch.scalar_tensor(each, dtype=torch.int64) for each in rows])
    own: Any = counts[group.rank()].item()
    parts = whole.new_empty(2 * own, *whole.shape[1:])
    dist.all_to_all_single(parts, whole.contiguous(), [own, own], rows, group=group)
    one, other = parts.view(2, own, *whole.shape[1:]).unbind()
    return one + other


def _caches() -> Iterator[Change]:
    """Keep traced tensors out of the caches of functions, and those that these hold out of a
    trace."""
    for module in _megatron():
        owners = [module, *(c for c in vars(module).values() if is_a(c, type) and _own(c))]
        for owner in owners:
            for name, value in list(vars(owner).items()):
                if answers(value, "cache_clear") and _own(value):
                    yield owner, name, value.__wrapped__


def _logs(taps: Taps, modules: Sequence[ModuleType]) -> Iterator[Change]:
    """Replace the writers of losses: for experts a function up to 0.17 and a method from 0.18 on;
    for multi-token prediction and sparse attention methods of their helpers."""
    moe = import_module("megatron.core.transformer.moe.moe_utils")
    logging = _module("megatron.core.transformer.moe.moe_logging")
    if logging is not None:
        tracker = logging.MoEMetricsTracker
        yield tracker, "record", _noted(tracker.record, taps)
    elif hasattr(moe, "save_to_aux_losses_tracker"):
        noted = _noted(moe.save_to_aux_losses_tracker, taps)
        yield from _everywhere(moe, "save_to_aux_losses_tracker", noted, modules)
    helpers = {kind for module in _megatron() for kind in vars(module).values() if _logs_loss(kind)}
    for helper in helpers:
        for name in _WRITERS.intersection(vars(helper)):
            yield helper, name, staticmethod(_noted(getattr(helper, name), taps))


def _logs_loss(kind: Any) -> bool:
    return is_a(kind, type) and _own(kind) and not _WRITERS.isdisjoint(vars(kind))


def _noted(write: Callable[..., Any], taps: Taps) -> Callable[..., None]:
    """Make a writer that logs its tensors when the graph runs."""
    signature = inspect.signature(write)

    def note(*args: Any, **kwargs: Any) -> None:
        given = signature.bind(*args, **kwargs).arguments
        names = [name for name, value in given.items() if isinstance(value, Tensor)]
        if given.get("layer_number") is None:
            return
        logged = f"{given.get('name', 'loss')} of layer {given['layer_number']}"
        taps.values += [given.pop(name).detach() for name in names]
        taps.names += [logged for _ in names]
        kinds = signature.parameters

        def later(*values: Tensor) -> None:
            found = {**given, **dict(zip(names, values, strict=True))}
            ordered = {name: found[name] for name in kinds if name in found}
            bound = inspect.BoundArguments(signature, ordered)
            write(*bound.args, **bound.kwargs)

        taps.notes.append((len(names), later))

    return note


class _Listed(list[Any]):
    """Data-dependent sizes, where Megatron expects a numpy array."""

    def tolist(self) -> list[Any]:
        return list(self)


def _numbers(model: nn.Module) -> Iterator[Change]:
    dispatcher = _module("megatron.core.transformer.moe.token_dispatcher")
    if dispatcher is not None:

        def moved(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
            if isinstance(tensor, Tensor) and tensor.dim() == 0:
                return tensor.item()  # from 0.19 on it ends a slice
            listed = as_numpy and isinstance(tensor, Tensor)
            return _Listed(tensor.tolist()) if listed else tensor

        yield dispatcher, "maybe_move_tensor_to_cpu", moved
    for module in model.modules():  # constant tensors that `forward` reads as numbers
        if "current_microbatch" in vars(module):
            yield module, "current_microbatch", _Unread()
        one = getattr(module, "token_dispatcher", None)
        fused = getattr(getattr(one, "config", None), "moe_permute_fusion", False)
        for name in (
            () if fused else ("sort_input_by_local_experts", "restore_output_by_local_experts")
        ):
            if isinstance(value := getattr(one, name, None), Tensor):
                yield one, name, _Listed(value.tolist())
        if vars(module).get("is_first_microbatch"):  # Transformer Engine's clears it; of FP8 alone
            yield module, "is_first_microbatch", False


def _helpers(model: nn.Module) -> Iterator[Change]:
    """Megatron's objects that hold parameters of the module that holds them (a Mamba mixer's, for
    context parallelism): they read the module's own, which a trace replaces."""
    for module in model.modules():
        own = {id(each): name for name, each in module.named_parameters(recurse=False)}
        for name, value in list(vars(module).items()) if own else ():
            if _own(type(value)) and not is_a(value, nn.Module) and answers(value, "__dict__"):
                held = {k: own[id(v)] for k, v in vars(value).items() if id(v) in own}
                if held:
                    yield module, name, _reading(value, module, held)


def _reading(value: Any, module: nn.Module, held: Mapping[str, str]) -> Any:
    """The like of an object that reads some of its attributes from a module."""
    read = {k: property(partial(_attribute, module, name)) for k, name in held.items()}
    made: Any = object.__new__(type(type(value).__name__, (type(value),), read))
    vars(made).update({k: v for k, v in vars(value).items() if k not in held})
    return made


def _attribute(module: nn.Module, name: str, _: Any) -> Any:
    return getattr(module, name)


class _Unread:
    """In the place of a number that Megatron sets for each microbatch: no graph depends on it."""


def _refuse(*_: Any) -> Any:
    raise CaptureError(
        "forward reads current_microbatch, which is another for each microbatch; expected a "
        "tensor: an argument, or an attribute"
    )


_OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
_READS = (
    *("int", "index", "float", "bool", "hash", "str", "format", "neg"),
    *("eq", "ne", "lt", "le", "gt", "ge"),
)
for _read in (*_READS, *_OPERATORS, *(f"r{_operator}" for _operator in _OPERATORS)):
    setattr(_Unread, f"__{_read}__", _refuse)


# --------------------------------------------------------------------------- how they are put


@contextlib.contextmanager
def _swapped(owner: Any, name: str, new: Any) -> Iterator[None]:
    own = name in vars(owner)
    old = inspect.getattr_static(owner, name)
    setattr(owner, name, new)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, old)
        else:
            delattr(owner, name)


def _everywhere(
    module: ModuleType, name: str, new: Any, modules: Sequence[ModuleType] = ()
) -> Iterator[Change]:
    """Changes that replace a function or class in all of Megatron's modules that have it, or in
    these."""
    real = getattr(module, name, None)
    if real is None:
        return
    for other in modules or _megatron():
        for known, value in list(vars(other).items()):
            if value is real:
                yield other, known, new


def _own(value: Any) -> bool:
    return str(getattr(value, "__module__", "")).partition(".")[0] == "megatron"


def _megatron() -> list[ModuleType]:
    return [m for name, m in list(sys.modules.items()) if name.partition(".")[0] == "megatron"]


def _module(name: str) -> ModuleType | None:
    """Import a module that some versions of Megatron lack."""
    try:
        return import_module(name)
    except ImportError:
        return None
