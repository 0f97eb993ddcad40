"""`Raw` turns calls of `torch.distributed` into functional collectives while a model is traced.

A raw collective writes into the tensors it is given; a traced graph changes nothing in place. So
`dist.all_reduce(x, async_op=True)` becomes a start of `_c10d_functional`. The `wait()` of the work
that it returns becomes the collective's wait and a write into `x`. A synchronous call waits at
once.

This happens below autograd: as in eager, autograd does not see a raw collective, and a model that
wants a gradient of it uses an `autograd.Function`.

`Raw` refuses what depends on timing in eager: a read of a tensor that a collective in flight
writes, a write to a tensor that it reads, and a collective that is never waited for.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.fx.traceback
from torch import Tensor, fx
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.distributed import distributed_c10d as c10d
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves

from overlapc.core.errors import CaptureError
from overlapc.passes.capture.model_files import is_models
from overlapc.passes.storages import may_overlap
from overlapc.tools.shared_changes import Shared, replaced

functional = torch.ops._c10d_functional


@dataclass(eq=False)
class StartedCollective:
    """A collective that was started. Its result has the new values of its targets, in order."""

    name: str
    line: str
    result: Tensor
    targets: Sequence[Tensor]
    sources: Sequence[Tensor] = ()  # read until it ends

    def land(self) -> None:
        """Wait for the collective and write its result into its targets."""
        with torch._C._AutoDispatchBelowAutograd():
            got = functional.wait_tensor(self.result)
            parts = [got]
            if len(self.targets) > 1:
                parts = list(got.reshape(-1).split([t.numel() for t in self.targets]))
            for target, part in zip(self.targets, parts, strict=True):
                _write(target, _shaped(part, target.shape), len(parts) == 1)


class AsyncWork:
    """What an asynchronous call returns in place of `torch.distributed.Work`."""

    def __init__(self, raw: Raw, flight: StartedCollective) -> None:
        self._raw = raw
        self._flight = flight

    def wait(self, timeout: object = None) -> bool:
        self._raw.land(self._flight)
        return True

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise CaptureError(
            f"the work of dist.{self._flight.name} is asked for {name}, expected wait() alone: a "
            "graph does not know how far a collective is",
            _line(),
        )


class Raw(TorchDispatchMode):
    """The mode under which raw collectives are traced; `begin` is called before each trace."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self._flights: list[StartedCollective] = []

    def __enter__(self) -> Raw:
        _asks.__enter__()
        super().__enter__()
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        super().__exit__(kind, error, traceback)
        _asks.__exit__()

    def begin(self, *_: object) -> None:
        self._flights.clear()

    def end(self) -> None:
        for flight in self._flights:
            raise CaptureError(
                f"dist.{flight.name} is never waited for, expected work.wait(): without it eager "
                "returns what happens to be there",
                flight.line,
            )

    def call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AsyncWork | None:
        """Trace a call of a function of `torch.distributed`."""
        waits = not kwargs.pop("async_op", False)
        if name not in STARTS:
            raise _refused(f"dist.{name}")
        group = kwargs.pop("group", None) or dist.group.WORLD
        if c10d._rank_not_in_group(group):
            c10d._warn_not_in_group(name)
            return None
        if group in c10d._world.pg_coalesce_state:
            c10d._world.pg_coalesce_state.pop(group)  # the manager itself does not, on an error
            raise _refused(f"dist.{name} within a coalescing manager")
        given = inspect.signature(STARTS[name]).bind(group, *args, **kwargs).arguments
        del given["group"]
        flight = self.start(name, group, given, _line())
        if not waits:
            return AsyncWork(self, flight)
        self.land(flight)
        return None

    def start(
        self, name: str, group: Any, given: Mapping[str, Any], line: str
    ) -> StartedCollective:
        flight = start(name, group, given, line)
        self._flights.append(flight)
        return flight

    def land(self, flight: StartedCollective) -> None:
        if flight in self._flights:  # else it has been waited for
            self._flights.remove(flight)
            flight.land()

    def __torch_dispatch__(
        self, op: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if isinstance(op, torch._ops.HigherOrderOperator):
            return op(*args, **kwargs)
        if op.namespace == "c10d":  # not by a function that asks `_asked`
            raise _refused(str(op))
        if self._flights and not op.is_view:
            self._refuse_races(op, args, kwargs)
        return op(*args, **kwargs)

    def _refuse_races(self, op: Any, args: Any, kwargs: dict[str, Any]) -> None:
        for argument, given in zip(op._schema.arguments, args, strict=False):
            writes = argument.alias_info is not None and argument.alias_info.is_write
            self._refuse_race(op, given, writes)
        for argument in op._schema.arguments:
            if argument.name in kwargs:
                writes = argument.alias_info is not None and argument.alias_info.is_write
                self._refuse_race(op, kwargs[argument.name], writes)

    def _refuse_race(self, op: Any, given: Any, writes: bool) -> None:
        tensors = [t for t in tree_leaves(given) if isinstance(t, Tensor)]
        for flight in self._flights:
            known = [*flight.targets, *(flight.sources if writes else ())]
            if any(may_overlap(tensor, other) for tensor in tensors for other in known):
                raise CaptureError(
                    f"{op} {'writes' if writes else 'reads'} a tensor that dist.{flight.name} "
                    f"({flight.line}) may still be using, expected work.wait() before it",
                    _line(),
                )


# --------------------------------------------------------------------------- collectives

# Each returns a Flight: the result, the targets, and the tensors that it reads until it ends.
_Start = tuple[Any, Sequence[Tensor], Sequence[Tensor]]


def _all_reduce(group: Any, tensor: Tensor, op: Any = dist.ReduceOp.SUM) -> _Start:
    target = _as_it_lies(_real(tensor))
    return functional.all_reduce(target, reduction(op), group.group_name), [target], []


def _broadcast(
    group: Any, tensor: Tensor, src: int | None = None, group_src: int | None = None
) -> _Start:
    root = c10d._canonicalize_group_rank(group, src, group_src)
    target = _as_it_lies(_real(tensor))
    return functional.broadcast(target, root, group.group_name), [target], []


def _all_gather_single(group: Any, output_tensor: Tensor, input_tensor: Tensor) -> _Start:
    source = _real(input_tensor)
    rows = source.contiguous() if source.dim() else source.view(1)
    result = functional.all_gather_into_tensor(rows, group.size(), group.group_name)
    return result, [_real(output_tensor)], [source]


def _all_gather(group: Any, tensor_list: Sequence[Tensor], tensor: Tensor) -> _Start:
    # every rank sends all its rows to every rank
    if not all(_same_shape(one, tensor.shape) for one in tensor_list):
        return _all_to_all(group, tensor_list, [tensor] * group.size())
    result, _, sources = _all_gather_single(group, tensor, tensor)
    return result, [_real(one) for one in tensor_list], sources


def _reduce_scatter_single(
    group: Any, output: Tensor, input: Tensor, op: Any = dist.ReduceOp.SUM
) -> _Start:
    size = group.size()
    rows = input.reshape(-1) if input.dim() != output.dim() else input.contiguous()
    result = functional.reduce_scatter_tensor(rows, reduction(op), size, group.group_name)
    return result, [output], [input]


def _reduce_scatter(
    group: Any, output: Tensor, input_list: Sequence[Tensor], op: Any = dist.ReduceOp.SUM
) -> _Start:
    if not all(_same_shape(one, output.shape) for one in input_list):
        raise _refused("dist.reduce_scatter of tensors of several shapes")
    whole = torch.cat([one.reshape(-1) for one in input_list])
    result = functional.reduce_scatter_tensor(whole, reduction(op), group.size(), group.group_name)
    return result, [output], input_list


def _all_to_all_single(
    group: Any,
    output: Tensor,
    input: Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
) -> _Start:
    target, source, size = _real(output), _real(input), group.size()
    leaves = _splits(input_split_sizes, source.shape[0], size)
    arrives = _splits(output_split_sizes, target.shape[0], size)
    result = functional.all_to_all_single(source.contiguous(), arrives, leaves, group.group_name)
    return result, [target], [source]


def _splits(given: Sequence[Any] | None, rows: Any, size: int) -> list[Any]:
    """How many rows go to, or come from, each rank; callers may pass a numpy array."""
    if given is None or len(given) == 0:
        return [rows // size] * size
    return given.tolist() if hasattr(given, "tolist") else list(given)


def _all_to_all(
    group: Any, output_tensor_list: Sequence[Tensor], input_tensor_list: Sequence[Tensor]
) -> _Start:
    targets = [_real(one) for one in output_tensor_list]
    sources = [_real(one) for one in input_tensor_list]
    leaves, arrives = [one.numel() for one in sources], [one.numel() for one in targets]
    whole = torch.cat([one.reshape(-1) for one in sources])
    result = functional.all_to_all_single(whole, arrives, leaves, group.group_name)
    return result, targets, sources


STARTS: dict[str, Callable[..., _Start]] = {
    "all_reduce": _all_reduce,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "all_gather_single": _all_gather_single,
    "all_gather_into_tensor": _all_gather_single,  # its name before torch 2.13
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_single": _reduce_scatter_single,
    "reduce_scatter_tensor": _reduce_scatter_single,  # its name before torch 2.13
    "all_to_all_single": _all_to_all_single,
    "all_to_all": _all_to_all,
}


def start(name: str, group: Any, given: Mapping[str, Any], line: str) -> StartedCollective:
    """Start a collective of `torch.distributed` with these arguments."""
    with torch._C._AutoDispatchBelowAutograd():
        return StartedCollective(name, line, *STARTS[name](group, **given))


_REDUCTIONS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")


def reduction(op: Any) -> str:
    """The functional collectives' name of a reduction."""
    if isinstance(op, str):
        return op
    for name in _REDUCTIONS:
        if op == getattr(dist.ReduceOp, name):
            return name.lower()
    raise _refused(f"a reduction by {op}")


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _as_it_lies(tensor: Tensor) -> Tensor:
    """A view with the axes in the order of memory, since the place of an element in memory decides
    in which order the ranks' values are added."""
    axes = sorted(range(tensor.dim()), key=lambda axis: -tensor.stride(axis))
    ordered = tensor.permute(axes)
    return ordered if ordered.is_contiguous() and not tensor.is_contiguous() else tensor


def _shaped(value: Tensor, shape: Sequence[Any]) -> Tensor:
    return value if _same_shape(value, shape) else value.view(shape)


def _same_shape(tensor: Tensor, shape: Sequence[Any]) -> bool:
    """Is it known? (Sizes that depend on data are not.)"""
    return tensor.dim() == len(shape) and all(
        statically_known_true(one == other) for one, other in zip(tensor.shape, shape, strict=True)
    )


def _write(target: Tensor, value: Tensor, whole: bool) -> None:
    """Write the value into the target: the tensor itself, if it is the `whole` of an allocation,
    else a copy, whose address is aligned as in eager."""
    if whole and isinstance(target, FunctionalTensor) and target.is_contiguous():
        assert isinstance(value, FunctionalTensor)
        target.replace_(FunctionalTensor.from_functional(value))
        target.commit_update()
        target.sync()
        return
    # Autograd's version counter stays: eager's collectives do not change it.
    with torch.autograd._unsafe_preserve_version_counter(target):
        target.copy_(value)


# --------------------------------------------------------------------------- while it is on


@contextlib.contextmanager
def _asking() -> Iterator[None]:
    """Intercept the functions of `torch.distributed`, by whatever name a model imported them: they
    ask `has_torch_function` whether something else takes the call. Before torch 2.13 some do not
    ask; they are replaced within the wrapper that logs their errors."""
    has, handle = c10d.has_torch_function, c10d.handle_torch_function

    def asked(relevant: Any) -> bool:
        return current() is not None or has(relevant)

    def taken(function: Any, relevant: Any, *args: Any, **kwargs: Any) -> Any:
        raw = current()
        if raw is None:
            return handle(function, relevant, *args, **kwargs)
        return raw.call(function.__name__, args, kwargs)

    with contextlib.ExitStack() as stack:
        stack.enter_context(replaced(c10d, "has_torch_function", asked))
        stack.enter_context(replaced(c10d, "handle_torch_function", taken))
        for name, cell in _silent():
            stack.callback(setattr, cell, "cell_contents", cell.cell_contents)
            cell.cell_contents = _asking_first(name, cell.cell_contents)
        yield


def _silent() -> Iterator[tuple[str, Any]]:
    """The functions that do not ask, and the cell in which each one's wrapper has it."""
    for name in (*STARTS, "reduce", "gather", "scatter", "send", "recv"):
        wrapper: Any = getattr(c10d, name, None)
        plain = getattr(wrapper, "__wrapped__", None)
        if plain is None or "has_torch_function" in plain.__code__.co_names:
            continue
        for cell in wrapper.__closure__ or ():
            if cell.cell_contents is plain:
                yield name, cell


def _asking_first(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    def asking(*args: Any, **kwargs: Any) -> Any:
        raw = current()
        return plain(*args, **kwargs) if raw is None else raw.call(name, args, kwargs)

    return asking


_asks = Shared(_asking)


def current() -> Raw | None:
    """The mode of this thread, or, in a thread of autograd's, of the thread that called the
    backward."""
    found = [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, Raw)]
    return found[-1] if found else None


@contextlib.contextmanager
def trace_ended() -> Iterator[None]:
    """Leave the mode for a while, at the end of a trace."""
    raw = current()
    if raw is None:
        yield
        return
    raw.end()
    raw.__exit__(None, None, None)
    try:
        yield
    finally:
        raw.__enter__()


# --------------------------------------------------------------------------- errors


def _refused(what: str) -> CaptureError:
    return CaptureError(f"{what} cannot be captured, expected one of {', '.join(STARTS)}", _line())


def _line() -> str:
    """The line of the user's code that is running, or, in a graph of Dynamo's, the line of its
    node."""
    traced = fx.traceback.get_current_meta().get("stack_trace")
    if traced:
        return [line.strip() for line in traced.splitlines() if 'File "' in line][-1]
    frame = sys._getframe(1)
    while frame.f_back is not None and not is_models(frame.f_code.co_filename):
        frame = frame.f_back
    return f'File "{frame.f_code.co_filename}", line {frame.f_lineno}'
