"""Lower bounds and the exact solver on random small problems, against brute force."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from random import Random

import pytest

from overlapc.core.check import check
from overlapc.core.errors import Infeasible
from overlapc.core.simulate import simulate
from overlapc.solvers import SOLVERS, bound_ns, solve
from overlapc.solvers.bound.program import IntegerProgram
from overlapc.solvers.choose.exact import exact, must_follow
from overlapc.solvers.choose.opt import opt
from tests.plain.brute_force import TooMany, brute_force
from tests.plain.strategies import random_plan, random_problem

OURS = ("overlap", "heu", "opt")
SLOW = [pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.mark.parametrize("seeds", [range(100), pytest.param(range(100, 4000), marks=SLOW)])
def test_no_legal_plan_beats_the_bound(seeds):
    for seed in seeds:
        rng = Random(seed)
        problem = random_problem(rng, rng.randint(1, 7))
        plan = random_plan(problem, rng)
        timeline = simulate(problem, plan)
        limited = replace(problem, budget_bytes=timeline.peak_bytes)
        programs = [IntegerProgram(limited), IntegerProgram(limited, fine=True)]
        for bound in (bound_ns(limited), *(p.solve(5.0, 0.0).bound_ns for p in programs)):
            assert bound <= timeline.step_ns, seed


@pytest.mark.parametrize("seeds", [range(20), pytest.param(range(20, 200), marks=SLOW)])
def test_a_program_serves_other_budgets_and_microbatches_in_flight(seeds):
    for seed in seeds:
        rng = Random(seed)
        problem = random_problem(rng, rng.randint(1, 7))
        known = IntegerProgram(replace(problem, budget_bytes=rng.randint(1, 1 << 20)))
        for in_flight in (1, 3, 5):
            asked = replace(problem, budget_bytes=rng.randint(1, 1 << 16), in_flight=in_flight)
            made, served = IntegerProgram(asked), known.of(asked)
            assert served.model == made.model, seed
            assert bound_ns(asked, known) == bound_ns(asked), seed


def small_problems(seeds):
    """(seed, problem, the best step by brute force), where that is soon found."""
    for seed in seeds:
        rng = Random(seed)
        problem = random_problem(rng, rng.randint(1, 3))
        try:
            yield seed, problem, brute_force(problem, most=300)
        except TooMany:
            continue


@pytest.mark.parametrize("seeds", [range(50), pytest.param(range(50, 8000), marks=SLOW)])
def test_opt_is_the_best_there_is(seeds):
    for seed, problem, best in small_problems(seeds):
        found = exact(problem)
        assert (found and simulate(problem, found).step_ns) == best, seed
        if best is None:
            with pytest.raises(Infeasible):
                opt(problem)
            continue
        plan = opt(problem)
        check(problem, plan)
        assert (plan.status, plan.bound_ns) == ("optimal", best), seed
        assert simulate(problem, plan).step_ns == best, seed
        assert bound_ns(problem) <= best, seed


@pytest.mark.parametrize("seeds", [range(25), pytest.param(range(20_000, 25_000), marks=SLOW)])
def test_every_solver_is_legal_and_ours_never_worse(seeds):
    for seed, problem, best in small_problems(seeds):
        steps = {}
        for solver in SOLVERS:
            if solver == "torch":
                continue
            try:
                plan = solve(problem, solver)
            except Infeasible:
                continue
            check(problem, plan)
            timeline = simulate(problem, plan)
            assert problem.budget_bytes is None or timeline.peak_bytes <= problem.budget_bytes
            assert best is not None, (seed, solver)
            assert timeline.step_ns >= best, (seed, solver)
            steps[solver] = timeline.step_ns
        for ours in OURS:
            if ours in steps:
                assert steps[ours] <= min(
                    (steps[name] for name in ("none", "full", "selective") if name in steps),
                    default=steps[ours],
                ), (seed, ours)
        assert steps.get("opt") == best, seed


def problem_of_many_plans():
    """One that OPT neither goes through nor proves at once."""
    for seed in range(1000):
        problem = random_problem(Random(seed), 7)
        if len(problem.trace.ops) > 40 and len(problem.phases) == 2:
            eager = simulate(problem, solve(replace(problem, budget_bytes=None), "none"))
            limited = replace(problem, budget_bytes=eager.peak_bytes * 9 // 10)
            try:
                if solve(limited).bound_ns < simulate(limited, solve(limited)).step_ns:
                    return limited
            except Infeasible:
                continue
    raise AssertionError("no such problem among the seeds")


def test_opt_tells_where_it_stands_and_keeps_its_best_when_stopped():
    problem = problem_of_many_plans()
    told = []
    plan = solve(problem, "opt", time_limit_s=2.0, progress=told.append)
    steps = [p.step_ns for p in told if p.step_ns]
    bounds = [p.bound_ns for p in told]
    assert steps == sorted(steps, reverse=True)
    assert bounds == sorted(bounds)
    assert [p.seconds for p in told] == sorted(p.seconds for p in told)
    assert plan.bound_ns <= simulate(problem, plan).step_ns

    def interrupt(progress):
        raise KeyboardInterrupt

    def terminate(progress):
        os.kill(os.getpid(), signal.SIGTERM)

    for stop in (interrupt, terminate):
        stopped = solve(problem, "opt", progress=stop)
        check(problem, stopped)
        assert simulate(problem, stopped).peak_bytes <= problem.budget_bytes


@pytest.mark.parametrize("solver", OURS)
@pytest.mark.parametrize("seeds", [range(6), pytest.param(range(30_000, 30_300), marks=SLOW)])
def test_more_memory_never_costs_time(solver, seeds):
    for seed in seeds:
        rng = Random(seed)
        free = replace(random_problem(rng, rng.randint(1, 3)), budget_bytes=None)
        top = simulate(free, solve(free, "none")).peak_bytes
        steps = []
        for budget in range(top // 4, top + 2, max(1, top // 5)):
            limited = replace(free, budget_bytes=budget)
            try:
                plan = solve(limited, solver)
            except Infeasible:
                assert not steps, (seed, budget)
                continue
            if solver != "opt" or plan.status == "optimal":  # a search cut short may be unlucky
                steps.append(simulate(limited, plan).step_ns)
        assert steps == sorted(steps, reverse=True), seed


def test_issues_are_gone_through_in_the_traces_order():
    """Not in that of a set of names, which differs from process to process."""
    for seed in range(30):
        problem = random_problem(Random(seed), 4)
        again = frozenset(op.name for op in problem.trace.ops if op.is_forward)
        names = [op.name for op in problem.trace.ops]
        repeated = [f"R:{name}" for name in names if name in again]
        assert list(must_follow(problem, frozenset(), again)) == names + repeated
