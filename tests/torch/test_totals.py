"""What slices add up over the whole batch (`layers.total`) is what the whole batch has."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from overlapc import optimize
from overlapc.core.errors import Infeasible, OptionError
from overlapc.core.merge import TOTAL
from overlapc.nn.layers import before, beside, in_turn, total, whole
from overlapc.runtime.train_step import TrainStep
from tests.torch.exact import DYNAMO_WARNINGS, randn
from tests.torch.test_slices import gradients

pytestmark = DYNAMO_WARNINGS


def plainly(model: nn.Module, x: Tensor, slices: int) -> Tensor:
    """What a step in slices promises: each slice's gradients, added up in the order of slices."""
    each = [copy.deepcopy(model) for _ in range(slices)]
    pairs = [*zip(each, x.chunk(slices), strict=True)]
    losses = beside(lambda pair: pair[0](pair[1]) / slices, pairs)
    sum(losses).backward()
    for parameter, *mine in zip(*(m.parameters() for m in (model, *each)), strict=True):
        for one in mine:
            if one.grad is not None:
                parameter.grad = one.grad if parameter.grad is None else parameter.grad + one.grad
    return sum(loss.detach() for loss in losses)


class Normed(nn.Module):
    """Normalises over the batch, as batch norm does."""

    def __init__(self, width: int, naive: bool = False) -> None:
        super().__init__()
        self.weight, self.naive = nn.Parameter(torch.ones(width)), naive

    def forward(self, x: Tensor) -> Tensor:
        add = (lambda x: x) if self.naive else total
        rows = x.shape[0] if self.naive else whole(x.shape[0])
        mean = add(x.sum(0)) / rows
        variance = add((x - mean).square().sum(0)) / rows
        return (x - mean) * (variance + 1e-5).rsqrt() * self.weight


class Balanced(nn.Module):
    """Experts with an auxiliary loss over how many rows each gets in the whole batch."""

    def __init__(self, width: int, naive: bool = False) -> None:
        super().__init__()
        self.router = nn.Linear(width, 4, bias=False)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.naive, self.auxiliary = naive, torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        add = (lambda x: x) if self.naive else total
        rows = x.shape[0] if self.naive else whole(x.shape[0])
        gates = F.softmax(self.router(x), dim=-1)
        hot = F.one_hot(gates.argmax(1), 4)
        share = add(hot.sum(0)) / rows
        out = sum(e(x) * (hot * gates)[:, i, None] for i, e in enumerate(self.experts))
        return out + 4 * (share * add(gates.sum(0)) / rows).sum()


class Summed(nn.Module):
    """Blocks, and a loss over rows of which not all count."""

    def __init__(self, *blocks: nn.Module, naive: bool = False) -> None:
        super().__init__()
        self.blocks, self.naive = nn.ModuleList(blocks), naive

    def forward(self, x: Tensor) -> Tensor:
        counts = (x[:, 0] > 0).to(x.dtype)
        for block in self.blocks:
            x = block(x)
        losses = x.square().mean(1) * counts
        if self.naive:
            return losses.sum() / (counts.sum() + 1)
        return total(losses.sum()) / (total(counts.sum()) + 1)


BLOCKS = {
    "normed": lambda: Normed(8),
    "balanced": lambda: Balanced(8),
    "linear": lambda: nn.Sequential(nn.Linear(8, 8), nn.GELU()),
}


def assert_whole(names: list[str], slices: int, **options: Any) -> TrainStep:
    """Bitwise plain accumulation over slices, and to rounding the whole batch."""
    torch.manual_seed(1)
    model, x = Summed(*(BLOCKS[name]() for name in names)), randn(24, 8)
    expected = model(x)
    expected.backward()
    uncut = gradients(model)
    model.zero_grad()
    promised = plainly(model, x, slices)
    parts = gradients(model)
    model.zero_grad()
    step = TrainStep(model, slices=slices, profile="estimate", **options)
    (loss,) = step([(x,)])
    mine = gradients(model)
    assert step.fallbacks == []
    assert torch.equal(loss, promised)
    torch.testing.assert_close(loss, expected.detach())
    assert [name for name in mine if not torch.equal(mine[name], parts[name])] == []
    scale = max(float(gradient.abs().max()) for gradient in uncut.values())
    for name, gradient in uncut.items():
        torch.testing.assert_close(mine[name], gradient, rtol=1e-4, atol=1e-5 * scale)
    return step


@pytest.mark.parametrize("slices", [2, 3])
def test_totals_are_the_whole_batchs(slices):
    step = assert_whole(["linear", "normed", "balanced"], slices, solver="heu")
    trace = step.report.problem.trace
    asked = [op for op in trace.ops if op.signature.startswith(TOTAL)]
    assert all(len(op.inputs) == slices for op in asked)
    assert {op.is_forward for op in asked} == {True, False}


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("examples", "solvers"),
    [(3, ["heu", "full"]), pytest.param(30, ["overlap", "heu", "full"], marks=pytest.mark.slow)],
)
def test_any_totals(examples, solvers):
    @settings(max_examples=examples)
    @given(
        names=st.lists(st.sampled_from([*BLOCKS]), min_size=1, max_size=3),
        slices=st.sampled_from([2, 3, 4]),
        solver=st.sampled_from(solvers),
        budget=st.sampled_from([None, 0.3]),
    )
    def holds(names: list[str], slices: int, solver: str, budget: float | None) -> None:
        torch._dynamo.reset()
        try:
            assert_whole(names, slices, solver=solver, memory_budget=budget)
        except Infeasible as infeasible:
            least = infeasible.smallest_bytes
            assert_whole(names, slices, solver=solver, memory_budget=least)

    holds()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Summed(nn.Linear(8, 8), Normed(8, naive=True)), r"blocks.1 \(Normed\) sees"),
        (lambda: Summed(Balanced(8, naive=True)), r"blocks.0 \(Balanced\) sees"),
        (lambda: Summed(nn.Linear(8, 8), naive=True), "the loss is another in slices"),
        (lambda: Summed(Normed(8), Normed(8, naive=True)), r"blocks.1 \(Normed\) sees"),
    ],
)
def test_naive_sums_are_refused_by_name(make, said):
    torch.manual_seed(1)
    with pytest.raises(OptionError, match=rf"slices=2: .*{said}"):
        TrainStep(make(), slices=2, profile="estimate")([(randn(24, 8),)])


