"""Budgets, profiles of several ranks, what `explain` prints, and what a failing solver costs."""

from __future__ import annotations

import ast
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import overlapc
from overlapc.core.errors import Infeasible, InvalidPlan, OptionError
from overlapc.core.ir import Cost, Problem, Profile, Slowdown
from overlapc.core.simulate import simulate
from overlapc.planning import agreement, road
from overlapc.planning.agreement import merge_profiles, unlike_ranks
from overlapc.planning.options import parse_budget
from overlapc.planning.problem import eager_timeline, formulate
from overlapc.planning.report import Report
from overlapc.solvers import best_baseline, solve
from tests.plain.strategies import legal_plans, problems
from tests.plain.tiny import plan_of, tiny

ROOT = Path(__file__).parents[2]

# --- budgets ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        (None, 1000),
        (1, 1),
        (10**15, 10**15),
        ("8GB", 8 * 10**9),
        ("8 gb", 8 * 10**9),
        ("  1.5KiB\n", 1536),
        ("512MiB", 512 * 2**20),
        ("2tb", 2 * 10**12),
        ("1TiB", 2**40),
        ("1_000B", 1000),
        (".5kB", 500),
        # A fraction of the 600 that eager's peak holds beyond the 400 that no plan can avoid.
        (1.0, 1000),
        (0.5, 700),
        (0.001, 400),
        (2.0, 1600),
    ],
)
def test_a_budget_in_bytes(budget, expected):
    assert parse_budget(budget, eager_bytes=1000, lasting_bytes=400) == expected


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        ("8", 'expected a number and a unit, as "8GB" or "512MiB"'),
        ("GB", "expected a number and a unit"),
        ("", "expected a number and a unit"),
        ("8 gigabytes", "expected a number and a unit"),
        ("8GBps", "expected a number and a unit"),
        ("-8GB", "expected a number and a unit"),
        ("1e3GB", "expected a number and a unit"),
        ("1.2.3GB", "expected a number and a unit"),
        ("nanGB", "expected a number and a unit"),
        ("9" * 400 + "GB", "expected a number and a unit"),
        ("0GB", "expected more than 0 bytes"),
        ("0.1B", "expected more than 0 bytes"),
        (0, "expected more than 0 bytes"),
        (-1, "expected more than 0 bytes"),
        (0.0, "must be positive; bytes are given as an int"),
        (-0.5, "must be positive"),
        (8e9, "a float is a fraction of eager's activation memory"),
        (math.nan, "must be positive"),
        (math.inf, "must be positive"),
        (True, "expected bytes (an int)"),
        ([8], "expected bytes (an int)"),
    ],
)
def test_a_budget_that_means_nothing_is_named(budget, message):
    with pytest.raises(OptionError, match=re.escape(message)) as error:
        parse_budget(budget, eager_bytes=1000, lasting_bytes=400)
    assert str(error.value).startswith(f"memory_budget={budget!r}: ")


def test_formulate_measures_eager():
    problem = tiny(
        """
        f F | x   > h  | 1
        g F | h   > y  | 1
        d I | t h > dx | 1
        """,
        "y dx",
        sizes={"h": 100, "y": 10, "dx": 1000},
    )
    trace, profile = problem.trace, problem.profile
    assert formulate(trace, profile).budget_bytes == 1110  # h, y and dx while d runs
    assert formulate(trace, profile, 0.5).budget_bytes == 1060  # y and dx are there in any case
    assert formulate(trace, profile, "1KB").budget_bytes == 1000
    assert eager_timeline(problem).recompute_ns == 0


# --- profiles of several ranks ------------------------------------------------------------------


def test_merged_profiles_take_mean_compute_and_the_slowest_link():
    one = Profile(
        {"f": Cost(10, 0, 5, "measured"), "c": Cost(1, 100, 0, "measured")},
        Slowdown(1100, 1500),
        {"device": "one"},
    )
    other = Profile(
        {"f": Cost(21, 0, 3, "estimated"), "c": Cost(2, 90, 7, "measured")},
        Slowdown(1300, 1200),
        {"device": "other"},
    )
    assert merge_profiles([one, other]) == Profile(
        {"f": Cost(15, 0, 5, "measured"), "c": Cost(1, 100, 7, "measured")},
        Slowdown(1300, 1500),
        {"device": "one"},
    )
    assert merge_profiles([one]) == one


