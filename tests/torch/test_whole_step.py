"""A step that was traced as one graph gives every bit that it gave before, in whatever legal order
a plan puts it."""

from __future__ import annotations

import copy
import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import flex_attention as flex
from torch.nn.utils.stateless import _reparametrize_module

from overlapc.core.check import check
from overlapc.core.errors import CaptureError, Infeasible
from overlapc.core.ir import Plan, Problem, Timeline
from overlapc.core.simulate import peak_bytes, simulate, step_ns
from overlapc.passes.trace import trace_in_order
from overlapc.passes.whole import WholeStep, peak_in_order
from overlapc.planning.options import Options
from overlapc.planning.problem import formulate
from overlapc.profiler.estimate import estimate
from overlapc.profiler.hardware import load_hardware
from overlapc.ranks.groups import Attempts
from overlapc.runtime.whole import plan_step
from overlapc.solvers.choose.choice import Needs, plan_on_demand
from tests.torch.exact import randn
from tests.torch.random_models import ROWS, WIDTH, RandomModel, Recipe, recipes
from tests.torch.test_random_graphs import shuffled, within, world

pytestmark = pytest.mark.filterwarnings("ignore:.*treespec:FutureWarning")
OTHERS_READ = "writes into a value that others read"


class Step:
    """A step of a model as one graph: its inputs are parameters, buffers and a batch, its results a
    loss and the gradients of the parameters."""

    def __init__(self, model: nn.Module, *batch: Tensor) -> None:
        self.names = [name for name, p in model.named_parameters() if p.requires_grad]
        state = dict(model.named_parameters()) | dict(model.named_buffers())
        order = [*self.names, *(name for name in state if name not in self.names)]
        self.static = len(order)

        def step(*given: Tensor) -> list[Tensor]:
            named = dict(zip(order, given[: self.static], strict=True))
            wanted = [named[name] for name in self.names]
            with _reparametrize_module(model, named):  # until the backward, which may call it again
                made = model(*given[self.static :])
                made = made if isinstance(made, tuple) else (made,)
                loss = torch.stack([one.float().square().mean() for one in [*made, *wanted]]).sum()
                return [loss, *torch.autograd.grad(loss, wanted)]

        self.inputs = [state[name].detach().clone() for name in order] + [*batch]
        for tensor in self.inputs[: len(self.names)]:
            tensor.requires_grad_()
        self.graph = make_fx(step, tracing_mode="fake")(*self.inputs)
        self.gradients = {i: i + 1 for i in range(len(self.names))}

    def copied(self) -> WholeStep:
        return WholeStep(copy.deepcopy(self.graph), self.gradients, range(self.static))

    def run(self, graph: fx.GraphModule) -> list[Tensor]:
        """What the graph returns and leaves in its inputs, with the same random numbers."""
        inputs = [tensor.detach().clone() for tensor in self.inputs]
        torch.manual_seed(5)
        with torch.no_grad():
            return [*graph(*inputs), *inputs]

    def same(self, graph: fx.GraphModule) -> bool:
        pairs = zip(self.run(self.graph), self.run(graph), strict=True)
        return all(torch.equal(a, b) and a.stride() == b.stride() for a, b in pairs)


