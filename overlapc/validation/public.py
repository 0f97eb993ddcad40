"""A table of published measurements is a TOML file; each row of it is a question to be predicted.

    [same]  what all rows share          rows = "a CSV: what differs, and what was measured"

A table says who measured it and under which conditions. One that `calibrates` was looked at when
costs were chosen: its errors are shown and never counted. One whose steps are `composed` says how
that is known: its source calls them measured, but put them together from parts, and nobody ran
them. They are counted apart. `step_ms` is the time of a step, `peak_gb` the most memory of any
rank, `fits` whether the run had enough.
"""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from overlapc.core.errors import FileError, OverlapcError
from overlapc.core.files import StrPath, printable, read_text
from overlapc.profiler.hardware import Hardware, load_hardware
from overlapc.search.captures import UnitKey
from overlapc.search.evaluate import evaluate
from overlapc.search.frameworks.known import find_framework
from overlapc.search.layouts import (
    CP_COMM_TYPES,
    Cluster,
    Layout,
    check_framework,
    comm_types,
    expert_sizes,
)
from overlapc.search.megatron import check_modules
from overlapc.search.memory import Answer, answer, needed_bytes
from overlapc.search.models.transformer import Transformer
from overlapc.search.units import Unit, make_units
from overlapc.search.weights import held_bytes
from overlapc.validation.interval import Interval, interval

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

VERSION = 1
# Blocks that are captured. A baseline treats all alike: two give steps within 0.2% of those of four
# in half the time.
_BLOCKS = 2
_ENOUGH = 1 << 62  # bytes of memory: what a plan takes is asked, not whether it may
_SHAPE = {each.name: each.type for each in fields(Transformer) if each.name not in ("name",)}
_LAYOUT = (
    *("gpus", "batch", "microbatch", "tp", "cp", "pp", "schedule", "chunks", "sequence"),
    "cp_comm_type",
    "ep",  # over how many ranks the experts are divided; by default as many as can
    "shares_experts",  # do tensor-parallel ranks share each expert's matrices?
)
_HOW = ("hardware", "framework", "recompute", "fp8")
_MEASURED = ("step_ms", "peak_gb", "fits")
_TRUE, _FALSE = ("1", "true", "yes"), ("0", "false", "no")
_NEEDED = ("layers", "width", "heads", "vocab", "seq", "batch", "microbatch", *_HOW[:3])


@dataclass(frozen=True)
class Row:
    """One published run: what ran on what, divided how, and what was measured of it."""

    text: str  # what sets it apart from the table's other rows
    model: Transformer
    cluster: Cluster
    layout: Layout
    recompute: str  # the baseline that plans as the run did
    step_ns: int  # as measured, or 0
    peak_bytes: int  # as measured, or 0
    fits: bool

    @property
    def machine(self) -> Hardware:
        return load_hardware(self.cluster.hardware)

    @property
    def key(self) -> UnitKey:
        """What is captured for the row; rows of other depths and batches share it."""
        key = UnitKey.of(self.model, self.cluster, self.layout)
        enough = key.model.dense_first + _BLOCKS * key.model.period
        model = replace(key.model, layers=min(key.model.layers, enough))
        spans = key.tp * key.cp, key.expert_step * key.expert_ranks
        node = self.machine.gpus_per_node
        odd = any(node % span and span % node for span in spans)  # groups lie on nodes unevenly
        return replace(key, model=model, gpus=key.gpus if odd else max(spans))

    @property
    def alike(self) -> UnitKey:
        """What rows share that are captured together: all of the key but its microbatch."""
        return replace(self.key, microbatch=0)


@dataclass(frozen=True)
class Table:
    """Published measurements of one source under one set of conditions."""

    name: str
    source: str
    conditions: str
    calibrates: bool
    rows: tuple[Row, ...]
    composed: str = ""  # how it is known that nobody ran these steps

    @property
    def titled(self) -> str:
        """Its name, and why it does not count."""
        reasons = "calibrates" * self.calibrates, "composed" * bool(self.composed)
        why = ", ".join(filter(None, reasons))
        return f"{self.name} ({why})" if why else self.name


@dataclass(frozen=True)
class Predicted:
    """What is predicted of a row, or why nothing is."""

    row: Row
    step_ns: int = 0
    peak_bytes: int = 0  # of tensors
    needed_bytes: int = 0  # with all that is beside them
    within: Interval | None = None  # in which the measured step should be
    refused: str = ""

    @property
    def error(self) -> float:
        """How much longer than measured the predicted step is, as a part of the measured."""
        return self.step_ns / self.row.step_ns - 1

    @property
    def is_within(self) -> bool:
        """Whether the measured step is in the predicted interval."""
        within = self.within
        return within is not None and within.low_ns <= self.row.step_ns <= within.high_ns

    @property
    def answer(self) -> Answer:
        """Whether it will run."""
        return answer(self.row.machine, self.needed_bytes)


