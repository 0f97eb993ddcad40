"""The numbers that steer the solvers: those of `constants.py`, and menus that stand where they are
tried. Either may only become fewer."""

from __future__ import annotations

import ast
from pathlib import Path

from overlapc.solvers import constants

FOLDER = Path(__file__).parents[2] / "overlapc" / "solvers"
NAMES = {
    "ACTIONS", "AT_BOUND", "EVALUATIONS", "EXACT", "EXPOSED", "FEW", "GAP", "LADDER", "LARGE",
    "MERGED", "NEAR", "OVERSHOOT", "REACH", "ROOM", "RUNGS", "SEARCHED", "SECONDS", "SMALL",
    "STEPS",
    "THRIFT",
}  # fmt: skip
# How many numbers but 0, 1 and 2 stand in a file beside units and tolerances.
MENUS = {
    "baselines.py": 5,
    "exact.py": 1,
    "filling.py": 2,
    "heu.py": 3,
    "keep.py": 2,
    "listing.py": 0,
    "merging.py": 22,
    "opt.py": 20,
    "overlap.py": 13,
    "period.py": 4,
    "placing.py": 2,
    "rows.py": 8,
    "slices.py": 2,
}
# Thousandths, scales of programs and what they round, kinds of actions, endless, `solve`'s promise.
UNITS = {3, 60, 62, 1000, 0.001, 100.0, 0.5, 1e6, 1e9, 1e-9, 1e-6}


def numbers(path: Path) -> list[float]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    return [n for n in found if type(n) in (int, float) and n not in (0, 1, 2)]


def test_the_numbers_that_steer_are_named() -> None:
    there = {name for name, value in vars(constants).items() if isinstance(value, int | float)}
    assert there == NAMES


def test_menus_become_no_longer() -> None:
    for path in FOLDER.rglob("*.py"):
        if path.name != "constants.py":
            found = [n for n in numbers(path) if n not in UNITS]
            assert len(found) <= MENUS.get(path.name, 0), (path.name, found)