def test_forwards_alone_add_up_too():
    torch.manual_seed(1)
    model, x = nn.Sequential(Normed(8), nn.Linear(8, 8), Balanced(8)), randn(24, 8)
    twin = optimize(model, slices=3, profile="estimate")
    with torch.no_grad():
        torch.testing.assert_close(twin(x), model(x))
    assert twin.fallbacks == []


class Again(nn.Module):
    """Asks within what a checkpoint runs again."""

    def __init__(self, ask: str) -> None:
        super().__init__()
        self.inner, self.ask = nn.Linear(16, 16), ask

    def body(self, x: Tensor) -> Tensor:
        counts = (x > 0).sum(0)
        asked = before(counts) if self.ask == "before" else total(counts)
        return self.inner(x) * asked.sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.body, x, use_reentrant=False).square().mean()


@pytest.mark.parametrize("ask", ["before", "total"])
def test_what_a_checkpoint_asks_again_is_refused_by_name(ask):
    model, x = Again(ask), randn(8, 16)
    with pytest.raises(OptionError, match=rf"slices=2: .*{ask}: called again in the backward"):
        TrainStep(model, slices=2, profile="estimate")([x])
    (loss,) = TrainStep(model, profile="estimate")([x])
    assert torch.equal(loss, model(x).detach())


class Counting(nn.Module):
    """Counts its calls before, between and behind totals, in a number and a list, and reads both;
    keeps what a slice, or all of them, gave."""

    def __init__(self, keeps: str = "") -> None:
        super().__init__()
        self.inner, self.norm, self.keeps = nn.Linear(8, 8, bias=False), Normed(8), keeps
        self.calls, self.seen = 0, []

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.norm(self.inner(x)).tanh() * self.calls
        self.seen.append(self.calls)
        share = total(x.square().sum(0)) / whole(x.shape[0])
        self.calls += len(self.seen)
        if self.keeps:
            self.kept = (x if self.keeps == "rows" else share).detach() * 2
        return (x * self.calls).square().mean() + share.sum()


@pytest.mark.parametrize("keeps", ["", "rows"])
def test_what_a_forward_with_totals_counts_it_counts_once(keeps):
    """Slices that wait for each other find the state in which the batch began."""
    torch.manual_seed(1)
    model, x = Counting(keeps), randn(8, 8)
    eager = copy.deepcopy(model)
    step = TrainStep(model, slices=2, profile="estimate", solver="heu")
    for _ in range(2):
        (loss,) = step([x])
        expected = eager(x)
        expected.backward()
        torch.testing.assert_close(loss, expected.detach())
        assert (model.calls, model.seen) == (eager.calls, eager.seen)
        if keeps:
            torch.testing.assert_close(model.kept, eager.kept)
    torch.testing.assert_close(gradients(model), gradients(eager), rtol=1e-4, atol=1e-5)
    assert step.fallbacks == []


def test_a_total_that_the_forward_sets_is_refused_by_name():
    said = r"slices=2: kept, which the forward sets, .* \(of shape \(16,\) for \(8,\)"
    with pytest.raises(OptionError, match=said):
        TrainStep(Counting("total"), slices=2, profile="estimate")([randn(8, 8)])


def test_slices_in_turn_begin_each():
    for begins in (0, 3):
        with in_turn(2) as begin:
            for _ in range(begins):
                begin()
            with pytest.raises(RuntimeError, match=rf"slice {begins} of 2; expected begin"):
                before(torch.ones(2))


def test_uncut_a_total_is_what_it_is_of():
    x = randn(3, requires_grad=True)
    assert torch.equal(total(x), x)
    (gradient,) = torch.autograd.grad(total(x).square().sum(), x)
    assert torch.equal(gradient, 2 * x.detach())
    with in_turn(2) as begin:
        begin()
        with pytest.raises(RuntimeError, match="expected them beside each other"):
            total(x)
    with in_turn(1) as begin:
        begin()
        assert torch.equal(total(x), x)


def test_slices_beside_each_other_wait_for_totals():
    seen: list[str] = []

    def run(k: int) -> Tensor:
        seen.append(f"{k} begins")
        place = before(torch.tensor([k + 1]))
        found = total(torch.tensor([10 * k]))
        seen.append(f"{k} ends")
        assert whole(5) == 15
        return found + place

    assert [int(found) for found in beside(run, range(3))] == [30, 31, 33]
    assert seen == [f"{k} {what}" for what in ("begins", "ends") for k in range(3)]
    with pytest.raises(ZeroDivisionError):
        beside(lambda k: total(torch.ones(1)) / (1 // k), [2, 0, 1])
    with pytest.raises(RuntimeError, match="some slices ask for more totals"):
        beside(lambda k: total(torch.ones(1)) if k else None, range(2))
