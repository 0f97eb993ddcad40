"""`Nearest` has the published runs that are most like a layout, as measured and as predicted.

Both are in `public_runs.csv` beside this file, which every installed package has. After a change of
costs it is written anew, within minutes: `overlapc validate --write
overlapc/validation/public_runs.csv`.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from pathlib import Path
from statistics import mean, median
from typing import Any

from overlapc.core.errors import FileError
from overlapc.core.files import StrPath, printable, read_text
from overlapc.profiler.hardware import load_hardware
from overlapc.search.layouts import Cluster, Layout
from overlapc.search.models.transformer import Model, Transformer
from overlapc.validation.public import Predicted, Table

SHIPPED = Path(__file__).with_name("public_runs.csv")
# What makes two runs alike, each by its logarithm: a factor of two in one of them is one octave.
_ALIKE = ("tflops", "parameters", "gpus", "tp", "cp", "pp", "tokens")
_EXPERTS = 2.0  # octaves between a model with experts and one without


@dataclass(frozen=True)
class PublishedRun:
    """A published run, or a layout to compare with them (without a step)."""

    table: str
    role: str  # calibrates | held out
    hardware: str
    tflops: int  # of one GPU, at most
    parameters: int
    experts: int
    gpus: int
    tp: int
    cp: int
    pp: int
    schedule: str
    batch: int
    microbatch: int
    seq: int
    framework: str
    recompute: str
    fp8: int = 0  # are its layers' products in FP8?
    measured_ns: int = 0
    predicted_ns: int = 0

    @staticmethod
    def of(model: Model, cluster: Cluster, layout: Layout) -> PublishedRun:
        """The question's own run."""
        machine = load_hardware(cluster.hardware)
        experts = model.experts if isinstance(model, Transformer) else 0
        return PublishedRun(
            "",
            "",
            machine.name,
            round(machine.half_flops / 1e12),
            model.parameters(),
            experts,
            cluster.gpus,
            layout.tp,
            layout.cp,
            layout.pp,
            layout.schedule if layout.pp > 1 else "",
            cluster.global_batch,
            layout.microbatch,
            model.seq,
            cluster.framework,
            "",
            int(cluster.fp8),
        )

    @property
    def tokens(self) -> int:
        """Of a microbatch."""
        return self.microbatch * self.seq

    @property
    def error(self) -> float:
        """How much longer than measured the predicted step is, as a part of the measured."""
        return self.predicted_ns / self.measured_ns - 1

    @property
    def named(self) -> str:
        """Its table, and whether costs were chosen by it."""
        return self.table + " (calibrates)" * (self.role == "calibrates")

    def __str__(self) -> str:
        size = f"{self.parameters / 1e9:.1f}B" + " with experts" * (self.experts > 0)
        cp = f" cp={self.cp}" if self.cp > 1 else ""
        where = f"{self.gpus} x {self.hardware}: tp={self.tp}{cp} pp={self.pp} {self.schedule}"
        by = f"{self.framework}, {self.recompute}" + ", FP8" * self.fp8
        return f"{size} on {where.strip()} microbatch={self.microbatch} of {self.seq} tokens, {by}"

    def apart(self, other: PublishedRun) -> float:
        """How far two runs are apart, in octaves."""
        pairs = ((getattr(self, name), getattr(other, name)) for name in _ALIKE)
        far = sum(abs(math.log2(max(1, a) / max(1, b))) for a, b in pairs)
        return far + _EXPERTS * (bool(self.experts) != bool(other.experts))


@dataclass(frozen=True)
class Nearest:
    """The published runs that are nearest to a question, the nearest first."""

    runs: tuple[PublishedRun, ...]
    octaves: tuple[float, ...]  # how far each is from the question
    known: int  # number of all published runs

    @staticmethod
    def to(asked: PublishedRun, runs: Sequence[PublishedRun], count: int = 20) -> Nearest:
        """Find the nearest, in FP8 only if the question is; of equally near ones, those that are
        held out come first."""
        found = sorted(
            (run.apart(asked), run.role == "calibrates", at)
            for at, run in enumerate(runs)
            if run.fp8 == asked.fp8
        )[:count]
        near = tuple(runs[at] for _, _, at in found)
        return Nearest(near, tuple(far for far, _, _ in found), len(runs))

    def as_json(self) -> dict[str, Any]:
        near = zip(self.runs, self.octaves, strict=True)
        return {
            "known": self.known,
            "runs": [asdict(run) | {"octaves": round(far, 3)} for run, far in near],
        }

    @staticmethod
    def parse(found: Mapping[str, Any]) -> Nearest:
        """Read the result of `as_json`."""
        runs = [dict(each) for each in found["runs"]]
        octaves = tuple(each.pop("octaves") for each in runs)
        return Nearest(tuple(PublishedRun(**each) for each in runs), octaves, found["known"])

    @property
    def middle(self) -> float:
        """The median of the errors' sizes."""
        return median(abs(run.error) for run in self.runs)

    @property
    def bias(self) -> float:
        return mean(run.error for run in self.runs)


def as_csv(judged: Iterable[tuple[Table, Sequence[Predicted]]]) -> str:
    """Write the predicted rows that have a measured step, in their tables' order; none that is
    composed."""
    text = io.StringIO()
    names = [each.name for each in fields(PublishedRun)]
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(names)
    for table, found in judged:
        for each in found:
            if each.row.step_ns and not each.refused and not table.composed:
                run = _published(table, each)
                writer.writerow([getattr(run, name) for name in names])
    return text.getvalue()


def _published(table: Table, found: Predicted) -> PublishedRun:
    row = found.row
    return replace(
        PublishedRun.of(row.model, row.cluster, row.layout),
        table=table.name,
        role="calibrates" if table.calibrates else "held out",
        recompute=row.recompute,
        measured_ns=row.step_ns,
        predicted_ns=found.step_ns,
    )


@cache
def load_runs(path: StrPath = SHIPPED) -> tuple[PublishedRun, ...]:
    """Read what `as_csv` wrote."""
    text = read_text(path, "published runs")
    kinds = {each.name: each.type for each in fields(PublishedRun)}
    runs = []
    try:
        for row in csv.DictReader(io.StringIO(text)):
            if set(row) != set(kinds) or None in row.values():
                raise ValueError(f"found columns {', '.join(map(str, row))}")
            cells: dict[str, Any] = {
                name: int(cell) if kinds[name] == "int" else cell for name, cell in row.items()
            }
            runs.append(PublishedRun(**cells))
            if min(runs[-1].measured_ns, runs[-1].predicted_ns) <= 0:
                raise ValueError(f"row {len(runs)} has no step")
    except ValueError as error:
        raise FileError(
            f"published runs {printable(str(path))}: {error}; expected what `overlapc validate "
            "--write` wrote"
        ) from None
    return tuple(runs)