def test_ranks_whose_loads_differ_decide_where_that_counts():
    def rank(*ns: int) -> Profile:
        return Profile({f"op{i}": Cost(each) for i, each in enumerate(ns)})

    alike = [rank(100, 100), rank(101, 99), rank(99, 102)]
    assert unlike_ranks(alike) == []  # noise
    assert unlike_ranks([rank(100, 100), rank(50, 50)]) == []  # the slowest says all
    turns = [rank(100, 10), rank(10, 90), rank(50, 50), rank(95, 12)]
    assert unlike_ranks(turns) == [turns[0], turns[1]]
    many = [rank(*(100 if i == r else 1 for i in range(8))) for r in range(8)]
    assert len(unlike_ranks(many)) == 4


def test_profiles_travel_between_ranks_unchanged():
    profile = Profile({"f": Cost(10, 20, 30, "measured")}, Slowdown(1100, 1500), {"torch": "2"})
    sent = json.dumps(agreement.packed(profile))
    assert agreement._unpacked(json.loads(sent)) == profile


# --- what does not fit, and solvers that fail ---------------------------------------------------

CHAIN = """
    f F | x   > h  | 1
    g F | h   > k  | 1
    m F | k   > y  | 1
    e I | t k > dk | 1
    d I | dk h > dx | 1
"""


def chain(budget_bytes: int | None) -> Problem:
    sizes = {"h": 100, "k": 100, "y": 100, "dk": 100, "dx": 100}
    return replace(tiny(CHAIN, "dx", sizes=sizes), budget_bytes=budget_bytes)


def test_what_cannot_fit_names_the_budget_that_does():
    with pytest.raises(Infeasible) as error:
        solve(chain(199))
    assert str(error.value) == (
        "no plan fits memory_budget=199 bytes; the smallest budget that works here is 300 bytes: "
        "pass memory_budget=300 or more, or make the batch smaller"
    )
    assert (error.value.budget_bytes, error.value.smallest_bytes) == (199, 300)
    assert simulate(chain(300), solve(chain(300))).peak_bytes == 300


def test_a_solver_that_crashes_costs_one_warning(monkeypatch):
    def crash(*args: object, **kwargs: object) -> None:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(road, "solve", crash)
    problem = chain(None)
    with pytest.warns(RuntimeWarning) as caught:
        plan = road._solve(problem, "overlap", ())
    assert [str(warning.message) for warning in caught] == [
        "overlapc: solver 'overlap' failed (ZeroDivisionError('oops')); "
        "its baselines are used instead"
    ]
    assert plan == best_baseline(problem)
    with (
        pytest.warns(RuntimeWarning, match="failed"),
        pytest.raises(Infeasible, match="budget that works here is 300"),
    ):
        road._solve(chain(10), "overlap", ())


def test_an_illegal_plan_of_a_solver_is_a_crash(monkeypatch):
    def wrong(*args: object, **kwargs: object) -> None:
        raise InvalidPlan("f0 is issued twice")

    monkeypatch.setattr(road, "solve", wrong)
    problem = chain(None)
    with pytest.warns(RuntimeWarning, match="its baselines are used"):
        assert road._solve(problem, "opt", ()) == best_baseline(problem)


@pytest.mark.parametrize("error", [Infeasible(1, 2), OptionError("no")])
def test_what_a_solver_says_on_purpose_is_passed_on(monkeypatch, error):
    def refuse(*args: object, **kwargs: object) -> None:
        raise error

    monkeypatch.setattr(road, "solve", refuse)
    with pytest.raises(type(error)) as caught:
        road._solve(chain(None), "overlap", ())
    assert caught.value is error


# --- explain ------------------------------------------------------------------------------------


def report(problem: Problem, order: str = "", saved: str = "") -> Report:
    plan = plan_of(problem, order, saved)
    return Report("gpt", problem, plan, simulate(problem, plan))


STEP = """
    gather  F tp | x       > raw   | 0 + 3_000_000
    wait_g  F    | raw     > whole
    mm      F    | whole   > y     | 4_000_000
    grad    I    | t whole > dx    | 4_000_000
    reduce  I tp | dx      > part  | 10_000 + 3_000_000
    wait_r  I    | part    > dxs
    weight  W    | t whole > dw    | 2_000_000
    bias    W    | t       > db    | 1_500_000
"""
SIZES = {"raw": 4_000_000, "whole": 4_000_000, "y": 8_000_000}