def predict(row: Row, unit: Unit) -> Predicted:
    """Predict the row's step and its peak, however little memory there is."""
    cluster = replace(row.cluster, memory_bytes=_ENOUGH)
    framework = find_framework(cluster.framework)
    layers = framework.layers_of(row.model.layers, row.layout.stages)
    try:
        found = evaluate(
            row.model,
            cluster,
            row.layout,
            unit,
            row.recompute,
            layers=layers,
            bounded=False,
            pinned=True,
        ).found
    except OverlapcError as error:
        return Predicted(row, refused=str(error))
    static = held_bytes(row.model, cluster, row.layout, found.layers)
    ranks = zip(static, found.peak_bytes, strict=True)
    needed = max(needed_bytes(row.layout, *rank) for rank in ranks)
    within = interval(found, cluster)
    return Predicted(row, found.step_ns, max(found.peak_bytes), needed, within)


def predict_alike(rows: Sequence[Row]) -> list[Predicted]:
    """Predict rows that are alike: their blocks are captured together."""
    keys = list(dict.fromkeys(row.key for row in rows))
    units = dict(zip(keys, make_units(keys, bounded=False, most=_BLOCKS), strict=True))
    return [predict(row, units[row.key]) for row in rows]


def load_table(path: StrPath, skipped: list[str] | None = None) -> Table:
    """Read a table; FileError names the row and the column that are wrong. Given a list for what is
    wrong with rows, such rows are skipped."""
    path = Path(path)
    shown = printable(str(path))
    try:
        data = tomllib.loads(read_text(path, "table"))
    except tomllib.TOMLDecodeError as error:
        raise FileError(f"table {shown}: {error}; expected TOML") from error
    if data.get("version") != VERSION:
        raise FileError(f"table {shown}: version {data.get('version')!r}, expected {VERSION}")
    for key in ("source", "conditions", "rows", "role"):
        if not isinstance(data.get(key), str) or not data[key].strip():
            raise FileError(f"table {shown}: no {key}, expected a text")
    if data["role"] not in ("calibrates", "held out"):
        raise FileError(
            f"table {shown}: role {data['role']!r}, expected 'calibrates' or 'held out'"
        )
    if not isinstance(data.get("same", {}), dict):
        raise FileError(f"table {shown}: same is {data['same']!r}, expected a table of columns")
    same = {key: str(value) for key, value in data.get("same", {}).items()}
    rows = _rows(path, shown, data["rows"].strip(), same, skipped)
    calibrates, composed = data["role"] == "calibrates", data.get("composed", "")
    if not isinstance(composed, str):
        raise FileError(
            f"table {shown}: composed is {composed!r}, expected how that is known, a text"
        )
    return Table(path.stem, data["source"], data["conditions"], calibrates, rows, composed.strip())


def _rows(
    path: Path, shown: str, text: str, same: Mapping[str, str], skipped: list[str] | None
) -> tuple[Row, ...]:
    cells = csv.DictReader(io.StringIO(text))
    columns = cells.fieldnames or ()
    if twice := sorted({column for column in columns if columns.count(column) > 1}):
        raise FileError(f"table {shown}: columns {', '.join(twice)} twice, expected each once")
    if both := sorted(same.keys() & set(columns)):
        raise FileError(
            f"table {shown}: {', '.join(both)} in [same] and in rows, expected each in one of them"
        )
    rows = []
    for number, given in enumerate(cells, 1):
        try:
            if None in given or None in given.values():
                raise ValueError("more or fewer cells than columns")
            rows.append(_row(path, given, same))
        except (ValueError, OverlapcError) as error:
            wrong = f"table {shown}: row {number}: {error}"
            if skipped is None:
                raise FileError(wrong) from error
            skipped.append(wrong)
    if not rows and not skipped:
        raise FileError(f"table {shown}: rows has none below its columns, expected one or more")
    return tuple(rows)


