"""`draw` makes pictures of a search's result for papers and slides, with matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from overlapc.core.errors import FileError, OptionError
from overlapc.core.files import write_file
from overlapc.report.charts import COLOURS, KINDS
from overlapc.report.page import layout_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMATS = ("png", "svg")


def draw(document: Mapping[str, Any], folder: Path) -> list[Path]:
    """Draw the ranks' timeline, their memory, and step against memory of all planned layouts, each
    in every format. `document` is the JSON of `overlapc search --json`."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise OptionError(
            "pictures are drawn by matplotlib, which is not here: pip install 'overlapc[plots]'"
        ) from None
    written = []
    try:
        if document["best"] is None:
            raise OptionError("nothing fitted in this search, so there is nothing to draw")
        title = f"{document['model']['name']} on {document['cluster']['gpus']} x "
        title += f"{document['cluster']['hardware']}, {layout_name(document['best'])}"
        for name, fill in (("timeline", _timeline), ("memory", _memory), ("layouts", _layouts)):
            tall = max(4.0, 1.6 + 0.35 * len(document["best"]["peak_bytes"]))
            figure = Figure(figsize=(10, tall), layout="constrained")
            axes = figure.subplots()
            fill(axes, document)
            axes.set_title(f"{title}: predicted", fontsize="medium")
            axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=5, frameon=False)
            for kind in FORMATS:
                drawn = BytesIO()
                figure.savefig(drawn, format=kind, dpi=150)
                path = folder / f"{name}.{kind}"
                write_file(path, drawn.getvalue())
                written.append(path)
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        raise FileError(
            f"a search's JSON lacks or garbles something ({error!r}): expected what `overlapc "
            "search --json` printed, unchanged"
        ) from None
    return written


def _timeline(axes: Axes, document: Mapping[str, Any]) -> None:
    """Draw the timeline, with merged actions above each other, as on the page."""
    ranks = document["pipeline"]["ranks"]
    boxes: dict[tuple[str, float, float], list[tuple[float, float]]] = {}
    for rank, row in enumerate(ranks):
        for word, start, end in row["steps"]:
            kinds = [letter for letter in word if letter in COLOURS]
            for i, kind in enumerate(kinds):
                tall = 0.8 / len(kinds)
                where = kind, rank - 0.4 + i * tall, tall
                boxes.setdefault(where, []).append((start / 1e6, (end - start) / 1e6))
    named = set()
    for (kind, low, tall), spans in sorted(boxes.items()):
        label = "" if kind in named else KINDS[kind]
        axes.broken_barh(spans, (low, tall), facecolors=COLOURS[kind], label=label)
        named.add(kind)
    axes.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in range(len(ranks))])
    axes.invert_yaxis()
    axes.set_xlabel("ms, of few microbatches")


def _memory(axes: Axes, document: Mapping[str, Any]) -> None:
    peaks, cap = document["best"]["peak_bytes"], min(document["tensor_bytes"])
    names = [f"rank {rank}" for rank in range(len(peaks))]
    bars = axes.barh(names, [peak / 1e9 for peak in peaks], color=COLOURS["F"])
    axes.bar_label(bars, fmt="%.1f", padding=3)
    axes.axvline(cap / 1e9, color="#b03030", label=f"{cap / 1e9:.1f} GB may be tensors")
    axes.invert_yaxis()
    axes.set_xlabel("GB at the peak")


def _layouts(axes: Axes, document: Mapping[str, Any]) -> None:
    best = document["best"]
    for what, founds, mark, size in (
        ("layouts planned", document["tried"], "o", 6),
        ("the fastest with less memory", document["less_memory"], "s", 6),
        ("the fastest", [best], "*", 14),
    ):
        fitting = [found for found in founds if not found["smallest_bytes"]]
        sizes = [max(found["peak_bytes"]) / 1e9 for found in fitting]
        axes.plot(sizes, [found["step_ns"] / 1e6 for found in fitting], mark, ms=size, label=what)
    axes.set_xlabel("GB at the peak of a GPU")
    axes.set_ylabel("ms a step")
