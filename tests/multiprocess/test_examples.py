"""The examples through their command lines, tiny: they run, learn, and agree with eager."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.megatron import cpu
from tests.multiprocess.spawn import PATIENCE

ROOT = Path(__file__).resolve().parents[2]
TINY = ["--link", "none", "--layers", "2", "--width", "32", "--batch", "2", "--seq", "32"]
pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(240)]


def run(example: str, *options: str) -> subprocess.CompletedProcess[str]:
    """The example on two ranks; whatever it started is gone afterwards, also after a hang."""
    script = ROOT / "examples" / example / "train.py"
    command = [sys.executable, str(script), "--ranks", "2", *TINY, *options]
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    process = subprocess.Popen(
        command,
        env=environment,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=200 * PATIENCE)
    except BaseException:
        os.kill(process.pid, signal.SIGTERM)  # torchrun then ends its ranks, sessions of their own
        try:
            process.communicate(timeout=40)
        finally:
            process.kill()
        raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def train(example: str, *options: str) -> subprocess.CompletedProcess[str]:
    result = run(example, *options)
    assert result.returncode == 0, result.stderr
    return result


def rows(result: subprocess.CompletedProcess[str]) -> dict[str, list[str]]:
    """The table's rows by variant, in words; it ends at the first empty line."""
    table = result.stdout.split("\n\n")[0].splitlines()[1:]
    return {line.split()[0]: line.split() for line in table}


def losses(result: subprocess.CompletedProcess[str], variant: str) -> list[float]:
    return [float(loss) for loss in re.findall(rf"{variant}: loss (\S+)", result.stderr)]


@pytest.mark.parametrize(
    ("example", "options"),
    [
        pytest.param("gpt", [], id="gpt"),
        pytest.param(
            "gpt", ["--dtensor", "--tie-embeddings"], id="gpt-dtensor", marks=pytest.mark.slow
        ),
        pytest.param("gpt", ["--dtensor"], id="gpt-dtensor-untied", marks=pytest.mark.slow),
        pytest.param("moe", [], id="moe", marks=pytest.mark.slow),
        pytest.param("moe", ["--top-k", "2"], id="moe-top-2", marks=pytest.mark.slow),
    ],
)
def test_eager_learns_and_the_others_are_equal_to_every_digit(
    example: str, options: list[str]
) -> None:
    variants = ["eager", "checkpoint", "overlapc"]
    result = train(
        example, "--variants", ",".join(variants), "--steps", "6", "--dropout", "0.1", *options
    )
    found = losses(result, "eager")
    assert found[-1] < found[0]
    table = rows(result)
    assert list(table) == variants
    assert all(table[variant][-2:] == ["equal", "equal"] for variant in variants[1:])


def test_emulated_link_is_what_training_waits_for() -> None:
    options = ["--link", "emulated", "--link-mbit", "10", "--variants", "eager", "--steps", "3"]
    exposed_ms = float(rows(train("gpt", *options))["eager"][-3])
    # 2 layers x 4 all-reduces of 2*32*32 floats (8 KiB) at 10 Mbit/s: 6.6 ms each.
    assert exposed_ms > 8 * 6


def test_an_impossible_division_of_experts_is_refused() -> None:
    result = run("moe", "--experts", "3")
    assert result.returncode != 0
    assert "3 experts cannot be divided among 2 ranks" in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "merged"])
def test_a_pipeline_beside_pytorchs(schedule: str) -> None:
    options = ["--pp", "2", "--schedule", schedule, "--microbatches", "4", "--steps", "3"]
    result = train("gpt", *options, "--compare")
    table = rows(result)
    assert list(table) == ["eager", "checkpoint", "overlapc"]
    assert table["overlapc"][-2:] == ["equal", "equal"]
    assert "bubble" in result.stderr  # below the picture of the pipeline


@pytest.mark.slow
@pytest.mark.parametrize("slices", ["1", "2"])
def test_a_pipeline_of_experts(slices: str) -> None:
    options = ["--ranks", "4", "--pp", "2", "--microbatches", "4", "--steps", "3"]
    result = train("moe", *options, "--compare", "--slices", slices)
    table = rows(result)
    assert list(table) == ["eager", "checkpoint", "overlapc"]
    if slices == "1":
        assert table["overlapc"][-2:] == ["equal", "equal"]
    else:
        gradients, found = table["overlapc"][-3::2]  # "within", a number, twice
        assert max(float(gradients), float(found)) < 1e-5
    assert "bubble" in result.stderr


@pytest.mark.slow
def test_megatron_beside_a_patched_one() -> None:
    cpu.need("0.16.1")
    result = train("megatron", "--width", "128", "--steps", "3")
    table = rows(result)
    assert list(table) == ["megatron", "overlapc"]
    assert table["overlapc"][-2:] == ["equal", "equal"]
    assert result.stderr.count("ran: ") == 1, result.stderr  # the chunk of one of two models
