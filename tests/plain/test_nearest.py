"""Published runs near a question: octaves counted by hand, and the file that the package ships."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from overlapc.core.errors import FileError
from overlapc.search.layouts import Cluster, Layout
from overlapc.search.presets import find_model
from overlapc.validation.nearest import SHIPPED, Nearest, PublishedRun, as_csv, load_runs
from overlapc.validation.public import Predicted, load_table

TABLES = sorted((Path(__file__).parents[2] / "benchmarks" / "public").glob("*.toml"))


def asked() -> PublishedRun:
    cluster = Cluster("a100-sxm-80", 16, 8, 80_000_000_000, 128)
    return PublishedRun.of(find_model("gpt-7b"), cluster, Layout(4, 2, 2, 2))


def ran(**change: object) -> PublishedRun:
    run = replace(asked(), table="one", role="held out", measured_ns=100, predicted_ns=110)
    return replace(run, **change)  # type: ignore[arg-type]


def test_octaves_are_counted_by_hand() -> None:
    one = ran()
    assert (one.tflops, one.gpus, one.tp, one.pp, one.tokens) == (312, 16, 4, 2, 2 * 2048)
    assert one.apart(asked()) == 0
    assert ran(gpus=64).apart(asked()) == 2
    assert ran(gpus=8, tp=8, pp=8).apart(asked()) == 1 + 1 + 2
    assert ran(microbatch=1, seq=8192).apart(asked()) == 1  # twice the tokens
    assert ran(tflops=624, batch=1, framework="megatron").apart(asked()) == 1
    assert ran(experts=8).apart(asked()) == 2
    assert ran(parameters=4 * asked().parameters).apart(asked()) == pytest.approx(2)


def test_the_nearest_come_first_and_held_out_ones_before_others() -> None:
    far, chosen, held = ran(gpus=32), ran(role="calibrates"), ran(predicted_ns=80)
    near = Nearest.to(asked(), [far, chosen, held, ran(gpus=1024)], count=3)
    assert near.runs == (held, chosen, far)
    assert near.octaves == (0, 0, 1)
    assert near.known == 4
    assert near.middle == pytest.approx(0.1)
    assert near.bias == pytest.approx((-0.2 + 0.1 + 0.1) / 3)
    assert Nearest.parse(near.as_json()) == near


def test_an_fp8_run_is_beside_fp8_questions_alone() -> None:
    near = Nearest.to(asked(), [ran(fp8=1), ran(gpus=64)])
    assert near.runs == (ran(gpus=64),)
    eight = Nearest.to(replace(asked(), fp8=1), [ran(fp8=1), ran(gpus=64)])
    assert eight.runs == (ran(fp8=1),)
    assert str(eight.runs[0]).endswith("FP8")
    assert {run.fp8 for run in load_runs(SHIPPED)} == {0, 1}


def test_what_is_written_is_read(tmp_path: Path) -> None:
    table = load_table(next(path for path in TABLES if path.stem == "layouts-13b"))
    found = [Predicted(row, 1 + row.step_ns) for row in table.rows]
    path = tmp_path / "runs.csv"
    path.write_text(as_csv([(table, [*found, Predicted(table.rows[0], refused="no")])]))
    runs = load_runs(path)
    assert len(runs) == sum(row.step_ns > 0 for row in table.rows)
    assert {run.named for run in runs} == {"layouts-13b (calibrates)"}
    for broken, named in (
        (path.read_text().replace(",gpus,", ",bulk,"), "found columns"),
        (path.read_text().replace(",calibrates,", ",calibrates,more,"), "found columns"),
        (path.read_text().replace(",312,", ",many,"), "'many'"),
    ):
        other = tmp_path / f"{named.strip(chr(39))}.csv"
        other.write_text(broken)
        with pytest.raises(FileError, match=named):
            load_runs(other)


def test_the_package_has_every_published_step() -> None:
    """As measured, none that was composed; `tests/torch/test_validate.py` says whether predictions
    are of these costs."""
    runs = load_runs(SHIPPED)
    measured = Counter(
        (table.name, row.step_ns, row.cluster.gpus)
        for table in map(load_table, TABLES)
        for row in table.rows
        if row.step_ns and not table.composed
    )
    assert Counter((run.table, run.measured_ns, run.gpus) for run in runs) == measured
