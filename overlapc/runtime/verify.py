"""`verify` compares a model under its plan with eager in this process: gradients, time and
memory."""

from __future__ import annotations

import copy
import os
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from overlapc.api import optimize
from overlapc.core.errors import OptionError, OverlapcError
from overlapc.profiler.memory import measure_peak
from overlapc.tools.functions import find_function
from overlapc.tools.timing import now_ns

_STEPS = 7


@dataclass(frozen=True)
class Verified:
    """The result of `verify`. Times are medians of alternating steps, in ns, on this rank;
    gradients are compared bit by bit, on all ranks."""

    equal: bool
    different: tuple[str, ...]  # parameters whose gradients are not eager's
    eager_ns: int
    planned_ns: int
    predicted_ns: int
    eager_peak_bytes: int
    planned_peak_bytes: int
    predicted_peak_bytes: int
    fallbacks: tuple[str, ...]  # reasons why graphs run as plain PyTorch
    # the backend of torch.compile's that makes the same gradients, if they differ from eager's
    blame: str = ""


def verify(where: str, **options: Any) -> Verified:
    """Compare a model under its plan with eager. `where` is "module:function", which returns a
    model and its inputs; the model returns the loss. Under torchrun every rank calls this. Options
    are those of `optimize`."""
    make = find_function(where, "examples.gpt.model:tiny")
    joins = "RANK" in os.environ and not dist.is_initialized()
    if joins:
        cuda = torch.cuda.is_available()
        if cuda:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group("nccl" if cuda else "gloo")
    try:
        return _verified(where, make, options)
    finally:
        if joins:
            dist.destroy_process_group()


def _verified(where: str, make: Callable[[], Any], options: Mapping[str, Any]) -> Verified:
    try:
        torch.manual_seed(0)
        model, inputs = make()
    except OverlapcError:
        raise
    except Exception as error:
        raise OptionError(
            f"{where} failed: {error!r}; expected it to return a model and a tuple of inputs"
        ) from error
    if not isinstance(model, nn.Module) or not isinstance(inputs, tuple):
        raise OptionError(
            f"{where} returned a {type(model).__name__} and a {type(inputs).__name__}, expected an "
            "nn.Module and a tuple of inputs"
        )
    planned = optimize(_twin(model, make), **options)

    def step(one: nn.Module) -> None:
        torch.manual_seed(0)
        loss = one(*inputs)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise OptionError(f"the model of {where} gives no loss; expected one number")
        loss.backward()

    gradients, times, peaks = [], [], []
    for one in (model, planned):
        step(one)
        gradients.append({n: p.grad for n, p in one.named_parameters()})  # zero_grad drops `.grad`
        peaks.append(min(_peak(one, step) for _ in range(2)))
    for one in [model, planned] * _STEPS:
        one.zero_grad()
        _settle()
        start = now_ns()
        step(one)
        _settle()
        times.append(now_ns() - start)
    different = _everywhere(
        [n for n, expected in gradients[0].items() if not _same(expected, gradients[1][n])]
    )
    timelines = [report.timeline for report in planned.graphs]
    return Verified(
        not different,
        different,
        round(statistics.median(times[::2])),
        round(statistics.median(times[1::2])),
        sum(timeline.step_ns for timeline in timelines),
        peaks[0],
        peaks[1],
        max((report.peak_bytes for report in planned.graphs), default=0),
        tuple(planned.fallbacks),
        _blame(model, step, gradients[1]) if different else "",
    )


def _blame(model: nn.Module, step: Callable[[nn.Module], None], found: Mapping[str, Any]) -> str:
    """Find the backend of torch.compile's that makes the same gradients, on this rank; all ranks
    run the same steps."""
    for backend in ("eager", "aot_eager"):
        model.zero_grad()
        compiled = torch.compile(model, backend=backend)
        step(compiled)
        if all(_same(p.grad, found[name]) for name, p in model.named_parameters()):
            return f'torch.compile(backend="{backend}") gives what the plan gives'
    return "torch.compile gives something else again"


def _peak(one: nn.Module, step: Callable[[nn.Module], None]) -> int:
    one.zero_grad()
    device = next((p.device for p in one.parameters()), torch.device("cpu"))
    return measure_peak(lambda: step(one), device)


def _twin(model: nn.Module, make: Callable[[], Any]) -> nn.Module:
    """A copy of the model; it is made again by `make` if it holds something that cannot be copied,
    such as a process group."""
    try:
        return copy.deepcopy(model)
    except Exception:
        torch.manual_seed(0)
        twin, _ = make()
        twin.load_state_dict(model.state_dict())
        made: nn.Module = twin.train(model.training)
        return made


def _everywhere(different: list[str]) -> tuple[str, ...]:
    """The names that differ on any rank."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return tuple(different)
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, different)
    return tuple(f"rank {rank}: {name}" for rank, names in enumerate(every) for name in names)


def _same(expected: Tensor | None, found: Tensor | None) -> bool:
    """Compare bit by bit: NaN equals itself, and zeros of different sign differ."""
    if expected is None or found is None:
        return expected is found
    if (expected.dtype, expected.shape) != (found.dtype, found.shape):
        return False
    one, other = (t.detach().reshape(-1).contiguous().view(torch.uint8) for t in (expected, found))
    return torch.equal(one, other)


def _settle() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    if dist.is_initialized():
        dist.barrier()
