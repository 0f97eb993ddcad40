"""Solvers on random small problems: legal, within budget, never worse, monotone in the budget."""

from __future__ import annotations

import re
from dataclasses import replace
from random import Random
from types import ModuleType

import pulp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlapc.core.check import check
from overlapc.core.errors import Infeasible, OptionError
from overlapc.core.ir import Problem
from overlapc.core.simulate import peak_bytes, simulate, step_ns
from overlapc.solvers import BASELINES, bound_ns, faster, generators, smallest_bytes, solve
from overlapc.solvers.choose.choice import Needs, plan_on_demand
from overlapc.solvers.choose.heu import heu_plans
from overlapc.solvers.constants import AT_BOUND
from overlapc.solvers.order.placing import can_place, placed
from tests.plain.strategies import problems, random_problem
from tests.plain.tiny import tiny


@settings(max_examples=settings.default.max_examples // 4)
@given(problems())
def test_solve_is_legal_never_worse_and_monotone(problem):
    free = replace(problem, budget_bytes=None)
    bound = bound_ns(free)
    baselines = [simulate(free, make(free)) for make in BASELINES.values()]
    top = max(t.peak_bytes for t in baselines)
    with pytest.raises(Infeasible) as error:
        solve(replace(free, budget_bytes=-1))
    smallest = error.value.smallest_bytes
    last = None
    for budget in sorted({smallest, (smallest + top) // 2, top, 2 * top}):
        limited = replace(free, budget_bytes=budget)
        plan = solve(limited)
        check(limited, plan)
        timeline = simulate(limited, plan)
        assert timeline.peak_bytes <= budget
        assert timeline.step_ns >= bound
        for baseline in baselines:
            if baseline.peak_bytes <= budget:
                assert timeline.step_ns <= baseline.step_ns
        if last is not None:
            assert timeline.step_ns <= last.step_ns
            assert timeline.peak_bytes >= last.peak_bytes
        last = timeline


def measured_again(problem, rng):
    """The same problem with other op times."""
    costs = {
        name: replace(
            cost,
            compute_ns=rng.randint(0, 2 * cost.compute_ns),
            comm_ns=rng.randint(0, 2 * cost.comm_ns),
        )
        for name, cost in problem.profile.costs.items()
    }
    return replace(problem, profile=replace(problem.profile, costs=costs))


@pytest.mark.parametrize("solver", ["overlap", "heu"])
@settings(max_examples=settings.default.max_examples // 2)
@given(problem=problems(), rng=st.randoms(use_true_random=False))
def test_the_budget_that_is_named_works_whatever_times_are_measured_next(solver, problem, rng):
    with pytest.raises(Infeasible) as error:
        solve(replace(problem, budget_bytes=-1), solver)
    again = replace(measured_again(problem, rng), budget_bytes=error.value.smallest_bytes)
    assert peak_bytes(again, solve(again, solver)) <= again.budget_bytes


def test_unknown_solver_is_named():
    with pytest.raises(OptionError, match="expected one of overlap"):
        solve(None, "magic")  # type: ignore[arg-type]


@pytest.mark.parametrize(("solver", "ops"), [("overlap", 3), ("heu", 3), ("opt", 1)])
def test_every_plan_says_what_found_it(solver, ops):
    """Where a baseline did, its name is the solver's."""
    for seed in range(4):
        problem = random_problem(Random(seed), ops)
        limited = replace(problem, budget_bytes=smallest_bytes(problem))
        plan = solve(limited, solver)
        if plan.solver not in BASELINES:
            assert re.fullmatch(r"[^;]+; of [1-9]\d* plans", plan.found_by), plan.found_by


def asked_too_much():
    raise AssertionError("torch was asked")
    yield ()


def test_nothing_is_searched_where_nothing_can_be_won():
    chain = "".join(f"f{i} F | v{i} > v{i + 1} | 5\n" for i in range(200))
    chain += "".join(f"b{i} I | v{i} > g{i} | 5\n" for i in reversed(range(200)))
    problem = replace(tiny(chain, "g0"), budget_bytes=10**9)
    plan = solve(problem, torch_choices=asked_too_much())
    assert not plan.recomputed
    assert simulate(problem, plan).step_ns == 2000


def test_torch_is_not_asked_where_nothing_can_be_hidden():
    text = """
    a    F    | x   > r     | 10
    b    F    | r   > y     | 10
    db   I    | t r > dr    | 10
    dx   I    | dr  > dx    | 91
    dw   W    | dr x > gw   | 20
    """
    problem = tiny(text, "y dx gw")
    tight = simulate(problem, solve(problem, "full")).peak_bytes
    solve(replace(problem, budget_bytes=tight), "opt", torch_choices=asked_too_much())


@settings(max_examples=settings.default.max_examples // 4)
@given(problems())
def test_what_is_left_out_could_not_have_been_handed_out(problem):
    """The search leaves choices and budgets out by their bounds: trying all finds none better."""
    for budget in (smallest_bytes(problem), peak_bytes(problem, BASELINES["none"](problem))):
        limited = replace(problem, budget_bytes=budget)
        found = simulate(limited, solve(limited)).step_ns
        plans = [plan for some in generators(limited, "overlap").values() for plan in some]
        steps = [t.step_ns for t in (simulate(limited, p) for p in plans) if t.peak_bytes <= budget]
        if can_place(limited):
            plans += [other for plan in plans for other in placed(limited, plan)]
        every = [t.step_ns for t in (simulate(limited, p) for p in plans) if t.peak_bytes <= budget]
        goal = bound_ns(replace(problem, budget_bytes=None)) * AT_BOUND
        assert min(every) <= found <= max(min(steps), goal)


@given(problems())
def test_a_faster_plan_is_found_if_and_only_if_overlap_has_one(problem):
    try:
        step = step_ns(problem, solve(problem))
    except Infeasible:
        assert faster(problem, 10**18) is None
        return
    assert faster(problem, step) is None
    for than_ns in (step + 1, step + step // 50 + 1, 10**18):
        found = faster(problem, than_ns)
        assert found is not None
        assert step_ns(problem, found) == step


def test_the_ladder_ends_where_its_budgets_force_more_recompute_than_pays(monkeypatch):
    """No weight gradient fits into a window as a whole number of times, so no plan reaches the
    bound; and there is nothing left that would hide recompute."""
    blocks = range(20)
    text = "".join(f"f{i} F | v{i} > v{i + 1} | 20\n" for i in blocks)
    for i in reversed(blocks):
        text += f"b{i} I | g{i + 1} v{i} > h{i} | 20\n"
        text += f"s{i} I tp | h{i} > k{i} | 1 + {30 - 10 * (i % 2)}\n"
        text += f"wait_s{i} I | k{i} > g{i} | 0\n"
        text += f"w{i} W | g{i + 1} v{i} > d{i} | 25\n"
    outputs = " ".join(["g0", *(f"d{i}" for i in blocks)])
    sizes = {f"v{i}": 1000 for i in range(21)}
    problem = replace(tiny(text, outputs, sizes=sizes), budget_bytes=10**9)
    budgets = []

    def counted(problem, *args, **kwargs):
        budgets.append(problem.budget_bytes)
        return heu_plans(problem, *args, **kwargs)

    monkeypatch.setattr("overlapc.solvers.heu_plans", counted)
    found = solve(problem)
    walked = len(budgets)
    everything = [p for plans in generators(problem, "overlap").values() for p in plans]
    assert walked < (len(budgets) - walked) / 2
    assert simulate(problem, found).step_ns == min(step_ns(problem, p) for p in everything)


def sharded(blocks: int) -> Problem:
    """Blocks whose weights are gathered, each twice as large as what it hands on."""
    forward, backward, sizes = "", "", {}
    for i in range(blocks):
        forward += f"gather{i} F dp | w{i} > raw{i} | 1 + 30\nwait{i} F | raw{i} > full{i} | 0\n"
        forward += f"view{i} F | full{i} > t{i}~full{i} | 1\n"
        forward += f"mm{i} F | x{i} t{i} > y{i} | 20\ngelu{i} F | y{i} > x{i + 1} | 5\n"
        one = f"slope{i} I | g{i + 1} y{i} > s{i} | 5\n"
        one += f"back{i} I | s{i} t{i} > g{i} | 20\nweight{i} W | s{i} x{i} > d{i} | 20\n"
        backward = one + backward
        sizes |= {f"full{i}": 200, f"raw{i}": 200, f"y{i}": 100, f"x{i + 1}": 100}
    outputs = " ".join(["g0", *(f"d{i}" for i in range(blocks))])
    return tiny(forward + backward, outputs, sizes=sizes | {"x0": 100})


def test_weights_that_are_gathered_are_known_from_activations() -> None:
    problem = sharded(2)
    assert Needs(problem.trace).gathered == {"raw0", "full0", "raw1", "full1"}


def test_overlap_plans_for_what_gathering_every_weight_again_takes() -> None:
    problem = sharded(6)
    needs = Needs(problem.trace)
    kept = set(needs.storages) - needs.gathered
    plain = plan_on_demand(problem, kept, "none", needs)
    limited = replace(problem, budget_bytes=peak_bytes(problem, plain))
    plans = [plan for some in generators(limited, "overlap").values() for plan in some]
    own = [plan for plan in plans if plan.found_by.startswith("weights gathered again")]
    assert any(peak_bytes(problem, plan) <= limited.budget_bytes for plan in own)
    assert step_ns(limited, solve(limited)) < step_ns(limited, plain)


@pytest.mark.parametrize("seed", range(5))
def test_checkmate_recomputes_nothing_where_all_fits(seed: int) -> None:
    problem = replace(random_problem(Random(seed), 8), budget_bytes=None)
    everything = simulate(problem, solve(problem, "none"))
    roomy = replace(problem, budget_bytes=everything.peak_bytes)
    plan = solve(roomy, "checkmate")
    assert (plan.solver, plan.recomputed) == ("checkmate", ())
    assert simulate(roomy, plan).step_ns == everything.step_ns


@settings(max_examples=15)
@given(problems(), st.integers(1, 100))
def test_the_budget_that_checkmate_names_works(problem, percent):
    budget = max(1, smallest_bytes(problem) * percent // 100)
    try:
        solve(replace(problem, budget_bytes=budget), "checkmate")
    except Infeasible as error:
        solve(replace(problem, budget_bytes=error.smallest_bytes), "checkmate")


def test_no_error_of_pulps_keeps_the_frames_of_its_importer() -> None:
    modules = [each for each in vars(pulp.apis).values() if isinstance(each, ModuleType)]
    solvers = [each for module in modules for each in vars(module).values()]
    held = [each for one in solvers if isinstance(one, type) for each in vars(one).values()]
    errors = [each for each in held if isinstance(each, BaseException)]
    assert errors
    assert all(error.__traceback__ is error.__context__ is None for error in errors)
