"""Whatever legal plan a random graph is run with, every bit is that of eager."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch import fx

import overlapc
from overlapc.core.check import check
from overlapc.core.errors import Infeasible
from overlapc.core.ir import Plan, Problem, issue, parse_issue
from overlapc.core.simulate import simulate
from overlapc.passes.emit.rewrite import rewrite
from overlapc.passes.emit.torch_choice import torch_choices
from overlapc.passes.trace import trace_joint
from overlapc.planning.problem import formulate
from overlapc.profiler.estimate import estimate
from overlapc.profiler.hardware import load_hardware
from overlapc.runtime.backend import _run_as_ordered
from overlapc.solvers import SOLVERS, solve
from overlapc.solvers.choose.choice import Needs, plan_on_demand
from tests.torch.exact import DYNAMO_WARNINGS, Batch, differences, randn, train
from tests.torch.random_models import ROWS, WIDTH, RandomModel, Recipe, Step, recipes
from tests.torch.zoo import on_fabric

pytestmark = DYNAMO_WARNINGS


def batches(recipe: Recipe) -> list[Batch]:
    return [Batch((randn(ROWS, WIDTH, seed=i, requires_grad=recipe.input_grad),)) for i in range(2)]


def world(recipe: Recipe) -> Any:
    return on_fabric() if recipe.ranks > 1 else contextlib.nullcontext()


def differentiable(steps: Sequence[dict[str, Any]]) -> bool:
    """Was there a backward at all? Without one there is no joint graph."""
    return any(key.startswith("gradient") and value for key, value in steps[0].items())


# ------------------------------------------------------------- plans drawn at random, or solved


def within(problem: Problem, solver: str, share: float, choices: Sequence[Any]) -> Plan:
    """The solver's plan for a budget between its smallest (share 0) and all saved (share 1)."""
    least = 1
    try:
        solve(replace(problem, budget_bytes=1), solver, choices)
    except Infeasible as infeasible:
        least = infeasible.smallest_bytes
    budget = least + int(share * max(0, (problem.budget_bytes or 0) - least))
    plan = solve(replace(problem, budget_bytes=budget), solver, choices)
    assert simulate(problem, plan).peak_bytes <= budget
    return plan


def shuffled(problem: Problem, plan: Plan, chance: random.Random) -> Plan:
    """The plan's issues in any other order that is legal."""
    trace = problem.trace
    saved = set(plan.saved)
    waits_for: dict[str, set[str]] = {text: set() for text in plan.order}
    for text in plan.order:
        name, again = parse_issue(text)
        op = trace.op[name]
        for given_ in op.inputs:
            producer = trace.value[given_].producer
            if producer:
                later = trace.op[producer].is_forward and (again or not op.is_forward)
                waits_for[text].add(issue(producer, later and given_ not in saved))
    drawing = [name for name in plan.order if name in trace.op and trace.op[name].random]
    for first, second in pairwise(drawing):
        waits_for[second].add(first)
    phases: dict[bool, list[str]] = {True: [], False: []}
    for text in plan.order:
        name, again = parse_issue(text)
        phases[trace.op[name].is_forward and not again].append(text)
    order: list[str] = []
    for left in (phases[True], phases[False]):
        while left:
            ready = [t for t in left if not (waits_for[t] & set(left))]
            order.append(chance.choice(ready))
            left.remove(order[-1])
    return replace(plan, order=tuple(order))


