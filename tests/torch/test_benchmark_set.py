"""The benchmark set's generator makes again what is kept of it."""

from __future__ import annotations

import subprocess
import sys
import zlib
from pathlib import Path

import pytest
import torch

from overlapc.core.simulate import simulate
from overlapc.solvers import solve
from tests.multiprocess.spawn import run_ranks

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(
    not torch.__version__.startswith("2.13."), reason="graphs differ from release to release"
)


def generated(*arguments: str) -> dict[str, str]:
    """Name -> line, of what the generator prints."""
    command = [sys.executable, "benchmarks/problems.py", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    return {line.split()[0]: line for line in done.stdout.splitlines()}


def test_small_problems_are_those_kept_as_text():
    lines = generated("--small")
    texts = sorted((ROOT / "tests/plain/problems").glob("*.txt"))
    assert sorted(lines) == sorted(path.stem for path in texts)
    for path in texts:
        assert f"crc {zlib.crc32(path.read_bytes()):08x}" in lines[path.stem]


@pytest.mark.slow
def test_the_set_is_as_listed():
    kept = (ROOT / "benchmarks/set.txt").read_text().splitlines()
    assert list(generated().values()) == kept


def deep(rank: int, ranks: int) -> list[int]:
    """What heu's and block's plans of a deep stage take. Building it changes the process."""
    from benchmarks.problems import Case, Stage, build

    problem = build(Case(Stage("20B", 24, 8, 2048, 8), "h100-sxm", 1, 0.0))
    return [simulate(problem, solve(problem, each)).step_ns for each in ("heu", "block")]


@pytest.mark.slow
def test_where_nothing_of_many_blocks_fits_heu_plans_without_them():
    """The smallest budget of a deep stage: some blocks must keep much and others nothing."""
    ((heu, block),) = run_ranks(deep, 1)
    assert heu < 0.92 * block


def steps(rank: int, ranks: int, name: str) -> list[int]:
    """What overlap's and heu's plans of a case take. Building it changes the process."""
    from benchmarks.problems import build, cases

    problem = build(next(case for case in cases() if case.name == name))
    return [simulate(problem, solve(problem, each)).step_ns for each in ("overlap", "heu")]


def test_overlap_is_no_slower_than_heu_where_memory_is_least() -> None:
    """Of what its programs find equally good there, little fits once it is in order."""
    ((overlap, heu),) = run_ranks(steps, 1, "1.3B-8L-x2-s2048-b8-a100-sxm-80-f1-m0")
    assert overlap <= heu
