"""One word, one thing; one idea, one room: what of that can be counted."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CODE = sorted((ROOT / "overlapc").rglob("*.py"))

# Classes of one name in two modules, and why.
TWICE = {
    "TrainStep": "a front door of `overlapc` and one of `overlapc.megatron`: people import either",
}
# Names that a folder takes from others, core and tools left out: no more than now, fewer later.
TAKEN = {"megatron": 111, "search": 63}


def test_a_class_name_stands_for_one_thing() -> None:
    rooms = defaultdict(set)
    for path in CODE:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                rooms[node.name].add(str(path.relative_to(ROOT)))
    assert {name for name, places in rooms.items() if len(places) > 1} == set(TWICE)


@pytest.mark.parametrize("folder", TAKEN)
def test_a_folder_takes_few_names_from_others(folder: str) -> None:
    taken = set()
    for path in (ROOT / "overlapc" / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            module = getattr(node, "module", None) or ""
            home = module.removeprefix("overlapc.").split(".")[0]
            own = not module.startswith("overlapc.") or home in (folder, "core", "tools")
            if isinstance(node, ast.ImportFrom) and not own:
                taken |= {f"{module}.{alias.name}" for alias in node.names}
    print(folder, len(taken))
    assert len(taken) <= TAKEN[folder]


# How names of copies and of recompute are written; who asks calls a function of these two modules.
SPELLINGS = re.compile(
    r'artition\("@"\)|startswith\((RECOMPUTE|"R:")\)|(ffix|endswith)\((ADD|"_add")\)'
)
SPELLED = ("core/ir.py", "core/merge.py", "core/simulate.py", "core/valid.py")


def test_a_name_is_read_where_it_is_made() -> None:
    found = {
        str(path.relative_to(ROOT / "overlapc"))
        for path in CODE
        if SPELLINGS.search(path.read_text(encoding="utf-8"))
    }
    # The names of modules in Dynamo's stacks have an "@", too.
    assert found - {"sharded/lowered.py"} <= set(SPELLED)


def test_one_function_warns_and_finds_the_users_line() -> None:
    """No `stacklevel` is counted by hand."""
    found = [path.name for path in CODE if "warnings.warn(" in path.read_text(encoding="utf-8")]
    assert found == ["told.py"]


def test_no_call_spreads_a_tuple_that_was_packed_for_it() -> None:
    """`what = a, b` and then `f(*what)` hides which argument is which."""
    found = []
    for path in CODE:
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(function, ast.FunctionDef):
                spread = {
                    arg.value.id
                    for call in ast.walk(function)
                    if isinstance(call, ast.Call)
                    for arg in call.args
                    if isinstance(arg, ast.Starred) and isinstance(arg.value, ast.Name)
                }
                found += [f"{path.name}: {name}" for name in spread & packed_in(function)]
    assert found == []


def packed_in(function: ast.FunctionDef) -> set[str]:
    """Names that are a tuple of several expressions throughout the function: no menus of
    constants, no results that are put together."""
    values = defaultdict(list)
    for node in ast.walk(function):
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            for target in getattr(node, "targets", None) or [getattr(node, "target", None)]:
                if isinstance(target, ast.Name):
                    values[target.id].append(node.value)
    return {name for name, (one, *more) in values.items() if not more and is_packed(one)}


def is_packed(value: ast.expr) -> bool:
    if not isinstance(value, ast.Tuple):
        return False
    kinds = (ast.Constant, ast.Starred)
    return not any(isinstance(part, kinds) for part in value.elts) and len(value.elts) > 1


def test_the_glossary_says_where_each_thing_is() -> None:
    rows = re.findall(
        r"^\| (.+?) \| .+ \| `(.+?)` \|$", (ROOT / "docs/glossary.md").read_text(), re.M
    )
    words = [word for row, _ in rows for word in row.split(", ")]
    assert len(words) == len(set(words)) > 40
    for word, place in rows:
        path, _, name = place.partition("::")
        text = (ROOT / path).read_text(encoding="utf-8")
        assert not name or f"\nclass {name}" in text, word


def test_the_list_of_long_tests_names_tests() -> None:
    listed = (ROOT / "tests" / "long.txt").read_text(encoding="utf-8").splitlines()
    assert listed == sorted(set(listed))
    texts = {name: (ROOT / name).read_text(encoding="utf-8") for name in map(file_of, listed)}
    assert [i for i in listed if f"def {function_of(i)}(" not in texts[file_of(i)]] == []


def file_of(test: str) -> str:
    return test.partition("::")[0]


def function_of(test: str) -> str:
    return test.partition("::")[2].partition("[")[0]
