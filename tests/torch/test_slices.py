"""A batch in slices is plain accumulation over them, bit by bit, and the uncut batch to rounding;
what sees the whole batch is refused by name."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from overlapc.core.check import check
from overlapc.core.errors import Infeasible, InvalidPlan, OptionError
from overlapc.core.ir import Plan, Problem, parse_issue
from overlapc.core.merge import BEFORE
from overlapc.nn.layers import before, in_turn, whole
from overlapc.profiler.memory import measure_peak
from overlapc.runtime.train_step import TrainStep
from tests.torch.exact import DYNAMO_WARNINGS, randn
from tests.torch.random_models import WIDTH, RandomModel, Recipe, recipes
from tests.torch.zoo import MLP, gpt, on_fabric, tokens

pytestmark = DYNAMO_WARNINGS


def mean(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def plainly(model: nn.Module, batch: tuple[Any, ...], slices: int, loss: Any = None) -> Tensor:
    """What a step in slices promises."""
    total = torch.zeros(())
    for each in zip(*(leaf.chunk(slices) for leaf in batch), strict=True):
        part = (model(*each) if loss is None else loss(model, *each)) / slices
        part.backward()
        total = total + part.detach()
    return total


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_exact(
    make: Callable[[], nn.Module],
    batches: list[tuple[Any, ...]],
    slices: int,
    loss: Any = None,
    **options: Any,
) -> TrainStep:
    """Gradients and losses are those of accumulation over the slices; .grad may be there before."""
    torch.manual_seed(1)
    model = make()
    torch.manual_seed(1)
    twin = make()
    step = TrainStep(twin, loss, slices=slices, profile="estimate", **options)
    for _ in range(2):
        expected = [plainly(model, batch, slices, loss) for batch in batches]
        found = step(batches)
        assert all(map(torch.equal, expected, found))
        mine, others = gradients(model), gradients(twin)
        assert mine.keys() == others.keys()
        assert [name for name in mine if not torch.equal(mine[name], others[name])] == []
    return step


@pytest.mark.parametrize("slices", [2, 3, 4])
def test_gradients_are_those_of_accumulation_over_the_slices(slices):
    batches = [(randn(24, 16, seed=seed),) for seed in range(2)]
    step = assert_exact(MLP, batches, slices, mean)
    assert step.report is not None
    assert step.report.slices == slices
    assert step.fallbacks == []


@pytest.mark.usefixtures("short_search")
@pytest.mark.parametrize(
    "budget", [0.5, *(pytest.param(b, marks=pytest.mark.slow) for b in (None, 1))]
)
def test_what_is_planned_for_a_slow_link_keeps_to_its_budget(budget):
    with on_fabric():
        batch = (tokens(4, 8), tokens(4, 8, seed=9))
        options = {"memory_budget": budget, "hardware": "v100-sxm2-32"}
        try:
            step = assert_exact(gpt(), [batch], 2, **options)
        except Infeasible as infeasible:
            options["memory_budget"] = infeasible.smallest_bytes
            step = assert_exact(gpt(), [batch], 2, **options)
        report = step.report
        assert report.peak_bytes <= report.problem.budget_bytes
        step.model.zero_grad()
        step([batch])
        peaks = []
        for _ in range(3):
            step.model.zero_grad()
            peaks.append(measure_peak(lambda: step([batch])))
        assert min(peaks) <= report.peak_bytes * 1.02 + 4096
        assert "one microbatch in 2 slices" in step.explain()


@pytest.mark.usefixtures("short_search")
@pytest.mark.parametrize(("solver", "budget"), [("overlap", 26_300), ("full", None)])
def test_generators_states_of_attention_that_runs_again_are_predicted(solver, budget):
    """Attention that drops nothing draws nothing, but its state is kept for its recompute."""
    with on_fabric():
        batches = [(tokens(4, 8, seed=i), tokens(4, 8, seed=i + 9)) for i in range(2)]
        torch.manual_seed(1)
        model = gpt()()
        options = {"solver": solver, "memory_budget": budget, "hardware": "v100-sxm2-32"}
        step = TrainStep(model, slices=2, profile="estimate", **options)
        step(batches)
        model.zero_grad()
        peak = measure_peak(lambda: step(batches))
        assert peak == pytest.approx(step.report.peak_bytes, rel=0.02)


@pytest.mark.usefixtures("short_search")
def test_slices_hide_each_others_collectives():
    with on_fabric():
        batch = (tokens(4, 8), tokens(4, 8, seed=9))
        options = {"profile": "estimate", "hardware": "v100-sxm2-32"}
        torch.manual_seed(1)
        model = gpt()()
        uncut = TrainStep(model, **options).predict([batch])
        sliced = TrainStep(model, slices=2, **options).predict([batch])
        assert sliced.timeline.exposed_ns < sliced.eager.exposed_ns
        assert uncut.slices == 1
        assert any(letter in sliced.explain() for letter in ("F0 ", "F1 "))


def test_auto_takes_the_slices_that_are_predicted_to_be_fastest(auto):
    with on_fabric():
        batch = (tokens(32, 8), tokens(32, 8, seed=9))
        torch.manual_seed(1)
        model = gpt(layers=1)()
        step = TrainStep(model, **auto)
        report = step.predict([batch])
        said = re.findall(r"(\d) slices: ([\d.]+) ms predicted", step.explain())
        assert [count for count, _ in said] == ["1", "2", "4"]
        assert report.slices == int(min(said, key=lambda each: float(each[1]))[0]) > 1
        (loss,) = step([batch])
        assert step.report == report
        mine = gradients(model)
        model.zero_grad()
        assert torch.equal(loss, plainly(model, batch, report.slices))
        assert all(torch.equal(mine[name], grad) for name, grad in gradients(model).items())


def test_auto_runs_whole_what_has_nothing_to_hide():
    model, x = MLP(), randn(8, 16)
    step = TrainStep(model, mean, slices="auto", profile="estimate")
    (found,) = step([x])
    assert step.report.slices == 1
    mine = gradients(model)
    model.zero_grad()
    expected = mean(model, x)
    expected.backward()
    assert torch.equal(found, expected.detach())
    assert all(torch.equal(mine[name], grad) for name, grad in gradients(model).items())
    assert "2 slices" not in step.explain()


class Drawn(nn.Module):
    """Draws random numbers that depend on others."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (0.5 + torch.bernoulli(x.sigmoid()))


