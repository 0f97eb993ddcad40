"""`python -m overlapc.megatron`: what stands before the script are options, what stands behind it
is the script's; and what is wrong is said in one line."""

from __future__ import annotations

import inspect
import re
import sys

import pytest

from overlapc.megatron import patch
from overlapc.megatron.__main__ import main, split
from overlapc.planning.options import DEFAULTS, REFUSED


def test_options_end_at_the_script() -> None:
    words = [
        "--memory-budget",
        "8GB",
        "--solver=heu",
        "--merge",
        "false",
        "train.py",
        "--solver",
        "x",
    ]
    options, script, rest = split(words)
    assert options == {"memory_budget": "8GB", "solver": "heu", "merge": False}
    assert (script, rest) == ("train.py", ["--solver", "x"])


@pytest.mark.parametrize("words", [["--help"], ["-h"], ["--solver", "heu", "--help", "x.py"]])
def test_help_lists_every_option(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    main(words)
    printed = capsys.readouterr().out
    listed = re.findall(r"^  --([\w-]+) ", printed, flags=re.M)
    own = [name for name in inspect.signature(patch).parameters if name != "options"]
    taken = [name for name in DEFAULTS if name not in REFUSED["megatron"]]
    assert sorted(each.replace("-", "_") for each in listed) == sorted([*taken, *own])
    assert max(map(len, printed.splitlines())) <= 100


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "found no script; expected: torchrun"),
        (["--solver", "heu"], "found no script"),
        (["--solver"], "option '--solver': found no value behind it"),
        (["--solver", "--merge", "false", "x.py"], "option '--solver': found no value behind it"),
        (["--memory-budget", "40", "GB", "x.py"], "expected one word: --memory-budget 40GB"),
        (["--memory-budget=40", "gib", "x.py"], "expected one word: --memory-budget 40gib"),
        (["-s", "heu", "x.py"], "option '-s': found one dash"),
        (["nowhere.py"], "script 'nowhere.py': found no such file"),
        (["--memory", "8GB", __file__], "option 'memory': expected one of memory_budget, solver"),
        (["--backend", "inductor", __file__], "backend='inductor': megatron runs"),
        (["--memory-budget", "8 apples", __file__], "memory_budget='8 apples': expected a number"),
        (["--search", "nowhere.json", __file__], "nowhere.json"),
    ],
    ids=str,
)
def test_what_is_wrong_is_said_in_one_line(
    words: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["overlapc.megatron", *words])
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert str(caught.value.code).startswith("overlapc: ")
    assert said in str(caught.value.code)