def _row(path: Path, given: Mapping[str, str], same: Mapping[str, str]) -> Row:
    cells = {key: text for key, text in {**same, **given}.items() if text != ""}
    unknown = set(cells) - {*_SHAPE, *_LAYOUT, *_HOW, *_MEASURED}
    if unknown:
        raise ValueError(f"unknown columns {', '.join(sorted(unknown))}")
    if missing := [key for key in _NEEDED if key not in cells]:
        raise ValueError(f"no {', '.join(missing)}")
    shape: dict[str, Any] = {"ffn": 4 * _whole(cells, "width")}
    for key in _SHAPE.keys() & cells.keys():
        kind = str(_SHAPE[key])
        shape[key] = _flag(cells, key) if kind == "bool" else cells[key]
        shape[key] = _whole(cells, key, 0) if kind == "int" else shape[key]
    model = Transformer(name=path.stem, **shape)
    gpus, tp, cp, pp = (_whole(cells, key) for key in ("gpus", "tp", "cp", "pp"))
    chunks = _whole(cells, "chunks")
    batch, microbatch = (_whole(cells, key) for key in ("batch", "microbatch"))
    if gpus % (tp * cp * pp):
        divided = f"tp={tp} times pp={pp}" + f" times cp={cp}" * (cp > 1)
        raise ValueError(f"{gpus} GPUs are not a multiple of {divided}")
    layout = _layout(cells, model, (tp, pp, gpus // tp // cp // pp, microbatch), chunks, cp)
    if layout.stages > model.layers or batch % (layout.dp * microbatch):
        raise ValueError(f"{layout} does not divide {model.layers} layers and the batch")
    framework = find_framework(cells["framework"])
    if not framework.of(model).splits_sequence(cp):
        raise ValueError(f"cp={cp} does not divide sequences of {model.seq} in fused attention")
    if framework.gathers and (pp > 1 or layout.schedule != "1f1b"):
        found = f"pp={pp}" if pp > 1 else f"schedule {layout.schedule}"
        raise ValueError(f"{found} with {framework.name}, which divides weights: expected pp=1")
    recompute = framework.plan(cells["recompute"])
    check_modules(model, recompute)
    hardware = cells["hardware"]
    if hardware.endswith(".toml"):
        hardware = str(path.parent / hardware)
    machine = load_hardware(hardware)
    cluster = Cluster(
        hardware,
        gpus,
        machine.gpus_per_node,
        machine.memory_bytes,
        batch,
        framework=framework.name,
        fp8=_flag(cells, "fp8"),
    )
    check_framework(model, cluster)
    return Row(
        ",".join(given.values()),
        model,
        cluster,
        layout,
        recompute,
        _measured(cells, "step_ms", 1e6),
        _measured(cells, "peak_gb", 1e9),
        _flag(cells, "fits", default=True),
    )


def _layout(
    cells: Mapping[str, str],
    model: Transformer,
    divided: tuple[int, int, int, int],
    chunks: int,
    cp: int,
) -> Layout:
    """The layout of a row; `divided` are its tp, pp, dp and microbatch."""
    kind = cells.get("cp_comm_type", CP_COMM_TYPES[0])
    if kind not in (kinds := comm_types(model, divided[0], cp)):
        raise ValueError(f"cp_comm_type is {kind!r}, expected one of {', '.join(kinds)}")
    layout = Layout(
        *divided,
        cells.get("schedule", "interleaved" if chunks > 1 else "1f1b"),
        _flag(cells, "sequence"),
        max(2, chunks),
        cp,
        _flag(cells, "shares_experts"),
        cp_comm_type=kind,
    )
    if "ep" not in cells:
        return layout
    sizes = expert_sizes(model, layout, ep := _whole(cells, "ep"))
    if not sizes:
        among = f"a divisor of {model.experts} experts and of the ranks of a stage"
        raise ValueError(f"ep is {ep}; expected {among if model.experts else 'none, or experts'}")
    return replace(layout, ep=sizes[0])


def _flag(cells: Mapping[str, str], key: str, default: bool = False) -> bool:
    if key not in cells:
        return default
    found = cells[key].strip().lower()
    if found not in (*_TRUE, *_FALSE):
        words = f"{', '.join(_TRUE)} or {', '.join(_FALSE)}"
        raise ValueError(f"{key} is {cells[key]!r}, expected {words}")
    return found in _TRUE


def _whole(cells: Mapping[str, str], key: str, least: int = 1) -> int:
    text = cells.get(key, "1")
    if not text.isdecimal() or int(text) < least:
        raise ValueError(f"{key} is {text!r}, expected a whole number from {least} on")
    return int(text)


def _measured(cells: Mapping[str, str], key: str, times: float) -> int:
    """A figure in the unit that is kept; 0 where none was measured."""
    if key not in cells:
        return 0
    try:
        found = float(cells[key])
    except ValueError:
        found = -1.0
    if not 0 < found < float("inf"):
        raise ValueError(
            f"{key} is {cells[key]!r}, expected a number above 0, or an empty cell where nothing "
            "was measured"
        )
    return round(found * times)
