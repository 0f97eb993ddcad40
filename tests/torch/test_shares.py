"""A budget is one for the step, however many graphs a model is broken into."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import overlapc
from overlapc.core.errors import Infeasible
from overlapc.planning.options import Options
from overlapc.profiler.memory import measure_peak
from tests.torch.exact import DYNAMO_WARNINGS, Batch, differences, train

pytestmark = DYNAMO_WARNINGS

WIDTH, ROWS = 32, 128


class Perceptron(nn.Module):
    def __init__(self, hidden: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Mixer(nn.Module):
    """Makes more than it reads: scores of all rows among each other."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.softmax(x @ self.mix(x).T, -1) @ x


class Broken(nn.Module):
    """Blocks in a row, with graph breaks behind some of them."""

    def __init__(self, blocks: Sequence[nn.Module], breaks: Sequence[int], skip: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.breaks = set(breaks)
        self.skip = skip

    def forward(self, x: Tensor) -> Tensor:
        x = begin = self.blocks[0](x)
        if 0 in self.breaks:
            torch._dynamo.graph_break()
        x = self.blocks[1](x)
        if 1 in self.breaks:
            torch._dynamo.graph_break()
        x = self.blocks[2](x)
        if 2 in self.breaks:
            torch._dynamo.graph_break()
        x = self.blocks[3](x)
        if 3 in self.breaks:
            torch._dynamo.graph_break()
        if self.skip:
            x = x * begin
        return x.square().mean()


def random_model(seed: int) -> Broken:
    draw = random.Random(seed)
    torch.manual_seed(seed)

    def block() -> nn.Module:
        if draw.random() < 0.3:
            return Mixer()
        return Perceptron(draw.choice([16, 64, 200]), draw.choice([0.0, 0.1]))

    breaks = [place for place in range(4) if draw.random() < 0.6] or [1]
    return Broken([block() for _ in range(4)], breaks, draw.random() < 0.5)


def rows(seed: int = 0, count: int = ROWS) -> Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed))


def peak(model: nn.Module, x: Tensor) -> int:
    """Of a step with its graphs compiled: the least of a few, see `measure_peak`."""
    found = []
    for _ in range(3):
        model.zero_grad()
        found.append(measure_peak(lambda: model(x).backward()))
    return min(found)


def exact(make: Callable[[], nn.Module], **options: Any) -> Any:
    """The optimized model, after a few steps that were bit by bit those of the same graphs as
    traced. (Breaks alone change the order in which eager adds up what comes to one tensor.)"""
    torch._dynamo.reset()
    batches = [Batch((rows(i),)) for i in range(3)]
    plain, twin = make(), overlapc.optimize(make(), **options)
    plain.compile(backend="aot_eager")
    assert differences(train(plain, batches), train(twin, batches)) == []
    optimized: Any = twin
    assert optimized.fallbacks == []
    return optimized


def check(seed: int, cache: Path, solver: str = "heu") -> None:
    x = rows()
    whole = exact(lambda: random_model(seed), solver=solver, cache=cache)
    eager, graphs = peak(random_model(seed), x), len(whole.graphs)
    # What passes from graph to graph may be held longer than between eager's ops.
    assert peak(whole, x) <= eager * 1.02 + x.nbytes
    with pytest.raises(Infeasible) as caught:
        exact(lambda: random_model(seed), solver=solver, memory_budget=1, cache=cache)
    least = caught.value.smallest_bytes
    peaks = []
    for budget in (eager, (eager + least) // 2, least):
        if budget < least:
            continue
        twin = exact(lambda: random_model(seed), solver=solver, memory_budget=budget, cache=cache)
        assert len(twin.graphs) == graphs
        peaks.append(peak(twin, x))
        assert peaks[-1] <= budget, (seed, budget, peaks)
    assert all(more >= less for more, less in pairwise(peaks)), peaks


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(21))
def test_many_models_keep_to_the_budget(seed: int, tmp_path: Path) -> None:
    check(seed, tmp_path / "costs", "overlap" if seed % 4 == 0 else "heu")


def four(breaks: Sequence[int], dropout: float = 0.1) -> Broken:
    torch.manual_seed(3)
    return Broken([Perceptron(128, dropout) for _ in range(4)], breaks, False)


def least(make: Callable[[], nn.Module], cache: Path) -> int:
    with pytest.raises(Infeasible) as caught:
        exact(make, solver="heu", memory_budget=1, cache=cache)
    return caught.value.smallest_bytes


def test_graphs_answer_a_fraction_by_a_fraction(tmp_path: Path) -> None:
    cache = tmp_path / "costs"
    with pytest.raises(Infeasible) as caught:
        exact(lambda: four((0, 2)), solver="heu", memory_budget=0.001, cache=cache)
    assert caught.value.fractions is not None
    fits = caught.value.fractions[1]
    twin = exact(lambda: four((0, 2)), solver="heu", memory_budget=fits, cache=cache)
    assert peak(twin, rows()) <= caught.value.smallest_bytes * 1.02


