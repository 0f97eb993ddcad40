"""A step in pairs is plain accumulation, bit by bit."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from overlapc.core.errors import OptionError, OverlapcError
from overlapc.core.files import save_plan
from overlapc.core.ir import Plan, Problem
from overlapc.core.merge import in_pairs, one_by_one
from overlapc.nn.layers import before, total, whole
from overlapc.profiler.memory import measure_peak
from overlapc.runtime.train_step import TrainStep
from overlapc.solvers.choose.heu import schedules
from overlapc.solvers.order.listing import Style
from overlapc.solvers.order.merging import PACES, merged_order
from overlapc.solvers.order.slices import TURNS, _in_all, slice_order
from overlapc.solvers.order.work import NEVER, backward_work, forward_work, merged_work
from tests.torch.exact import DYNAMO_WARNINGS, Batch, randn
from tests.torch.test_train_step import (
    NOT_HERE,
    QUICK,
    alike,
    chosen,
    differences,
    eagerly,
    loss,
    make,
    solved_by,
    stepped,
)
from tests.torch.zoo import KINDS, MLP, gpt, tokens

pytestmark = DYNAMO_WARNINGS


def force(monkeypatch: pytest.MonkeyPatch, which: int) -> None:
    """Run in pairs, if the graph may, with another choice and order for each number."""

    def solved(
        problem: Problem,
        solver: str,
        alone: Callable[[], Plan],
        microbatches: int,
        lag: int,
        pairs: bool,
        *_: Any,
    ) -> tuple[Plan, ...]:
        if not pairs or microbatches < 2:
            return (alone(),)
        choice = chosen(problem, which)
        own = list(schedules(problem, choice, None))
        ends, middle = in_pairs(problem)
        turns = TURNS[which % len(TURNS)]
        works = forward_work(ends), backward_work(ends, _in_all(choice, 2))
        order = [
            text for work in works for text in slice_order(work, NEVER, Style(2, False), turns)
        ]
        saved = one_by_one(ends, own[0]).saved
        pair = Plan(ends.trace.digest, "forced", saved, tuple(order))
        merged = merged_order(merged_work(middle, choice), NEVER, PACES[which % len(PACES)])
        plans = own[which % len(own)], Plan(problem.trace.digest, "forced", choice.saved, merged)
        return (*(plans if microbatches > 2 else plans[:1]), pair)

    solved_by(solved, monkeypatch)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(kind, marks=() if kind in QUICK else pytest.mark.slow)
        for kind in KINDS
        if kind not in NOT_HERE
    ],
)
def test_gradients_are_those_of_plain_accumulation(name, monkeypatch):
    for which, count in ((0, 4), (4, 2), (9, 3)):
        force(monkeypatch, which)
        with KINDS[name].world(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            batches = alike(name, count)
            model, twin = make(name), make(name)
            step = TrainStep(twin, loss, profile="estimate")
            for _ in range(2):  # the second adds to what the first left
                assert differences(eagerly(model, batches), stepped(step, batches)) == [], which
            if name in ("tied", "frozen, input gradient", "bf16 autocast inside"):
                assert step.report is not None
                assert step.report.pair is not None


@pytest.mark.parametrize("which", [0, 3, 9])
def test_measured_peak_is_the_predicted_one(which, monkeypatch):
    force(monkeypatch, which)
    torch.manual_seed(1)
    model = gpt()()
    batches = [(tokens(2, 8, seed=i), tokens(2, 8, seed=i + 9)) for i in range(4)]
    step = TrainStep(model, profile="estimate")
    step(batches)
    assert step.report.pair is not None
    model.zero_grad()
    peak = measure_peak(lambda: step(batches))
    assert peak == pytest.approx(step.report.peak_bytes, rel=0.01, abs=256)


def test_attention_without_dropout_draws_nothing(monkeypatch):
    force(monkeypatch, 0)
    step = TrainStep(gpt()(), profile="estimate")
    report = step.predict([(tokens(2, 8), tokens(2, 8))] * 2)
    assert report.pair is not None
    attention = [op for op in report.pair.problem.trace.ops if "scaled_dot" in op.signature]
    assert any(op.seeded for op in attention)
    assert not any(op.random for op in attention)


@pytest.mark.parametrize("model", [MLP(2, 0.3), nn.Sequential(MLP(1), nn.BatchNorm1d(16))])
def test_what_has_an_order_is_not_paired(model, monkeypatch):
    force(monkeypatch, 0)
    report = TrainStep(model, loss, profile="estimate").predict([randn(4, 16)] * 3)
    assert report.pair is None


class Grows(nn.Module):
    """What a call reads, the call before it has set; but not "kept" and "named"."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner, self.kind = MLP(1), kind
        self.calls, self.last = 1, torch.zeros(16)
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        out = self.inner(x)
        if self.kind == "number":
            out = out * self.calls
            self.calls += 1
        elif self.kind == "list":
            out = out * (1 + len(self.seen))
            self.seen.append(1)
        elif self.kind == "tensor":
            out = out + self.last
            self.last = out.detach()[0].clone()
        elif self.kind == "there":
            out = out * 2 if hasattr(self, "kept") else out
            self.kept = out.detach()
        elif self.kind == "drawn":
            out = out * random.uniform(1, 2)
        elif self.kind == "kept":
            self.kept = out.detach()
        elif self.kind == "named":
            self.inner.kept = self.calls + self.last  # `kept` is the name of another's attribute
        return out.square().mean()