@pytest.mark.parametrize("how", ["summed", "drawn", "odd"])
def test_auto_runs_whole_what_is_refused_in_slices(how, auto):
    """At planning (numbers drawn, a batch that cannot be cut), or when the first batch has run."""

    def loss(model: nn.Module, *batch: Tensor) -> Tensor:
        return model(*batch) * batch[0].shape[0]  # no mean over samples

    with on_fabric():
        count = 33 if how == "odd" else 32
        batch = (tokens(count, 8), tokens(count, 8, seed=9))
        torch.manual_seed(1)
        model = gpt(layers=1)()
        if how == "drawn":
            model.head = nn.Sequential(model.head, Drawn())
        step = TrainStep(model, loss if how == "summed" else None, **auto)
        torch.manual_seed(2)
        (found,) = step([batch])
        assert step.report.slices == 1
        said = {"summed": "is another", "drawn": "draws random", "odd": "inputs of shapes"}
        assert said[how] in step.explain()
        mine = gradients(model)
        model.zero_grad()
        torch.manual_seed(2)
        expected = loss(model, *batch) if how == "summed" else model(*batch)
        expected.backward()
        assert torch.equal(found, expected.detach())
        assert all(torch.equal(mine[name], grad) for name, grad in gradients(model).items())


def test_several_results_are_those_of_the_batch():
    class Scored(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = MLP(1)
            self.calls = 0
            self.last: Tensor | None = None

        def forward(self, x: Tensor, scale: float) -> Any:
            self.calls += 1
            out = self.inner(x) * scale
            self.last = out.detach()
            return {"loss": out.square().mean(), "out": out, "scale": scale, "x": [x.sum(1)]}

    torch.manual_seed(1)
    model, x = Scored(), randn(8, 16)
    (loss,) = TrainStep(model, slices=2, profile="estimate")([(x, 0.5)])
    assert model.last.shape == x.shape
    step = TrainStep(model, slices=2, results=True, profile="estimate")
    for _ in range(2):  # the number of calls, which changes, becomes an input
        step([(x, 0.5)])
    calls = model.calls
    (found,) = step([(x, 0.5)])
    assert model.calls == calls + 1
    assert torch.equal(model.last, found["out"])
    expected = model(x, 0.5)
    torch.testing.assert_close(found["loss"], expected["loss"].detach())
    assert torch.equal(loss, found["loss"])
    torch.testing.assert_close(found["out"], expected["out"].detach())
    assert torch.equal(found["x"][0], x.sum(1))
    assert found["scale"] == 0.5


class Around(nn.Module):
    def __init__(self, call: Callable[[Tensor], Tensor], inner: nn.Module | None = None) -> None:
        super().__init__()
        self.inner = inner or nn.Identity()
        self.before, self.after, self.call = nn.Linear(16, 16), nn.Linear(16, 16), call

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.call(self.inner(self.before(x))))