def test_explain_says_for_each_collective_what_hides_it_and_why_not_more():
    problem = replace(tiny(STEP, "y dxs dw db", sizes=SIZES), budget_bytes=16_000_000)
    # fmt: off
    assert report(
        problem, "gather wait_g mm R:gather R:wait_g grad reduce weight wait_r bias"
    ).explain() == """\
gpt: 8 ops, solver by hand, costs default; every figure below is predicted
  step 18.5 ms (plain order, all saved: 17.5 ms; lower bound: 14.5 ms)
  exposed communication 7.0 of 9.0 ms, recompute 0.0 ms
  peak 16.0 MB of 16.0 MB (all saved: 12.0 MB)
  collective  group  ms   exposed  hidden by  why not more
  gather      tp     3.0  3.0      -          forward: all that follows needs it (mm)
  R:gather    tp     3.0  3.0      -          1.5 ms of ready work is kept for later windows, or by memory
  reduce      tp     3.0  1.0      W 2.0      1.5 ms of ready work is kept for later windows, or by memory"""  # noqa: E501
    assert report(
        problem, "gather wait_g mm bias R:gather R:wait_g grad reduce weight wait_r"
    ).explain().splitlines()[-2:] == [
        "  R:gather    tp     3.0  3.0      -          nothing else is ready: grad needs it",
        "  reduce      tp     3.0  1.0      W 2.0      nothing else is ready: end needs it",
    ]
    assert report(
        problem, "gather wait_g mm grad reduce weight bias wait_r", "whole"
    ).explain().splitlines()[-1] == (
        "  reduce      tp     3.0  0.0      W 3.5"
    )
    # fmt: on


def test_explain_without_collectives():
    text = report(tiny("f F | x > y | 1500", "y")).explain()
    assert text.splitlines()[1] == (
        "  step 0.002 ms (plain order, all saved: 0.002 ms; lower bound: 0.002 ms)"
    )
    assert text.splitlines()[-1] == "  no collectives"


def test_explain_takes_a_collective_of_two_waits_of_which_only_the_second_runs_again():
    problem = tiny(
        """
        both   F tp | x   > r s | 0 + 100_000
        wait_r F    | r   > R
        wait_s F    | s   > S
        d      I    | t S > dx  | 1
        """,
        "R dx",
    )
    text = report(problem, "both wait_r wait_s R:both R:wait_s d").explain()
    assert "nothing else is ready: d needs it" in text


@settings(max_examples=60)
@given(st.data())
def test_explain_has_a_row_for_each_collective_of_any_plan(data):
    problem = data.draw(problems())
    plan = data.draw(legal_plans(problem))
    timeline = simulate(problem, plan)
    lines = Report("g", problem, plan, timeline).explain().splitlines()
    assert len(lines) == 4 + 1 + len(timeline.exposures)
    for line, exposure in zip(lines[5:], timeline.exposures, strict=False):
        assert line.startswith(f"  {exposure.issue} ")


# --- public names -------------------------------------------------------------------------------


def test_public_names_are_promised_once():
    """`__all__`, what type checkers see, and what dir() shows."""
    source = ast.parse((ROOT / "overlapc" / "__init__.py").read_text(encoding="utf-8"))
    seen = [
        alias.name
        for node in ast.walk(source)
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("overlapc.")
        for alias in node.names
    ]
    assert sorted(seen) == overlapc.__all__ == dir(overlapc)
    with pytest.raises(AttributeError, match="module 'overlapc' has no attribute 'magic'"):
        overlapc.magic  # noqa: B018


@pytest.mark.parametrize(
    "name", [n for n in overlapc.__all__ if overlapc._LATER.get(n) != "overlapc.api"]
)
def test_public_names_without_torch_resolve(name):
    assert not isinstance(getattr(overlapc, name), ModuleType)


def test_the_readme_is_short():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len([word for word in readme.split() if re.search(r"\w", word)]) <= 600


def test_the_readme_names_only_what_is_public():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"\boverlapc\.(\w+)", readme))
    modules = {path.stem for path in (ROOT / "overlapc").iterdir()}
    assert {"optimize", "predict"} <= named
    assert named - set(overlapc.__all__) <= modules
