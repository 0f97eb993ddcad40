"""Whoever waits for other ranks waits as long as the user's `timeout_s` says."""

from __future__ import annotations

import ast
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "overlapc"
# A call, and the place of `timeout_s` among its arguments.
WAITS = {"exchange_of": 1, "exchange_for": 1, "Exchange": 1}


def test_no_wait_leaves_the_timeout_out() -> None:
    """(The command line has no such option.)"""
    found = [
        f"{path.relative_to(FOLDER)}:{node.lineno}: {node.func.id}"
        for path in sorted(FOLDER.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        if path.parent.name != "cli"
        if node.func.id in WAITS and len(node.args) <= WAITS[node.func.id]
    ]
    assert found == []
