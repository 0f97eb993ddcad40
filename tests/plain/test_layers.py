"""What may import what: one table of layers that names every module of overlapc."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Layer:
    """What a folder or module may import: `loaded` when it is imported itself, `later` only in
    functions, when they are called, or for types. What does not name torch is free of it."""

    loaded: str = ""
    later: str = ""


# A module is in the layer of its own name, if that is here, else in that of its folder.
# "overlapc" is the package itself, which imports all else when it is first asked for.
LAYERS = {
    # The core: what a plan, a schedule and their files are, and what makes them right.
    "errors": Layer(),
    "flags": Layer(),
    "progress": Layer(),
    "timing": Layer("errors"),
    "collecting": Layer(),
    "functions": Layer("errors"),
    "record": Layer(),
    "shared_changes": Layer(),
    "digest": Layer("", "ir"),
    "ir": Layer("digest errors record"),
    "valid": Layer("errors ir"),
    "text": Layer("errors ir valid"),
    "files": Layer("errors ir text"),
    "check": Layer("errors ir"),
    "machine": Layer("ir"),
    "ledger": Layer(),
    "simulate": Layer("errors ir ledger machine"),
    "merge": Layer("ir valid"),
    "ranges": Layer("errors ir merge valid"),
    "schedule": Layer("errors record"),
    "pipeline": Layer("errors ledger machine record schedule"),
    "stages": Layer("ir ledger pipeline simulate"),
    # What finds plans and schedules.
    "solvers": Layer(
        "check collecting errors ir ledger machine merge pipeline progress ranges schedule simulate"
    ),
    # The road, from a captured graph to a plan. It calls what needs torch.
    "planning": Layer(
        "check collecting errors files flags ir merge pipeline progress record schedule simulate "
        "solvers stages text valid",
        "passes profiler ranks report runtime",
    ),
    "shares": Layer("errors ir ledger planning simulate solvers", "passes ranks runtime"),
    # torch, one process.
    "issued": Layer("torch"),
    "layers": Layer("torch"),
    "context": Layer("torch"),
    "passes": Layer("errors flags ir issued layers merge shared_changes stages torch valid"),
    "profiler": Layer("emulate errors ir passes timing torch"),
    "profiler.cache": Layer("errors files"),
    "profiler.hardware": Layer("emulate errors files ir"),
    "profiler.known": Layer(""),
    "profiler.link_spec": Layer("emulate ir"),
    "profiler.shapes": Layer(""),
    "profiler.work": Layer("emulate"),
    "profiler.link_model": Layer("emulate errors ir"),
    # torch and processes. The runtime calls the road, never a solver.
    "emulate": Layer("errors timing torch"),
    "emulate.model": Layer("errors"),
    "runtime": Layer(
        "api errors files flags functions ir layers merge passes pipeline planning profiler "
        "progress ranks schedule sharded shared_changes shares stages timing torch"
    ),
    "sharded": Layer("errors passes torch"),
    # How ranks agree, and who is dead, late or disagrees. Everything that runs uses it.
    "ranks": Layer("errors issued progress shared_changes torch"),
    "ranks.guard": Layer("errors shared_changes"),
    "ranks.here": Layer(),
    "ranks.presence": Layer(),
    # Which layout of a cluster, without running it.
    "search": Layer(
        "errors files ir merge pipeline planning profiler progress record schedule simulate "
        "solvers stages valid",
        "layers overlapc passes torch",
    ),
    "search.groups": Layer("errors torch"),
    "search.context": Layer("context layers torch"),
    "search.modules": Layer("layers torch"),
    "search.own": Layer("errors functions passes profiler torch"),
    # Megatron's own scripts, planned. megatron is imported when it is patched.
    "megatron": Layer(
        "collecting errors files ir issued passes planning ranks runtime search shared_changes "
        "simulate solvers stages torch"
    ),
    # What people see.
    "report": Layer(
        "check errors files ir merge pipeline planning schedule search simulate solvers valid",
    ),
    "cli": Layer(
        "errors files overlapc planning profiler progress report schedule search solvers",
        "ir pipeline ranks runtime text torch",
    ),
    "__main__": Layer("cli"),
    "api": Layer("errors files ir passes planning ranks runtime sharded torch"),
    # Loops of libraries that hold the model themselves.
    "integrations": Layer("api errors planning runtime torch"),
    "overlapc": Layer("check errors files ir simulate", "api planning runtime search solvers"),
}
OF_TORCH = {"torch", "triton"}  # triton needs a GPU: it is nowhere but beside torch


def imports(path: Path, loaded: bool = False) -> set[str]:
    """Every module a file names in an import, at any depth, relative ones made absolute; or those
    alone that are `loaded` with it, outside of functions and not only for types.

    `from a import b` counts as both `a` and `a.b`, since `b` may be a module.
    """
    package = path.relative_to(ROOT).parts[:-1]
    found = set()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in run_at_once(tree) if loaded else ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parts = list(package[: len(package) - node.level + 1]) if node.level else []
            module = ".".join(parts + ([node.module] if node.module else []))
            found |= {module} | {f"{module}.{alias.name}" for alias in node.names}
    return found


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {name_of(path): path for path in sorted((ROOT / "overlapc").rglob("*.py"))}


def layer_of(module: str) -> str:
    """The name of the module's layer: its own, or its folder's."""
    own = module.removeprefix("overlapc.")
    return own if own in LAYERS else own.partition(".")[0]


def modules_of(names: set[str]) -> set[str]:
    """The modules of overlapc that imported names are of, and torch where one is torch's."""
    found = {"torch" for name in names if name.partition(".")[0] in OF_TORCH}
    within = {name.rpartition(".")[0] for name in names}  # `from overlapc import ir` is of `ir`
    for name in names - within:
        parts = name.split(".")
        tops = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
        found |= set([top for top in tops if top in MODULES][:1])
    return found


