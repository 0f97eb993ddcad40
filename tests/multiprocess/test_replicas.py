"""TrainStep of a model in PyTorch's DistributedDataParallel."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from overlapc import optimize
from overlapc.core.errors import OptionError
from overlapc.runtime.train_step import TrainStep
from tests.multiprocess.spawn import run_ranks

pytestmark = pytest.mark.multiprocess


class Net(nn.Module):
    """With running statistics, and in some a layer that only some ranks use, or none."""

    def __init__(self, uses: Callable[[int], bool] | None = None) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 16)
        self.norm = nn.BatchNorm1d(32) if uses is None else nn.Identity()
        self.other = nn.Linear(32, 32) if uses is not None else nn.Identity()
        self.uses = uses is None or uses(dist.get_rank())

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.first(x)).relu()
        return self.last(self.other(hidden) if self.uses else hidden)


class Turns(Net):
    """Uses a layer in the first microbatch of a step alone."""

    def __init__(self) -> None:
        super().__init__(lambda rank: True)

    def forward(self, x: Tensor) -> Tensor:
        self.uses = x.shape[0] == 8
        return super().forward(x)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = DistributedDataParallel(Net())

    def forward(self, x: Tensor) -> Tensor:
        return self.net(self.net(x))


class Around(nn.Module):
    """Goes round the forward of one of two, so that nothing reduces it."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = (DistributedDataParallel(Net()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x) + self.other.module(x)


class Doubled(DistributedDataParallel):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return 2 * super().forward(*args, **kwargs)


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return funcol.wait_tensor(funcol.all_reduce(x, "sum", dist.group.WORLD))

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Summed(nn.Module):
    """All ranks add up what they have: a graph with a collective, whose microbatches merge."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + Sum.apply(layer(x).relu()) / 2
        return x


def mixed(module: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16), DistributedDataParallel(module))


def wrapped(**options: Any) -> Callable[[nn.Module], nn.Module]:
    return lambda module: DistributedDataParallel(module, **options)


# name -> the model, how it is wrapped, and TrainStep's options
CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Any], dict[str, Any]]] = {
    "buffers": (Net, wrapped(), {}),
    "views": (Net, wrapped(gradient_as_bucket_view=True, bucket_cap_mb=0.001), {}),
    "unused by a rank": (
        lambda: Net(lambda rank: rank == 0),
        wrapped(find_unused_parameters=True),
        {},
    ),
    "unused": (lambda: Net(lambda rank: False), wrapped(find_unused_parameters=True), {}),
    "used first": (Turns, wrapped(find_unused_parameters=True), {}),
    "around": (Around, lambda module: module, {}),
    "merged": (Summed, wrapped(), {"schedule": "merged"}),
    "less memory": (Summed, wrapped(), {"memory_budget": 0.8, "schedule": "plain"}),
    "a part": (Net, mixed, {}),
    "slices": (lambda: Net(lambda rank: True), wrapped(), {"slices": 2}),
}
REFUSED = {
    "static": (Net, wrapped(static_graph=True), {}),
    "forward of one's own": (Net, Doubled, {}),
    "several times": (Twice, lambda module: module, {}),
}


def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y)


def made(name: str) -> Any:
    torch.manual_seed(0)
    make, wrap, _ = {**CASES, **REFUSED}[name]
    return wrap(make())


def eager(model: nn.Module, batches: list[tuple[Tensor, Tensor]], slices: int) -> None:
    parts = [
        part for x, y in batches for part in zip(x.chunk(slices), y.chunk(slices), strict=True)
    ]
    ddps = [each for each in model.modules() if isinstance(each, DistributedDataParallel)]
    for i, (x, y) in enumerate(parts):
        quiet = i < len(parts) - 1 and not ddps[0].static_graph
        with ddps[0].no_sync() if quiet else nullcontext():
            (loss(model, x, y) / slices).backward()


def trained(name: str) -> dict[str, Any]:
    options = {"profile": "estimate", "solver": "heu", **{**CASES, **REFUSED}[name][2]}
    slices = options.get("slices", 1)
    mine, twin = made(name), made(name)
    wrong = []
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        step = TrainStep(twin, loss, **options)
        for number in range(4):
            torch.manual_seed(10 * number + dist.get_rank())
            count = (3, 2, 1, 2)[number]
            rows = [8] * (count - 1) + [4 if name == "used first" else 8]
            batches = [(torch.randn(n, 16), torch.randn(n, 16)) for n in rows]
            alone = number == 3 and "static" not in name  # gradients of several steps add up
            for model, run in ((mine, None), (twin, step)):
                ddp = next(m for m in model.modules() if isinstance(m, DistributedDataParallel))
                with ddp.no_sync() if alone else nullcontext():
                    if run is None:
                        eager(model, batches, slices)
                    else:
                        run(batches)
            one, other = dict(mine.named_parameters()), dict(twin.named_parameters())
            wrong += [
                f"step {number}: gradient of {path}"
                for path in one
                if not same(one[path].grad, other[path].grad)
            ]
            one_, other_ = dict(mine.named_buffers()), dict(twin.named_buffers())
            wrong += [f"step {number}: {p}" for p in one_ if not same(one_[p], other_[p])]
            mine.zero_grad()
            twin.zero_grad()
    return {
        "wrong": wrong,
        "unchanged": step.fallbacks,
        "lag": step.report.lag if step.report else 0,
        "told": [str(each.message) for each in told if "overlapc" in str(each.message)],
        "forward": [p for p, m in twin.named_modules() if "forward" in vars(m)],
    }


def same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)


def on_rank(rank: int, ranks: int, names: list[str]) -> dict[str, Any]:
    dist.init_process_group("gloo")
    torch.manual_seed(rank)
    found = {}
    for name in names:
        found[name] = trained(name)
        dist.barrier()
    dist.destroy_process_group()
    return found


def test_gradients_are_reduced_once_as_in_eager() -> None:
    for found in run_ranks(on_rank, 2, list(CASES), timeout_s=100):
        for name, one in found.items():
            assert one["wrong"] == [], name
            assert (one["unchanged"], one["told"], one["forward"]) == ([], [], []), name
        assert found["merged"]["lag"] == 1


def test_what_works_in_its_forward_runs_plain() -> None:
    for found in run_ranks(on_rank, 2, list(REFUSED)):
        for name, one in found.items():
            assert one["wrong"] == [], name
            assert name in one["unchanged"][0]


def refused_on_rank(rank: int, ranks: int) -> str:
    dist.init_process_group("gloo")
    with pytest.raises(OptionError) as caught:
        optimize(DistributedDataParallel(Net()))
    dist.destroy_process_group()
    return str(caught.value)


def test_optimize_is_for_the_module_inside() -> None:
    for said in run_ranks(refused_on_rank, 2):
        assert "DistributedDataParallel(overlapc.optimize(model))" in said