@dataclass
class Planner:
    """A partition function that plans as the test wants it."""

    static: int
    how: str
    share: float
    seed: int
    plans: list[tuple[Problem, Plan]] = field(default_factory=list)

    def __call__(
        self, joint: fx.GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **options: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        options["static_lifetime_input_indices"] = list(range(self.static))
        captured = trace_joint(joint, num_fwd_outputs, range(self.static))
        problem = formulate(captured.trace, estimate(captured, load_hardware("cpu-gloo")))
        chance = random.Random(self.seed)
        if self.how == "any":
            needs = Needs(problem.trace)
            made = [v.storage for v in problem.trace.values if needs.position.get(v.producer)]
            keep = [s for s in made if chance.random() < self.share]
            plan = plan_on_demand(problem, keep, "any", needs)
            plan = shuffled(problem, plan, chance)
        else:
            choices = torch_choices(captured, joint_inputs) if self.how == "torch" else ()
            plan = within(problem, self.how, self.share, choices)
        check(problem, plan)
        self.plans.append((problem, plan))
        return rewrite(captured, plan, joint_inputs, **options)


def compiled(model: RandomModel, batch: Batch, planner: Planner) -> Any:
    """The model through AOTAutograd alone: Dynamo would take most of the time."""
    from torch._functorch.aot_autograd import aot_module_simplified

    call = aot_module_simplified(
        model,
        batch.args,
        fw_compiler=_run_as_ordered,
        bw_compiler=_run_as_ordered,
        inference_compiler=_run_as_ordered,
        partition_fn=planner,
    )

    class Compiled(RandomModel):
        def forward(self, *args: Any) -> Any:
            return call(*args)

    made = Compiled.__new__(Compiled)
    made.__dict__ = model.__dict__
    return made


HOW = ("any", "any", "any", "overlap", "overlap", "full", "selective", "none", "torch")


@pytest.mark.timeout(3600)
def test_any_legal_plan_of_any_graph() -> None:
    """20 examples in `make test`, 500 in `make test-all`."""
    seen: Counter[str] = Counter()

    @settings(max_examples=max(20, settings.default.max_examples // 2))
    @given(
        recipe=recipes(),
        how=st.sampled_from(HOW),
        share=st.sampled_from([0.0, 0.0, 0.3, 0.6, 1.0]),
        seed=st.integers(0, 1 << 30),
    )
    def holds(recipe: Recipe, how: str, share: float, seed: int) -> None:
        # Of a result that is returned twice AOTAutograd alone adds up the gradients first.
        assume(len(set(recipe.outputs)) == len(recipe.outputs))
        with world(recipe):
            expected = train(RandomModel(recipe), batches(recipe))
            model = RandomModel(recipe)
            static = len(list(model.parameters())) + len(list(model.buffers()))
            planner = Planner(static, how, share, seed)
            if not differentiable(expected):
                return
            found = train(compiled(model, batches(recipe)[0], planner), batches(recipe))
        assert differences(expected, found) == []
        ((problem, plan),) = planner.plans
        seen["examples"] += 1
        seen["recomputes"] += bool(plan.recomputed)
        seen["random again"] += any(problem.trace.op[n].random for n in plan.recomputed)
        seen["in a new order"] += [*plan.order] != [op.name for op in problem.trace.ops]
        seen["collectives"] += bool(problem.trace.lanes)
        seen["collectives again"] += any(
            problem.trace.op[n].role == "start" for n in plan.recomputed
        )
        seen["may not run twice"] += not all(op.recomputable for op in problem.trace.ops)

    holds()
    examples = seen["examples"]
    # Some are views of their input or nothing with a gradient.
    assert examples > settings.default.max_examples / 4
    assert seen["recomputes"] > examples / 2
    assert seen["in a new order"] > examples / 2
    rare = ("collectives again",) if examples > 300 else ()
    for what in ("random again", "collectives", "may not run twice", *rare):
        assert seen[what] > examples / 20, (what, seen)


# Of two ops that draw, nothing reads the second.
READ_BY_NOTHING = Recipe(
    (Step("add", -1, -1, 0), Step("attention", -1, -1, 0), Step("attention", -1, -1, 0)),
    outputs=(1,),
    frozen=(),
    input_grad=True,
    ranks=4,
)

# What changes the buffer cannot run again, nor can the op that reads the change.
CHANGES_A_BUFFER = replace(
    READ_BY_NOTHING,
    steps=(Step("add", -1, -1, 0), Step("add", -1, -1, 0), Step("changes_buffer", -1, -1, 0)),
    outputs=(0,),
)


@pytest.mark.timeout(1800)
def test_optimize_any_graph() -> None:
    """The whole road, Dynamo and all: 12 examples in `make test`, 125 in `make test-all`."""
    seen: Counter[str] = Counter()

    @settings(max_examples=settings.default.max_examples // 8)
    @given(
        recipe=recipes(max_steps=8),
        solver=st.sampled_from(SOLVERS),
        budget=st.sampled_from([1, 0.3, 0.7, None]),  # the first is drawn most often
        profile=st.sampled_from(["estimate", "measure"]),
    )
    @example(recipe=READ_BY_NOTHING, solver="whole", budget=1, profile="estimate")
    @example(recipe=CHANGES_A_BUFFER, solver="whole", budget=1, profile="estimate")
    def holds(recipe: Recipe, solver: str, budget: Any, profile: str) -> None:
        torch._dynamo.reset()
        with world(recipe):
            expected = train(RandomModel(recipe), batches(recipe))
            if not differentiable(expected):
                return
            for _ in range(4):
                model: Any = overlapc.optimize(
                    RandomModel(recipe), memory_budget=budget, solver=solver, profile=profile
                )
                try:
                    found = train(model, batches(recipe))
                    break
                except Infeasible as infeasible:
                    budget = infeasible.smallest_bytes
                    torch._dynamo.reset()
            else:
                raise AssertionError(f"the smallest budget {budget} does not work")
        assert differences(expected, found) == []
        assert model.fallbacks == []
        seen["examples"] += 1
        seen["planned"] += len(model.graphs) == 1
        seen["recomputes"] += any(report.plan.recomputed for report in model.graphs)

    holds()
    assert seen["planned"] > seen["examples"] / 2
    assert seen["recomputes"] > seen["examples"] / 10
