"""No file of overlapc is longer than a reading, no function longer than a screen.

What is longer than that today is listed with its lines: the list may only shrink.
"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILE_LINES, FUNCTION_LINES = 600, 80
LONG_FILES: dict[str, int] = {}
LONG_FUNCTIONS: dict[str, int] = {}


def files() -> dict[str, str]:
    folder = ROOT / "overlapc"
    return {
        path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8")
        for path in sorted(folder.rglob("*.py"))
    }


def test_no_file_is_too_long() -> None:
    found = {name: text.count("\n") for name, text in files().items()}
    assert too_long(found, FILE_LINES, LONG_FILES) == []


def test_no_function_is_too_long() -> None:
    found = {
        f"{name}::{node.name}": (node.end_lineno or 0) - node.lineno + 1
        for name, text in files().items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert too_long(found, FUNCTION_LINES, LONG_FUNCTIONS) == []


def too_long(found: dict[str, int], limit: int, known: dict[str, int]) -> list[str]:
    return [
        f"{name}: {lines} lines, expected at most {known.get(name, limit)}"
        for name, lines in found.items()
        if lines > known.get(name, limit)
    ]


def test_the_tests_that_take_long_are_there() -> None:
    for test in (ROOT / "tests" / "long.txt").read_text(encoding="utf-8").splitlines():
        path, _, name = test.partition("::")
        assert f"def {name.partition('[')[0]}(" in (ROOT / path).read_text(encoding="utf-8"), test
