"""How benchmarks measure a step on several ranks: times, peaks, waits, agreed among the ranks."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from examples.common import measure_exposed
from overlapc.emulate import now_ns
from overlapc.profiler.memory import measure_peak

Run = Callable[[], object]
REPEATS = 3


def twin(model: nn.Module) -> nn.Module:
    """A module of its own around the same parameters, so that only one copy of them exists."""
    return copy.deepcopy(model, {id(p): p for p in model.parameters()})


def gradients(model: nn.Module) -> list[Tensor]:
    """Copies of the gradients that the model has."""
    return [p.grad.clone() for p in model.parameters()]


def slowest(value: float) -> float:
    """The greatest of the ranks' values, on every rank."""
    agreed = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
    return agreed.item()


def timed_ms(run: Run) -> float:
    """Milliseconds of a run that all ranks begin together, on the slowest rank."""
    dist.barrier()
    start_ns = now_ns()
    run()
    return slowest(now_ns() - start_ns) / 1e6


def least_peak(model: nn.Module, run: Run, sums: bool = False) -> int:
    """The least of a few measured peaks, on the rank that has most: one measurement can be too
    high by a buffer, never too low. `sums`: with sums of gradients there from the start, which
    count, as in plans of several pieces; else the run makes them."""

    def once() -> int:
        model.zero_grad()
        made = list(model.parameters()) if sums else []
        for parameter in made:
            parameter.grad = torch.zeros_like(parameter)
        return measure_peak(run) + sum(parameter.nbytes for parameter in made)

    return int(slowest(min(once() for _ in range(REPEATS))))


def exposed_ms(run: Run) -> list[float]:
    """By rank, milliseconds in waits for collectives: the median of a few runs."""
    mine = torch.zeros(dist.get_world_size(), dtype=torch.float64)
    mine[dist.get_rank()] = statistics.median(measure_exposed(run) for _ in range(REPEATS)) * 1e3
    dist.all_reduce(mine)
    return mine.tolist()