def torch_free() -> list[str]:
    return [name for name in MODULES if "torch" not in LAYERS[layer_of(name)].loaded.split()]


def run_at_once(node: ast.AST) -> Iterator[ast.AST]:
    """What is run when a module is imported."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield child
            yield from run_at_once(child)


def test_every_module_has_a_layer_and_every_layer_a_module() -> None:
    layers = {layer_of(name) for name in MODULES}
    assert layers - set(LAYERS) == set(), "name these modules in the table"
    assert set(LAYERS) - layers == set(), "these are no more: take them out of the table"


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_what_its_layer_may(module: str) -> None:
    layer = LAYERS[layer_of(module)]
    own = layer_of(module).partition(".")[0]
    for loaded, allowed in ((True, layer.loaded), (False, f"{layer.loaded} {layer.later}")):
        found = modules_of(imports(MODULES[module], loaded))
        folders = {layer_of(name).partition(".")[0] for name in found}
        assert folders - {own, *allowed.split()} == set()


def test_the_docs_say_where_to_begin_in_every_folder() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    table = text.partition("## Where to begin")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `([\w/]+)/` \| `([\w.]+)` ", table, flags=re.M)
    first = {folder: ROOT / "overlapc" / folder / name for folder, name in rows}
    folders = {path.parent.name for path in MODULES.values()} - {"overlapc"}
    assert folders - set(first) == set()
    assert [
        str(path) for folder, path in first.items() if folder in folders and not path.is_file()
    ] == []


def test_the_files_that_the_docs_name_are_there() -> None:
    folders = ("overlapc", "tests", "benchmarks", "docs", "examples")
    files = [f"/{path.relative_to(ROOT)}" for each in folders for path in (ROOT / each).rglob("*")]
    for doc in ("architecture.md", "extending.md"):
        named = set(re.findall(r"`([\w/]+\.(?:py|md))`", (ROOT / "docs" / doc).read_text()))
        assert [name for name in named if not any(f.endswith(f"/{name}") for f in files)] == [], doc


def test_no_imports_go_round_in_a_circle() -> None:
    """Of modules, when they are imported; a folder whose __init__ is empty is in no circle."""
    loads = {name: modules_of(imports(path, loaded=True)) for name, path in MODULES.items()}
    done: set[str] = set()

    def visit(name: str, way: tuple[str, ...]) -> None:
        assert name not in way, " imports ".join([*way[way.index(name) :], name])
        if name not in done:
            for other in sorted(loads.get(name, ())):
                visit(other, (*way, name))
            done.add(name)

    for name in MODULES:
        visit(name, ())


def test_what_needs_no_torch_imports_none() -> None:
    program = f"import sys, {', '.join(torch_free())}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


def test_what_needs_no_torch_is_typed_strictly() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    strict = [
        pattern
        for section in project["tool"]["mypy"]["overrides"]
        if section.get("disallow_untyped_defs")
        for pattern in section["module"]
    ]

    def is_strict(name: str) -> bool:  # as mypy reads it, "a.*" is a too
        return any(fnmatch(name, p) or fnmatch(f"{name}.", p) for p in strict)

    assert [name for name in torch_free() if not is_strict(name)] == []


def test_what_the_docs_call_free_of_torch_is() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    layers = text.partition("## Layers")[2].partition("\n## ")[0]
    said = re.findall(r"`([\w.]+)/?`", layers.partition("torch-free")[0])
    free = {name for name, layer in LAYERS.items() if "torch" not in layer.loaded.split()}
    assert set(said) == {name for name in free if "." not in name} - {"overlapc"}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("import torch.fx", {"torch.fx"}),
        ("def f():\n    from torch import fx", {"torch", "torch.fx"}),
        ("from ..solvers import heu", {"overlapc.solvers", "overlapc.solvers.heu"}),
        ("from .. import solvers", {"overlapc", "overlapc.solvers"}),
        ("from . import pipeline", {"overlapc.runtime", "overlapc.runtime.pipeline"}),
    ],
)
def test_imports_sees_every_form(
    line: str, expected: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    path = tmp_path / "overlapc" / "runtime" / "sample.py"
    path.parent.mkdir(parents=True)
    path.write_text(line)
    assert imports(path) == expected


def repository_files() -> Iterator[Path]:
    """The project's own files: nothing hidden but .ci, no build outputs, no virtual environment."""
    for folder, subfolders, names in os.walk(ROOT):
        here = Path(folder)
        subfolders[:] = [
            name
            for name in subfolders
            if (name == ".ci" or not name.startswith("."))
            and name not in {"__pycache__", "build", "dist"}
            and not (here / name / "pyvenv.cfg").exists()
        ]
        yield from (here / name for name in names if name != ".git")  # a file in a worktree


def test_no_file_names_a_path_of_one_machine() -> None:
    machine_path = re.compile(rb"(?<![\w.})])/(?:work|root|home/\w+)/")
    named = [
        f"{path.relative_to(ROOT)}: {line.decode(errors='replace').strip()}"
        for path in repository_files()
        for line in path.read_bytes().splitlines()
        if machine_path.search(line)
    ]
    assert named == []
