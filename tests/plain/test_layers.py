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


# A module is in the layer of its own name, if that is here, else in that of its folder. A folder
# stands for all in it. "overlapc" is the package itself, which imports all else when it is first
# asked for.
LAYERS = {
    # The core: what a plan, a schedule and their files are, and what makes them right.
    "core": Layer(),
    "core.door": Layer(),
    "core.errors": Layer(),
    "core.record": Layer(),
    "core.ir": Layer("core.errors core.record"),
    "core.valid": Layer("core.errors core.ir"),
    "core.text": Layer("core.errors core.ir core.valid"),
    "core.files": Layer("core.errors core.ir core.text"),
    "core.check": Layer("core.errors core.ir"),
    "core.machine": Layer("core.ir"),
    "core.ledger": Layer(),
    "core.simulate": Layer("core.errors core.ir core.ledger core.machine"),
    "core.merge": Layer("core.ir core.valid"),
    "core.schedule": Layer("core.errors core.record"),
    "core.pipeline": Layer("core.errors core.ledger core.machine core.record core.schedule"),
    "core.stages": Layer("core.ir core.ledger core.pipeline core.simulate"),
    # What knows nothing of plans.
    "tools": Layer(),
    "tools.functions": Layer("core.errors"),
    "tools.timing": Layer("core.errors"),
    "tools.issued": Layer("torch"),
    # What finds plans and schedules.
    "solvers": Layer("core tools"),
    # The road, from a captured graph to a plan. It calls what needs torch.
    "planning": Layer("core solvers tools", "passes profiler ranks report"),
    # torch, one process.
    "nn": Layer("torch"),
    "state": Layer("core tools torch"),
    "passes": Layer("core nn state tools torch"),
    "profiler": Layer("core emulate passes tools torch"),
    "profiler.cache": Layer("core tools"),
    "profiler.hardware": Layer("core emulate"),
    "profiler.known": Layer(""),
    "profiler.link_spec": Layer("core emulate"),
    "profiler.shapes": Layer(""),
    "profiler.work": Layer("emulate"),
    "profiler.link_model": Layer("core emulate"),
    # torch and processes. The runtime calls the road, never a solver.
    "emulate": Layer("core tools torch"),
    "emulate.model": Layer("core"),
    "runtime": Layer("api core nn passes planning profiler ranks sharded state tools torch"),
    "sharded": Layer("core passes torch"),
    # How ranks agree, and who is dead, late or disagrees. Everything that runs uses it.
    "ranks": Layer("core passes tools torch"),
    "ranks.guard": Layer("core tools"),
    "ranks.here": Layer("tools"),
    "ranks.presence": Layer(),
    # Which layout of a cluster, without running it.
    "search": Layer("core planning profiler solvers tools", "nn passes torch"),
    "search.groups": Layer("core torch"),
    "search.frameworks.context": Layer("nn torch"),
    "search.models.modules": Layer("nn torch"),
    "search.models.own": Layer("core passes profiler tools torch"),
    # Predictions beside published runs.
    "validation": Layer("core profiler search"),
    # Megatron's own scripts, planned. megatron is imported when it is patched.
    "megatron": Layer("core passes planning ranks runtime search solvers state tools torch"),
    # What people see.
    "report": Layer("core planning search solvers validation"),
    "cli": Layer(
        "core planning profiler report search solvers tools validation",
        "ranks runtime torch",
    ),
    "__main__": Layer("cli"),
    "api": Layer("core passes planning ranks runtime sharded tools torch"),
    # Loops of libraries that hold the model themselves.
    "integrations": Layer("api core planning runtime tools torch"),
    "torchtitan": Layer("core integrations passes planning ranks runtime tools torch"),
    "overlapc": Layer("core", "api planning runtime search solvers"),
}
APART = {"core", "tools"}  # folders whose modules import what their own layer says alone
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
    own = layer_of(module)
    layer, folder = LAYERS[own], own.partition(".")[0]
    mine = {own} if folder in APART else {own, folder}
    for loaded, allowed in ((True, layer.loaded), (False, f"{layer.loaded} {layer.later}")):
        names = {layer_of(name) for name in modules_of(imports(MODULES[module], loaded))}
        may = mine | set(allowed.split())
        assert {n for n in names if n not in may and n.partition(".")[0] not in may} == set()


def test_the_docs_say_where_to_begin_in_every_folder() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    table = text.partition("## Where to begin")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `([\w/]+)/` \| `([\w.]+)` ", table, flags=re.M)
    first = {folder: ROOT / "overlapc" / folder / name for folder, name in rows}
    base = ROOT / "overlapc"
    folders = {path.parent.relative_to(base).as_posix() for path in MODULES.values()} - {"."}
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


# Imports that close a circle: in a function, or for types. All others count as those at the top.
CIRCLES = {
    (
        "planning.report",
        "report.explain",
    ): "`Report.explain()` is a front door: people ask a report",
    ("runtime.train_step", "runtime.slicing.auto"): "`TrainStep(slices='auto')` is another class",
    ("search.models.transformer", "search.models.modules"): "blocks are torch's, made when asked",
    ("solvers.bound.moments", "solvers.bound.program"): "rows of one program, in two files: a type",
}


def test_no_imports_go_round_in_a_circle() -> None:
    """Of modules, lazy imports and those for types included. A folder whose __init__ imports
    nothing is in no circle."""
    graph = {name: modules_of(imports(path)) - {name} for name, path in MODULES.items()}
    for here, there in CIRCLES:
        graph[f"overlapc.{here}"].remove(f"overlapc.{there}")
    done: set[str] = set()

    def visit(name: str, way: tuple[str, ...]) -> None:
        assert name not in way, " imports ".join([*way[way.index(name) :], name])
        if name not in done:
            for other in sorted(graph.get(name, ())):
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
