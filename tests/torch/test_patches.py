"""The list of what is replaced is whole, and the installed PyTorch has all of it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from overlapc.passes.exact.patches import PATCHES, missing

CODE = Path(__file__).parents[2] / "overlapc"
# Attributes of the model's own modules.
OF_MODELS = {"current_microbatch", "is_first_microbatch", "forward", "_comm_manager"}


def replaced_in(path: Path) -> Iterator[str]:
    """Names in calls of `replaced` ("": no literal), and in changes that a trace makes."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("replaced", "_swapped"):
            yield literal(node.args[1])
        change = isinstance(node, ast.Yield) and isinstance(node.value, ast.Tuple)
        if path.parent.name == "megatron" and change and (name := literal(node.value.elts[1])):
            yield name


def literal(node: ast.expr) -> str:
    return str(node.value) if isinstance(node, ast.Constant) else ""


def test_what_is_replaced_is_in_the_list() -> None:
    left_out = []
    for path in CODE.rglob("*.py"):
        where = path.relative_to(CODE).as_posix()
        ends = [patch.target.replace(":", ".") for patch in PATCHES if patch.where == where]
        for name in set(replaced_in(path)) - OF_MODELS:
            if not any(end.endswith(f".{name}" if name else "") for end in ends):
                left_out.append((where, name))
    assert left_out == []


def test_the_list_names_files_that_are_there() -> None:
    assert {patch.where for patch in PATCHES if not (CODE / patch.where).exists()} == set()


def test_this_pytorch_has_all_of_it() -> None:
    assert missing("torch") == []