class Centered(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


def capacity(x: Tensor) -> Tensor:
    """Of each expert only the first rows, in the order of the batch."""
    chosen = F.one_hot(x.argmax(1), 16)
    keep = (chosen.cumsum(0) * chosen).sum(1) <= max(1, x.shape[0] // 16)
    return x * keep[:, None]


class Switch(nn.Module):
    """The best of a few experts for each token, of which each takes only so many, in the order of
    the batch: what they drop is zero. `asks`: of the whole batch; else each slice for itself."""

    def __init__(self, experts: int, factor: float, asks: bool = True) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, experts, bias=False)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(experts))
        self.factor, self.asks = factor, asks

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        gate, chosen = F.softmax(self.router(x), dim=-1).max(dim=-1)
        hot = F.one_hot(chosen, len(self.experts))
        place, rows = hot.cumsum(0), x.shape[0]
        if self.asks:
            place, rows = place + before(hot.sum(0)), whole(rows)
        keep = (place * hot).sum(1) <= int(self.factor * rows / len(self.experts))
        done = sum(expert(x) * (hot[:, e] * keep)[:, None] for e, expert in enumerate(self.experts))
        return done * gate[:, None], keep


class Switches(nn.Module):
    def __init__(self, *layers: Switch) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        kept = []
        for layer in self.layers:
            y, keep = layer(x)
            x = x + y
            kept.append(keep)
        return x.square().mean(), torch.stack(kept, 1)


