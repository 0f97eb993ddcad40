"""Tables of published measurements: each is read whole, and errors are what they are called."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from overlapc.cli import FAILED, main
from overlapc.core.errors import FileError
from overlapc.report.scoreboard import Score, scoreboard, spearman
from overlapc.search import pool
from overlapc.validation import public
from overlapc.validation.public import Predicted, load_table

ROOT = Path(__file__).parents[2]
TABLES = sorted((ROOT / "benchmarks" / "public").glob("*.toml"))
TEXT = """
version = 1
source = "somebody"
conditions = "somehow"
role = "held out"
rows = \"\"\"
gpus,batch,tp,pp,step_ms
8,16,2,2,100
8,16,2,2,50
8,16,8,1,200
\"\"\"

[same]
hardware = "a100-sxm-80"
framework = "megatron"
recompute = "full"
layers = 4
width = 256
heads = 8
vocab = 512
seq = 128
microbatch = 1
"""


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_published_tables_are_read(path: Path) -> None:
    table = load_table(path)
    assert table.rows
    for row in table.rows:
        assert row.layout.tp * row.layout.pp * row.layout.replicas == row.cluster.gpus
        assert row.fits or not row.step_ns


def test_most_rows_are_held_out() -> None:
    tables = [load_table(path) for path in TABLES]
    held_out = sum(len(table.rows) for table in tables if not table.calibrates)
    assert held_out >= sum(len(table.rows) for table in tables) / 2


def test_errors_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "table.toml"
    path.write_text(TEXT)
    table = load_table(path)
    steps = 110, 45, 180
    found = [Predicted(row, ms * 1_000_000) for row, ms in zip(table.rows, steps, strict=True)]
    score = Score.of(found)
    assert score.middle == pytest.approx(0.1)
    assert score.bias == pytest.approx(-0.1 / 3)
    assert (score.rows, score.spearman) == (3, 1)
    printed = scoreboard([(table, found)])
    assert "+10.0%  110.0 ms, measured 100.0  8,16,2,2,100" in printed
    assert "-3.3%" in printed


def test_composed_steps_are_counted_apart(tmp_path: Path) -> None:
    """Nobody ran them: they are shown, and in a sum of their own."""
    judged = []
    for name, ms in (("one", 100), ("other", 50)):
        path = tmp_path / f"{name}.toml"
        composed = 'composed = "of parts"\n[same]' if name == "other" else "[same]"
        path.write_text(TEXT.replace("[same]", composed))
        table = load_table(path)
        judged.append((table, [Predicted(row, ms * 1_000_000) for row in table.rows[:1]]))
    assert [table.titled for table, _ in judged] == ["one", "other (composed)"]
    lines = scoreboard(judged).splitlines()
    sums = {line.split("  ")[0]: line.split() for line in lines[:6]}
    assert sums["all that count"][3:7] == ["1", "0.0%", "0.0%", "+0.0%"]
    assert sums["with composed ones"][3:7] == ["2", "25.0%", "50.0%", "-25.0%"]
    assert "  composed: of parts" in lines
    alone = scoreboard(judged[1:])
    assert "all that count" not in alone
    assert "with composed ones" in alone


def test_ranks_correlate_as_they_should() -> None:
    assert spearman([1, 2, 3], [10, 20, 30]) == 1
    assert spearman([1, 2, 3], [3, 2, 1]) == -1
    assert spearman([1, 1, 2], [5, 5, 9]) == 1
    draw = random.Random(0)
    noise = [[draw.random() for _ in range(2000)] for _ in range(2)]
    assert abs(spearman(*noise)) < 0.1


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("version = 1", "version = 2", "version 2"),
        ('"held out"', '"secret"', "role 'secret'"),
        ("[same]", "composed = true\n[same]", "composed is True, expected how that is known"),
        ("gpus,batch", "gpus,bulk", "unknown columns bulk"),
        ("width = ", "post_norms = ", "no width"),
        ("8,16,8,1,200", "8,16,0,1,200", "row 3: tp is '0'"),
        ("8,16,8,1,200", "8,16,8,1,soon", "row 3: step_ms is 'soon'"),
        ("8,16,8,1,200", "8,16,8,1,0", "row 3: step_ms is '0', expected a number above 0, or an"),
        (
            "[same]",
            '[same]\npp = "1"',
            "pp in \\[same\\] and in rows, expected each in one of them",
        ),
        ("8,16,8,1,200", "8,many,8,1,200", "row 3: batch is 'many'"),
        ("8,16,8,1,200", "8,16,8,1", "row 3"),
        ("8,16,8,1,200", "9,16,8,1,200", "row 3: 9 GPUs"),
        ('"full"', '"most"', "recompute 'most'"),
        ('"megatron"', '"mega"', "framework 'mega'"),
        ("pp,step_ms", "tp,step_ms", "columns tp twice, expected each once"),
        ("8,16,2,2,100\n8,16,2,2,50\n8,16,8,1,200\n", "", "rows has none below its columns"),
        *(
            (
                "[same]",
                f'[same]\n{column} = "maybe"',
                f"row 1: {column} is 'maybe', expected 1, true, yes or 0, false, no",
            )
            for column in (
                *("fits", "fp8", "sequence", "shares_experts"),
                *("gated", "tied", "dropout", "head_norms", "post_norms"),
            )
        ),
    ],
)
def test_mistakes_are_named(old: str, new: str, named: str, tmp_path: Path) -> None:
    path = tmp_path / "table.toml"
    assert old in TEXT
    path.write_text(TEXT.replace(old, new, 1))
    with pytest.raises(FileError, match=named):
        load_table(path)


def test_a_bad_row_is_said_and_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "table.toml"
    path.write_text(TEXT.replace("8,16,2,2,50", "8,many,2,2,50"))
    skipped: list[str] = []
    assert [row.layout.tp for row in load_table(path, skipped).rows] == [2, 8]
    assert len(skipped) == 1
    assert "row 2: batch is 'many'" in skipped[0]
    monkeypatch.setattr(pool, "planners", lambda workers: ThreadPoolExecutor(1))
    monkeypatch.setattr(
        public, "predict_alike", lambda rows: [Predicted(row, row.step_ns) for row in rows]
    )
    assert main(["validate", str(path)]) == FAILED
    out, err = capsys.readouterr()
    assert "row 2: batch is 'many'" in err
    assert "the row is skipped" in err
    assert err.splitlines()[-1] == "overlapc: 1 rows were skipped (above); expected to read all"
    assert out.splitlines()[1].split()[:2] == ["table", "2"]


@pytest.mark.parametrize(("word", "fits"), [("no", False), ("False", False), ("YES", True)])
def test_words_for_true_and_false(word: str, fits: bool, tmp_path: Path) -> None:
    path = tmp_path / "table.toml"
    path.write_text(TEXT.replace("[same]", f'[same]\nfits = "{word}"\ngated = true'))
    row = load_table(path).rows[0]
    assert (row.fits, row.model.gated, row.model.tied) == (fits, True, False)