@pytest.mark.parametrize(
    ("kind", "pairs"),
    [
        ("number", False),
        ("list", False),
        ("tensor", False),
        ("there", False),
        ("drawn", False),
        ("kept", True),
        ("named", True),
    ],
)
def test_calls_that_depend_on_each_other_are_not_paired(kind, pairs, monkeypatch):
    force(monkeypatch, 0)
    torch.manual_seed(2)
    model, twin = Grows(kind), Grows(kind)
    twin.load_state_dict(model.state_dict())
    step = TrainStep(twin, profile="estimate")
    given = [Batch((randn(4, 16, seed=i),)) for i in range(4)]
    for _ in range(3):
        random.seed(1)
        plain = eagerly(model, given, lambda model, x: model(x))
        state, _ = random.getstate(), random.seed(1)
        assert differences(plain, stepped(step, given)) == []
        assert random.getstate() == state
    assert model.calls == twin.calls
    assert model.seen == twin.seen
    assert (step.report.pair is not None) == pairs
    assert step.fallbacks == []


def test_an_error_of_the_second_microbatch_is_raised_by_its_own_call(monkeypatch):
    force(monkeypatch, 0)

    class Limited(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.calls, self.limit = MLP(1), 0, 100

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            if self.calls > self.limit:
                raise ValueError("too many")
            return self.inner(x).square().mean()

    model = Limited()
    step = TrainStep(model, profile="estimate")
    given = [randn(4, 16, seed=i) for i in range(3)]
    for _ in range(3):
        step(given)
    assert model.calls == 9
    model.limit = 10
    with pytest.raises(ValueError, match="too many"):
        step(given)
    assert model.calls == 11 or model.calls == 10


class Gated(nn.Module):
    """Asks for what slices count; of microbatches each is a batch of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = MLP(1)

    def forward(self, x: Tensor) -> Tensor:
        hot = (x[:, :2] > 0).long()
        place = hot.cumsum(0) + before(hot.sum(0))
        kept = ((place * hot).sum(1) <= whole(x.shape[0]) // 2).to(x.dtype)
        return (total(self.inner(x) * kept[:, None]).square()).mean()


def test_microbatches_ask_nothing_of_each_other(monkeypatch):
    force(monkeypatch, 4)
    torch.manual_seed(3)
    model, twin = Gated(), Gated()
    twin.load_state_dict(model.state_dict())
    step = TrainStep(twin, profile="estimate")
    given = [Batch((randn(6, 16, seed=i),)) for i in range(3)]
    plain = eagerly(model, given, lambda model, x: model(x))
    assert differences(plain, stepped(step, given)) == []
    assert step.report.pair is not None


def test_plans_are_taken_again_from_files_and_pairs_may_be_switched_off(tmp_path, monkeypatch):
    force(monkeypatch, 4)
    batches = [Batch((randn(4, 16, seed=i),)) for i in range(4)]
    model, twin = MLP(), MLP()
    twin.load_state_dict(model.state_dict())
    planned = TrainStep(model, loss, profile="estimate").predict([batch.args for batch in batches])
    monkeypatch.undo()
    paths = []
    for report in (planned, planned.merged, planned.pair):
        paths.append(tmp_path / f"{len(paths)}.txt")
        save_plan(paths[-1], report.plan)
    step = TrainStep(twin, loss, profile="estimate", plan=paths)
    assert differences(eagerly(model, batches), stepped(step, batches)) == []
    assert step.report.pair.plan == planned.pair.plan
    assert step.report.merged.plan == planned.merged.plan
    assert "in pairs" in step.explain()
    step = TrainStep(twin, loss, profile="estimate", plan=paths, schedule="merged")
    with pytest.raises(OptionError, match="the last not of this step's pairs"):
        stepped(step, batches)
    with pytest.raises(OptionError, match="schedule='no': expected one of auto, plain, merged"):
        TrainStep(model, loss, schedule="no")


def test_other_shapes_and_counts_are_paired_apart(monkeypatch):
    force(monkeypatch, 0)
    model, twin = MLP(), MLP()
    twin.load_state_dict(model.state_dict())
    step = TrainStep(twin, loss, profile="estimate")
    found: dict[Any, Any] = {}
    for rows, count in ((4, 4), (6, 4), (4, 2), (4, 1), (4, 4)):
        batches = [Batch((randn(rows, 16, seed=i),)) for i in range(count)]
        assert differences(eagerly(model, batches), stepped(step, batches)) == []
        found[rows, count] = step.report.pair is not None
    assert found == {(4, 4): True, (6, 4): True, (4, 2): True, (4, 1): False}


def test_pairs_that_are_asked_for_are_made_or_said_why_not() -> None:
    how: dict[str, Any] = {"profile": "estimate", "solver": "heu", "schedule": "pairs"}
    with KINDS["gpt on a fabric"].world():
        model, twin = gpt()(), gpt()()
        twin.load_state_dict(model.state_dict())
        batches = alike("gpt on a fabric", 3)
        step = TrainStep(twin, loss, **how)
        assert differences(eagerly(model, batches), stepped(step, batches)) == []
        assert step.report is not None
        assert step.report.pair is not None
        for options, count, said in (
            ({}, 1, "found one microbatch"),
            ({"solver": "none"}, 3, 'expected the solver "overlap"'),
            ({"memory_budget": step.report.peak_bytes // 2}, 3, "no step in pairs|memory_budget"),
        ):
            with pytest.raises(OverlapcError, match=said):
                stepped(TrainStep(gpt()(), loss, **how | options), batches[:count])
    with pytest.raises(OptionError, match="draws no random numbers"):
        stepped(TrainStep(make("dropout"), loss, **how), alike("dropout", 2))
    with pytest.raises(OptionError, match="give one of both"):
        TrainStep(MLP(), slices=2, schedule="pairs")
