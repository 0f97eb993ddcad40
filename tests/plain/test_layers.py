"""The layers hold: the core and the solvers never import torch, the runtime never a solver."""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CORE = ["ir", "text", "check", "machine", "simulate", "errors", "flags", "progress"]


def imports(path: Path) -> set[str]:
    """Every module a file names in an import, at any depth, relative ones made absolute.

    `from a import b` counts as both `a` and `a.b`, since `b` may be a module.
    """
    package = path.relative_to(ROOT).parts[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parts = list(package[: len(package) - node.level + 1]) if node.level else []
            module = ".".join(parts + ([node.module] if node.module else []))
            found |= {module} | {f"{module}.{alias.name}" for alias in node.names}
    return found


def offenders(files: list[Path], forbidden: str) -> list[str]:
    assert files
    return [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in files
        for name in sorted(imports(path))
        if name == forbidden or name.startswith(forbidden + ".")
    ]


def test_core_and_solvers_import_without_torch() -> None:
    program = (
        "import overlapc, overlapc.solvers, "
        + ", ".join(f"overlapc.{name}" for name in CORE)
        + "; import sys; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


def test_core_and_solvers_name_no_torch() -> None:
    files = [ROOT / "overlapc" / f"{name}.py" for name in CORE]
    solvers = sorted((ROOT / "overlapc" / "solvers").rglob("*.py"))
    assert solvers
    assert offenders(files + solvers, "torch") == []


def test_runtime_names_no_solver() -> None:
    files = sorted((ROOT / "overlapc" / "runtime").rglob("*.py"))
    assert offenders(files, "overlapc.solvers") == []


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