@pytest.mark.timeout(3600)
def test_any_legal_plan_of_any_step() -> None:
    """20 examples in `make test`, 300 in `make test-all`."""
    seen: Counter[str] = Counter()

    @settings(max_examples=max(20, 3 * settings.default.max_examples // 4))
    @given(
        recipe=recipes(),
        how=st.sampled_from(["any", "any", "overlap", "heu", "full", "none"]),
        share=st.sampled_from([0.0, 0.0, 0.3, 0.6, 1.0]),
        seed=st.integers(0, 1 << 30),
    )
    def holds(recipe: Recipe, how: str, share: float, seed: int) -> None:
        with world(recipe):
            step = Step(RandomModel(replace(recipe, frozen=())), randn(ROWS, WIDTH, seed=1))
            try:
                whole = step.copied()
            except CaptureError as error:
                seen[error.reason.partition(" ")[2]] += 1
                return
            captured = whole.captured
            problem = formulate(captured.trace, estimate(captured, load_hardware("cpu-gloo")))
            if how == "any":
                chance, needs = random.Random(seed), Needs(problem.trace)
                made = [v.storage for v in problem.trace.values if needs.position.get(v.producer)]
                keep = [s for s in made if chance.random() < share]
                plan = shuffled(problem, plan_on_demand(problem, keep, "any", needs), chance)
            else:
                plan = within(problem, how, share, ())
            check(problem, plan)
            whole.reorder(plan)
            assert step.same(whole.graph)
            judged = in_its_order(whole.graph)
            assert judged.step_ns == step_ns(problem, plan)
            assert judged.peak_bytes == peak_bytes(problem, plan) == peak_in_order(whole.graph)
        seen["examples"] += 1
        seen["recomputes"] += bool(plan.recomputed)
        seen["in a new order"] += [*plan.order] != [op.name for op in problem.trace.ops]
        seen["collectives"] += bool(problem.trace.lanes)
        seen["may not run twice"] += not all(op.recomputable for op in problem.trace.ops)

    holds()
    total = sum(seen[what] for what in ("examples", OTHERS_READ))
    assert seen["examples"] > total / 3, seen
    for what in ("recomputes", "in a new order", "collectives", "may not run twice"):
        assert seen[what] > seen["examples"] / 10, (what, seen)


def in_its_order(graph: fx.GraphModule) -> Timeline:
    """What a graph takes in the order that it has."""
    captured = trace_in_order(graph)
    costs = estimate(captured, load_hardware("cpu-gloo"))
    order = tuple(op.name for op in captured.trace.ops)
    return simulate(Problem(captured.trace, costs, phases=("F",)), Plan("", "", (), order))


class Counted(nn.Module):
    """It adds in place to a value of its own and to a buffer, and draws."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.register_buffer("count", torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            mean = layer(x).square().mean(-1, keepdim=True).add_(1e-5)
            x = nn.functional.dropout(torch.tanh(layer(x)) * mean.rsqrt(), 0.1)
        with torch.no_grad():
            self.count.add_(x.sum(0))
        return x


def counted() -> Step:
    torch.manual_seed(0)
    return Step(Counted(), randn(ROWS, 16, seed=1))


@pytest.mark.parametrize("profile", ["estimate", "measure"])
def test_a_step_is_planned_within_a_budget(profile: str) -> None:
    step, attempts = counted(), Attempts("test")
    peaks = []
    for budget in (None, 0.7, 0.5):
        graph = copy.deepcopy(step.graph)
        options = Options(memory_budget=budget, profile=profile)
        try:
            report = plan_step(graph, step.gradients, range(step.static), options, attempts)
        except Infeasible as error:
            options = Options(memory_budget=error.smallest_bytes, profile=profile)
            report = plan_step(graph, step.gradients, range(step.static), options, attempts)
        assert step.same(graph)
        assert graph.graph.find_nodes(op="placeholder")[0].target == _first_input(step)
        peaks.append(report.peak_bytes)
    assert peaks == sorted(peaks, reverse=True)
    assert report.plan.recomputed
    assert not any(
        name.startswith(("native_dropout", "bernoulli")) for name in report.plan.recomputed
    )


def _first_input(step: Step) -> Any:
    return step.graph.graph.find_nodes(op="placeholder")[0].target


def test_a_step_that_cannot_be_planned_stays_as_it_is() -> None:
    step = counted()
    graph, code = copy.deepcopy(step.graph), step.graph.code
    options = Options(memory_budget=1, profile="estimate")
    with pytest.raises(Infeasible):
        plan_step(graph, step.gradients, range(step.static), options, Attempts("test"))
    assert step.same(graph)
    assert len(graph.graph.nodes) == len(step.graph.graph.nodes)
    assert graph.code.count("primals") == code.count("primals")


class Written(nn.Module):
    """It writes into a value that another op reads before."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        made = x * 2
        before = made.sum()
        made.add_(1)
        return made * self.weight + before


def test_a_write_that_others_see_is_refused_by_name() -> None:
    with pytest.raises(CaptureError, match=OTHERS_READ):
        Step(Written(), randn(4)).copied()


class Attention(nn.Module):
    """Flex attention within documents of three rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 24) for _ in range(3))
        mask = flex.create_block_mask(_alike, 1, None, ROWS, ROWS, "cpu")
        kinds = [
            f"{full}{of}_{what}" for full in ("", "full_") for of in ("kv", "q") for what in _OF
        ]
        self.parts = {name: getattr(mask, name) for name in kinds}
        for name, tensor in self.parts.items():
            self.register_buffer(name, tensor)

    def forward(self, x: Tensor) -> Tensor:
        parts = {name: getattr(self, name) for name in self.parts}
        mask = flex.BlockMask((ROWS, ROWS), **parts, mask_mod=_alike)
        for layer in self.layers:
            query, key, value = layer(x).view(1, ROWS, 2, 12).transpose(1, 2).chunk(3, -1)
            made = flex.flex_attention(query, key, value, block_mask=mask)
            x = torch.tanh(made.transpose(1, 2).reshape(ROWS, 8))
        return x


_OF = ("num_blocks", "indices")


def _alike(_b: Tensor, _h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q // 3 == k // 3


def test_flex_attention_that_runs_again_has_subgraphs_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(flex, "_validate_device", lambda *_: None)  # a CPU has no kernels for it
    monkeypatch.setattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    torch.manual_seed(0)
    step, attempts = Step(Attention(), randn(ROWS, 8, seed=1)), Attempts("test")
    options = Options(solver="full", profile="estimate")
    planned = copy.deepcopy(step.graph)
    report = plan_step(planned, step.gradients, range(step.static), options, attempts)
    assert step.same(planned)
    again = planned.graph.find_nodes(
        op="call_function", target=torch.ops.higher_order.flex_attention
    )
    assert len(again) == 3 + sum("flex" in name for name in report.plan.recomputed) > 3
    parts = [given for node in again for given in node.all_input_nodes if given.op == "get_attr"]
    assert len(set(parts)) == len(parts)
    measured = Options(profile="measure")
    with pytest.raises(CaptureError, match='expected profile="estimate"'):
        plan_step(step.graph, step.gradients, range(step.static), measured, attempts)


def filled(early: bool) -> Step:
    """Gradients of parts of a batch, copied into places of one tensor, as a chunked loss has them.
    `early`: a view of it, read behind the copies, is taken before them."""

    def step(weight: Tensor, x: Tensor) -> list[Tensor]:
        made = torch.zeros_like(x, dtype=torch.float64)
        view = made[1:3]
        for i in range(4):
            made[2 * i : 2 * i + 2].copy_((x[2 * i : 2 * i + 2] * weight).cos())
        read = view if early else made[1:3]
        return [read.sum(), (made * x).sum(0)]

    found: Step = object.__new__(Step)
    found.inputs, found.static, found.gradients = [randn(4, seed=1), randn(8, 4, seed=2)], 1, {0: 1}
    found.graph = make_fx(step, tracing_mode="fake")(*found.inputs)
    return found


def test_parts_that_are_copied_into_one_tensor() -> None:
    step = filled(early=False)
    graph = copy.deepcopy(step.graph)
    options = Options(profile="estimate")
    plan_step(graph, step.gradients, range(step.static), options, Attempts("test"))
    assert not graph.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    assert step.same(graph)
    with pytest.raises(CaptureError, match=OTHERS_READ):
        filled(early=True).copied()


def test_what_an_order_holds() -> None:
    def step(x: Tensor) -> Tensor:  # of 4 bytes each: 100, and 50 of a copy
        doubled = x * 2
        first, _ = doubled.split(50)  # views
        return (first + 1).sum() + doubled[:10].cos().sum()

    graph = make_fx(step, tracing_mode="fake")(randn(100))
    # `doubled` and the copy; then `doubled`, the copy's sum and ten cosines
    assert peak_in_order(graph) == 4 * 151


def test_ops_of_higher_order_are_refused_by_name() -> None:
    def step(weight: Tensor, x: Tensor) -> list[Tensor]:
        loss = torch.cond(x.sum() > 0, lambda a: a.sin(), lambda a: a.cos(), (x,)).sum()
        return [loss + weight.sum(), torch.ones_like(weight)]

    graph = make_fx(step, tracing_mode="fake")(randn(4), randn(4))
    with pytest.raises(CaptureError, match="higher-order"):
        WholeStep(graph, {0: 1}, [0])
