"""Options: one dataclass for every front door. They print, parse, and say what means nothing."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlapc.core.errors import FileError, OptionError
from overlapc.core.files import save_plan
from overlapc.core.ir import Plan
from overlapc.planning.options import ALIKE, REFUSED, Options

PLAN = Plan("0123456789abcdef", 'by "hand"', ("a b",), ("f", "g", "R:f"), bound_ns=5)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (Options(), ""),
        (Options(memory_budget="8GB", solver="heu"), "memory_budget=8GB solver=heu"),
        (Options(memory_budget=0.5, timeout_s=30), "memory_budget=0.5 timeout_s=30"),
        (Options(memory_budget="8 GB", cache=True), 'memory_budget="8 GB" cache=true'),
        (Options(cache="true", dynamic=False), 'cache="true" dynamic=false'),
        (Options(cache=False, verify=True), "cache=false verify=true"),
        (Options(profile="estimate", hardware="mine.toml"), "profile=estimate hardware=mine.toml"),
    ],
)
def test_options_print_what_is_not_as_ever(options: Options, text: str) -> None:
    assert str(options) == text
    assert Options.parse(text) == options


@given(
    st.builds(
        Options,
        memory_budget=st.none()
        | st.integers(min_value=1)
        | st.floats(min_value=1e-6, max_value=1e6)
        | st.sampled_from(["8GB", " 1.5 KiB\n"]),
        solver=st.sampled_from(["overlap", "heu", "none"]),
        hardware=st.text(),
        cache=st.none() | st.booleans() | st.text(),
        timeout_s=st.integers(1, 99) | st.floats(0.5, 100.0),
        plan=st.sampled_from([None, PLAN]),
        dynamic=st.none() | st.booleans(),
        verify=st.booleans(),
    )
)
def test_what_options_print_parses(options: Options) -> None:
    assert Options.parse(str(options)) == options


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"memory_budget": "8"}, "memory_budget='8': expected a number and a unit"),
        ({"memory_budget": 0}, "memory_budget=0: expected more than 0 bytes"),
        ({"solver": "best"}, "solver='best': expected one of overlap, heu, opt, none"),
        ({"backend": "aot"}, "backend='aot': expected one of eager, inductor"),
        ({"profile": "guess"}, "profile='guess': expected one of measure, estimate"),
        ({"hardware": 5}, "hardware=5: expected a preset or a file's path"),
        ({"plan": 5}, "plan=5: expected a Plan or the path of a saved one"),
        ({"plan": []}, "plan=[]: found no plan, expected a Plan or the path of a saved one"),
        ({"plan": [PLAN] * 4}, "plan: found 4, expected one, one of two merged, and one of a pair"),
        ({"timeout_s": "7"}, "timeout_s='7': expected more than 0 seconds"),
        ({"timeout_s": 0}, "timeout_s=0: expected more than 0 seconds"),
        ({"cache": 5}, "cache=5: expected True, False, None or a file's path"),
        ({"dynamic": "no"}, "dynamic='no': expected True, False or None"),
        ({"verify": 1}, "verify=1: expected True or False"),
        ({"slices": 0}, "slices=0: expected a number of slices, 1 or more"),
        ({"slices": "many"}, "slices='many': expected a number of slices, 1 or more, or \"auto\""),
        ({"memory_budgt": 1}, "option 'memory_budgt': expected one of memory_budget, solver"),
        ({"known": {}}, "option 'known': expected one of memory_budget"),
        ("solver", "options 'solver': expected name=value"),
        ('solver="heu', "options 'solver=\"heu': expected name=value"),
    ],
)
def test_what_means_nothing_is_named(given: Any, said: str) -> None:
    with pytest.raises(OptionError, match=re.escape(said)):
        Options.parse(given)


@pytest.mark.parametrize(
    ("door", "given", "said"),
    [
        ("torch.compile", {"dynamic": True}, "takes it as an argument of its own"),
        ("torch.compile", {"verify": True}, "overlapc.optimize does"),
        ("TrainStep", {"backend": "inductor"}, "runs the ops of its graphs itself"),
        ("TrainStep", {"dynamic": False}, "plans each shape for itself"),
        ("Pipeline", {"dynamic": True}, "plans each shape for itself"),
        ("Pipeline", {"verify": True}, "overlapc.optimize does"),
        ("optimize", {"plan": [PLAN, PLAN]}, "merges nothing"),
        ("torch.compile", {"plan": [PLAN, PLAN]}, "merges nothing"),
    ],
)
def test_a_front_door_says_what_it_does_not_take(door: str, given: Any, said: str) -> None:
    (name,) = given
    with pytest.raises(OptionError, match=f"^{name}=.*: {door} .*{said}"):
        Options.parse(given, door)


@pytest.mark.parametrize("door", REFUSED)
def test_every_front_door_takes_what_is_as_ever(door: str) -> None:
    given = {"backend": "eager", "dynamic": None, "verify": False, "plan": None, "slices": 1}
    assert Options.parse(given, door) == Options()


def test_slices_are_for_what_runs_whole_batches() -> None:
    for door in ("TrainStep", "optimize", "Pipeline", "megatron"):
        assert str(Options.parse("slices=2", door)) == "slices=2"
        assert Options.parse("slices=auto", door).slices == "auto"
    compiled = r"slices=2: torch\.compile cuts no batch; opt.*expected it left out"
    with pytest.raises(OptionError, match=compiled):
        Options.parse("slices=2", "torch.compile")
    for other in ("backend=inductor", "dynamic=true", "verify=true"):
        with pytest.raises(OptionError, match=r"with slices optimize .*; expected it left out"):
            Options.parse(f"slices=2 {other}")
    with pytest.raises(OptionError, match="found solver twice"):
        Options.parse("solver=heu solver=opt", "TrainStep")


def test_a_plan_is_one_or_its_text_or_a_file_of_it(tmp_path: Path) -> None:
    path = tmp_path / "plan.txt"
    save_plan(path, PLAN)
    for one in (PLAN, path, str(path), [path], path.read_text()):
        assert Options(plan=one) == Options(plan=PLAN)
    assert Options.parse(f"plan={path}").plans == (PLAN,)
    two = Options.parse({"plan": [str(path), PLAN]}, "TrainStep")
    assert two.plans == (PLAN, PLAN)
    assert Options.parse(str(two), "TrainStep") == two
    with pytest.raises(FileError, match="cannot read the plan"):
        Options(plan=tmp_path / "none.txt")


def test_ranks_agree_on_all_but_where_files_lie_and_how_long_to_wait() -> None:
    mine = Options(solver="heu", cache="mine", timeout_s=5, hardware="mine.toml")
    assert mine.text(ALIKE) == "solver=heu"
    assert Options(plan=PLAN).text(ALIKE) != Options(plan=replace(PLAN, saved=())).text(ALIKE)