def test_three_graphs_share_what_one_has(tmp_path: Path) -> None:
    """At the same budget a broken model takes no more than a whole one."""
    cache = tmp_path / "costs"
    budget = int(peak(four(()), rows()) * 0.6)
    for breaks in ((), (0, 2)):
        twin = exact(lambda b=breaks: four(b), solver="heu", memory_budget=budget, cache=cache)
        assert len(twin.graphs) == len(breaks) + 1
        assert peak(twin, rows()) <= budget
        assert all(report.timeline.peak_bytes <= budget for report in twin.graphs)
        assert any(report.plan.recomputed for report in twin.graphs)


class LossApart(nn.Module):
    """A graph break before the loss, as a warning that is logged there makes one."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = four(()), nn.Linear(WIDTH, 16)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.body.blocks:
            x = block(x)
        x = self.head(x)
        torch._dynamo.graph_break()
        return F.cross_entropy(x, y)


def loss_apart() -> nn.Module:
    torch.manual_seed(3)
    return LossApart()


@pytest.mark.parametrize("budget", [0.8, 0.6])
def test_a_fraction_is_one_of_the_step(budget: float, tmp_path: Path) -> None:
    """And asks nothing of a small graph behind a large one."""
    torch._dynamo.reset()
    model: Any = overlapc.optimize(
        loss_apart(), solver="heu", memory_budget=budget, cache=tmp_path / "costs"
    )
    x, y = rows(), torch.randint(0, 16, (ROWS,))
    for _ in range(2):
        model(x, y).backward()
    large, small = model.graphs
    assert len(small.problem.trace.ops) < 10
    assert large.plan.recomputed
    assert not small.plan.recomputed


def compilations(model: Any) -> Callable[[], int]:
    """How often graphs of the model were compiled from now on."""
    backend = object.__getattribute__(model, "_overlapc_engine").backend
    inner, counted = backend._compile, []

    def count(*args: Any) -> Any:
        counted.append(args)
        return inner(*args)

    backend._compile = count
    return lambda: len(counted)


def test_a_model_of_one_graph_is_compiled_once() -> None:
    """And one of several too, where the budget is eager's own peak."""
    torch._dynamo.reset()
    for breaks, budget, most in (((), 0.7, 1), ((1,), None, 2), ((1,), 0.7, 4)):
        model: Any = overlapc.optimize(four(breaks), solver="heu", memory_budget=budget)
        counted = compilations(model)
        for i in range(4):
            model(rows(i)).backward()
        assert len(model.graphs) == len(breaks) + 1
        assert len(breaks) + 1 <= counted() <= most


@pytest.mark.slow
def test_other_shapes_and_modes_have_their_own_graphs(tmp_path: Path) -> None:
    """Steps of other graphs keep to the budget beside those that were known before."""
    budget = least(lambda: four((0, 2)), tmp_path / "costs") * 5 // 4
    torch._dynamo.reset()
    plain, twin = four((0, 2)), four((0, 2))
    plain.compile(backend="aot_eager")
    model: Any = overlapc.optimize(
        twin, solver="heu", memory_budget=budget, dynamic=False, cache=tmp_path / "costs"
    )
    batches = [Batch((rows(i, count),)) for i, count in enumerate((ROWS, 96, ROWS, 64, 96))]
    assert differences(train(plain, batches), train(model, batches)) == []
    model.eval()
    model(rows()).backward()
    model.train()
    for count in (ROWS, 96, 64):
        assert peak(model, rows(5, count)) <= budget


def test_autocast_around_the_forward() -> None:
    """A graph is compiled again under the autocast that it was compiled under first."""
    torch._dynamo.reset()
    model: Any = overlapc.optimize(four((1,)), solver="heu", memory_budget=0.6)
    batches = [Batch((rows(i),)) for i in range(3)]
    around = functools.partial(torch.autocast, "cpu", torch.bfloat16)
    expected = train(four((1,)), batches, around=around)
    assert differences(expected, train(model, batches, around=around)) == []
    assert any(report.plan.recomputed for report in model.graphs)


def test_a_model_called_twice_before_its_backward() -> None:
    torch._dynamo.reset()
    found = []
    for make in (lambda: four((1,), 0.0), None):
        model = (
            overlapc.optimize(four((1,), 0.0), solver="heu", memory_budget=0.6)
            if make is None
            else make()
        )
        if make is not None:
            model.compile(backend="aot_eager")
        for _ in range(3):
            model.zero_grad()
            (model(rows(1)) + model(rows(2))).backward()
            model(rows(3)).backward()
        found.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


class Looped(nn.Module):
    """A break in the middle of a loop: Dynamo gives up on the loop and compiles what it calls."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(Perceptron(128, 0.1) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            torch._dynamo.graph_break()
        return x.square().mean()


def test_one_graph_that_runs_several_times(tmp_path: Path) -> None:
    cache = tmp_path / "costs"
    smallest = least(Looped, cache)
    for budget in (smallest, smallest * 5 // 4):
        twin = exact(Looped, solver="heu", memory_budget=budget, cache=cache)
        assert peak(twin, rows()) <= budget


def test_a_backend_that_knows_of_no_step_says_so() -> None:
    torch._dynamo.reset()
    backend = overlapc.runtime.backend.Backend(Options(memory_budget=0.9, solver="heu"))
    with pytest.warns(RuntimeWarning, match="each may take the whole memory_budget"):
        torch.compile(four((1,)), backend=backend)(rows()).backward()