@pytest.mark.parametrize("slices", [2, 3, 4])
@pytest.mark.parametrize("factor", [1.0, 1.25, 2.0])
def test_capacity_that_is_passed_on_routes_as_the_whole_batch(slices, factor):
    """200 random gates: not one token goes elsewhere, also where an expert gets none."""
    torch.manual_seed(0)
    model = Switches(Switch(4, factor), Switch(4, factor))
    step = TrainStep(model, slices=slices, results=True, profile="estimate")
    tokens_dropped = 0
    for gate in range(200 // 9 + 1):
        with torch.no_grad():
            for layer in model.layers:
                layer.router.weight.normal_()
                if gate % 3 == 0:
                    layer.router.weight[0] = 0.0
        x = randn(48, WIDTH, seed=gate)
        model.zero_grad()
        ((loss, kept),) = step([(x,)])
        mine = gradients(model)
        model.zero_grad()
        expected, expected_kept = model(x)
        expected.backward()
        assert torch.equal(kept, expected_kept)
        tokens_dropped += int((~kept).sum())
        torch.testing.assert_close(loss, expected.detach())
        for name, gradient in gradients(model).items():
            torch.testing.assert_close(mine[name], gradient, rtol=1e-4, atol=1e-6)
        model.zero_grad()  # and bit by bit plain accumulation, one slice after the other
        with in_turn(slices) as begin:
            for each in x.chunk(slices):
                begin()
                (model(each)[0] / slices).backward()
        assert all(torch.equal(mine[name], grad) for name, grad in gradients(model).items())
    assert step.fallbacks == []
    assert tokens_dropped > 0 or factor == 2.0


def test_what_is_passed_on_is_planned_and_kept():
    """In the least memory, where all runs again that may: what earlier slices counted is not asked
    for a second time."""
    torch.manual_seed(0)
    model, x = Switches(Switch(4, 1.0), Switch(2, 1.0)), randn(48, WIDTH)
    options = {"slices": 2, "results": True, "profile": "estimate", "solver": "heu"}
    with pytest.raises(Infeasible) as infeasible:
        TrainStep(model, memory_budget=0.01, **options).predict([(x,)])
    smallest = infeasible.value.smallest_bytes
    step = TrainStep(model, memory_budget=smallest, **options)
    plan, trace = step.predict([(x,)]).plan, step.report.problem.trace
    asked = [op for op in trace.ops if op.signature.startswith(BEFORE)]
    assert len(asked) == 4
    assert plan.recomputed
    assert not {op.name for op in asked} & {*plan.recomputed}
    first, second = (op for op in asked if op.name.startswith(asked[0].name[:-1]))
    assert second.inputs == (first.inputs[0], first.outputs[0])
    ((_, kept),) = step([(x,)])
    assert torch.equal(kept, model(x)[1])


def test_capacity_for_each_slice_is_refused_by_name():
    torch.manual_seed(0)
    model = Switches(Switch(4, 1.0, asks=False))
    with pytest.raises(OptionError, match=r"layers.0 \(Switch\) sees the whole batch"):
        TrainStep(model, slices=2, profile="estimate")([(randn(48, WIDTH),)])


def test_uncut_a_model_that_asks_has_the_whole_batch():
    assert whole(7) == 7
    assert torch.equal(before(torch.tensor([3, 4])), torch.zeros(2, dtype=torch.long))
    with pytest.raises(ValueError, match="require a gradient"):
        before(randn(2, requires_grad=True))
    with in_turn(2) as begin:
        for expected in (0, 3):
            begin()
            assert whole(7) == 14
            assert before(torch.tensor([3])).item() == expected
    assert whole(7) == 7


def summed(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum()


def balanced(model: nn.Module, x: Tensor) -> Tensor:
    """A loss with an auxiliary one, which is no mean over samples."""
    out = model(x)
    return out.square().mean() + 0.1 * (out.softmax(1).mean(0) ** 2).sum()


@pytest.mark.parametrize(
    ("make", "loss", "said"),
    [
        (
            lambda: Around(F.relu, nn.BatchNorm1d(16)),
            mean,
            "forward changes inner.running_mean, inner",
        ),
        (
            lambda: Around(lambda x: x * torch.bernoulli(x.sigmoid())),
            mean,
            "bernoulli draws random numbers",
        ),
        (lambda: Around(F.relu, Centered()), mean, r"inner \(Centered\) sees the whole batch"),
        (lambda: Around(lambda x: x.cumsum(0)), mean, "another in slices"),
        (lambda: Around(capacity), mean, "another in slices"),
        (MLP, summed, "the loss is another in slices"),
        (MLP, balanced, "the loss is another in slices"),
    ],
)
def test_what_sees_the_whole_batch_is_refused_by_name(make, loss, said):
    torch.manual_seed(1)
    model = make()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for _ in range(2):  # it is as it was
        with pytest.raises(OptionError, match=rf"slices=2: .*{said}"):
            TrainStep(model, loss, slices=2, profile="estimate")([randn(16, 16)])
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_batches_that_cannot_be_cut_are_refused():
    step = TrainStep(MLP(), mean, slices=4, profile="estimate")
    with pytest.raises(OptionError, match=r"slices=4: found inputs of shapes \[\(6, 16\)\]"):
        step([randn(6, 16)])
    with pytest.raises(OptionError, match="requires a gradient"):
        step([randn(8, 16, requires_grad=True)])
    with pytest.raises(OptionError, match="found inputs of shapes"):
        step([(randn(8, 16), randn(4, 16))])
    with pytest.raises(OptionError, match="no microbatches"):
        step([])


def test_what_cannot_be_captured_runs_uncut_and_says_so():
    def picky(model: nn.Module, x: Tensor) -> Tensor:
        total = mean(model, x)
        return total if total.item() > -1e9 else -total

    model, x = MLP(), randn(8, 16)
    step = TrainStep(model, picky, slices=2, profile="estimate")
    with pytest.warns(RuntimeWarning, match="runs the step as plain PyTorch"):
        (found,) = step([x])
    mine = gradients(model)
    model.zero_grad()
    expected = picky(model, x)
    expected.backward()
    assert torch.equal(found, expected.detach())
    assert all(torch.equal(mine[name], grad) for name, grad in gradients(model).items())


def test_a_saved_plan_of_slices_is_taken_again():
    batch = randn(8, 16)
    torch.manual_seed(1)
    model = MLP()
    plan = TrainStep(model, mean, slices=2, profile="estimate").predict([batch]).plan
    step = assert_exact(MLP, [(batch,)], 2, mean, plan=plan)
    assert step.report.plan == plan
    with pytest.raises(Exception, match="the plan was made for trace"):
        TrainStep(model, mean, profile="estimate", plan=plan)([batch])


@pytest.mark.parametrize("solver", ["none", "full", "heu"])
def test_baselines_run_slices_one_after_the_other(solver):
    step = assert_exact(gpt(), [(tokens(4, 8), tokens(4, 8, seed=9))], 2, solver=solver)
    assert step.report.plan.solver in (solver, "none")  # nothing is hidden in one process


CROSSES = {"product", "transposed", "permuted", "expanded", "reduced", "softmax", "indexed"}
CROSSES |= {"in_place_on_view", "attention", "recomputed_by_user", "dropout", "noise"}
CROSSES |= {"changes_buffer", "gathered", "scanned", "sorted"}


def squares(model: nn.Module, x: Tensor) -> Tensor:
    return torch.stack([out.square().mean() for out in model(x)]).sum()


@contextlib.contextmanager
def own_ways(recipe: Recipe, x: Tensor) -> Iterator[Callable[[], nn.Module] | None]:
    """In its world, with warnings as errors: makes the model of a recipe in which each sample goes
    its own way; None if it has nothing to train."""
    torch._dynamo.reset()
    steps = tuple(step for step in recipe.steps if step.op not in CROSSES)
    recipe = replace(recipe, steps=steps, input_grad=False)
    world = on_fabric() if recipe.ranks > 1 else contextlib.nullcontext()
    with world, warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        trains = steps and squares(RandomModel(recipe), x).requires_grad
        yield (lambda: RandomModel(recipe)) if trains else None


@pytest.mark.timeout(1800)
def test_any_graph_in_slices() -> None:
    """Each sample goes its own way through a random graph: bitwise plain accumulation over slices,
    and never refused."""
    seen: Counter[str] = Counter()

    @settings(max_examples=max(5, settings.default.max_examples // 10))
    @given(
        recipe=recipes(max_steps=8),
        slices=st.sampled_from([2, 3, 4]),
        solver=st.sampled_from(["overlap", "heu", "none"]),
        budget=st.sampled_from([None, None, 0.7, 0.3]),
    )
    def holds(recipe: Recipe, slices: int, solver: str, budget: Any) -> None:
        x = randn(24, WIDTH)
        with own_ways(recipe, x) as make:
            if make is None:
                return
            for _ in range(4):
                options = {"solver": solver, "memory_budget": budget}
                try:
                    step = assert_exact(make, [(x,)], slices, squares, **options)
                    break
                except Infeasible as infeasible:
                    budget = infeasible.smallest_bytes
            else:
                raise AssertionError(f"the smallest budget {budget} does not work")
        assert step.fallbacks == []
        seen["examples"] += 1
        seen["beside"] += step.report.plan.solver == "slices"

    holds()
    assert seen["beside"] > 0 or seen["examples"] < 50


def crossed(problem: Problem, plan: Plan, begin: float, end: float) -> Plan | None:
    """The plan with that share of the backwards of the first slices before that of the last
    slice's forward, if that is legal."""
    piece = {text: problem.trace.op[parse_issue(text)[0]].piece for text in plan.order}
    border = sum(op.is_forward for op in problem.trace.ops)
    forwards, backwards = plan.order[:border], plan.order[border:]
    last = piece[forwards[-1]].microbatch
    mine = [text for text in forwards if piece[text].microbatch == last]
    others = [text for text in backwards if piece[text].microbatch != last]
    tail, head = mine[int(begin * len(mine)) :], others[: 1 + int(end * len(others))]
    first = [text for text in forwards if text not in tail]
    then = [text for text in backwards if text not in head]
    found = replace(plan, order=(*first, *head, *tail, *then))
    try:
        check(replace(problem, phases=("FIW",)), found)
    except InvalidPlan:
        return None
    return found


@pytest.mark.timeout(1800)
def test_any_graph_runs_across_the_border_as_well() -> None:
    """Backwards that begin before the last forward has ended, wherever: as one graph, and bitwise
    plain accumulation over slices."""
    seen: Counter[str] = Counter()

    @settings(max_examples=max(5, settings.default.max_examples // 10))
    @given(
        recipe=recipes(max_steps=8),
        slices=st.sampled_from([2, 3]),
        solver=st.sampled_from(["overlap", "full"]),
        begin=st.floats(0.0, 0.99),
        end=st.floats(0.0, 0.99),
    )
    def holds(recipe: Recipe, slices: int, solver: str, begin: float, end: float) -> None:
        x = randn(24, WIDTH)
        with own_ways(recipe, x) as make:
            if make is None:
                return
            step = TrainStep(make(), squares, slices=slices, profile="estimate", solver=solver)
            try:
                report = step.predict([(x,)])
            except Infeasible:
                return
            found = crossed(report.problem, report.plan, begin, end)
            if found is None:
                return
            step = assert_exact(make, [(x,)], slices, squares, plan=found)
        assert step.fallbacks == []
        assert step.report.plan.order == found.order
        seen["across"] += len(step.report.problem.phases) == 1

    holds()
    assert seen["across"] > 0
