"""`python -m overlapc.megatron`: what stands before the script are options, what stands behind it
is the script's; and what is wrong is said in one line."""

from __future__ import annotations

import sys

import pytest

from overlapc.megatron.__main__ import main, split


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


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "found no script; expected: torchrun"),
        (["--solver", "heu"], "found no script"),
        (["--solver"], "option '--solver': found no value behind it"),
        (["--solver", "--merge", "false", "x.py"], "option '--solver': found no value behind it"),
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
