"""A search's result as one HTML page that needs no network: `page(document)`.

The document is what `overlapc search --json` prints. Tables are plain HTML; the timeline and the
charts are SVG, drawn here, and a few lines of script zoom the timeline.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from overlapc.errors import FileError
from overlapc.search.chosen import VERSION
from overlapc.search.layouts import Layout

COLOURS = {"F": "#4878a8", "B": "#c47a3d", "I": "#d9a05b", "W": "#7a9a5a", "R": "#a05a7a"}
KINDS = {
    "F": "forward",
    "B": "whole backward",
    "I": "input gradients",
    "W": "weight gradients",
    "R": "recompute",
}
_WIDTH = 960
_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #222; margin: 0 auto; max-width: 1000px;
  padding: 16px; }
h1 { font-size: 1.4em; } h2 { font-size: 1.1em; margin-top: 2em; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 3px 8px; border-bottom: 1px solid #ddd; white-space: nowrap; }
th:first-child, td:first-child, .text td, .text th { text-align: left; }
.text td { white-space: normal; vertical-align: top; }
.wide { overflow-x: auto; } svg { width: 100%; min-width: 640px; height: auto; display: block; }
.best { font-weight: 600; } .no { color: #888; } pre { overflow-x: auto; background: #f6f6f4;
  padding: 10px; font-size: 12px; } .note { color: #666; }
@media (prefers-color-scheme: dark) { body { background: #1b1b1b; color: #ddd; }
  th, td { border-color: #444; } pre { background: #262626; } .note { color: #aaa; }
  svg text { fill: #ddd; } }
"""
_SCRIPT = """
for (const svg of document.querySelectorAll("svg.zoom")) {
  const whole = svg.getAttribute("viewBox").split(" ").map(Number);
  let [x, y, w, h] = whole, from = null;
  const show = () => svg.setAttribute("viewBox", [x, y, w, h].join(" "));
  svg.addEventListener("wheel", event => {
    event.preventDefault();
    const box = svg.getBoundingClientRect();
    const at = x + (event.clientX - box.left) / box.width * w;
    const next = Math.min(whole[2], Math.max(whole[2] / 200, w * (event.deltaY > 0 ? 1.25 : 0.8)));
    x = Math.min(Math.max(0, at - (at - x) * next / w), whole[2] - next); w = next; show();
  }, {passive: false});
  svg.addEventListener("pointerdown", event => { from = event.clientX; });
  addEventListener("pointerup", () => { from = null; });
  svg.addEventListener("pointermove", event => {
    if (from === null) return;
    const moved = (event.clientX - from) / svg.getBoundingClientRect().width * w;
    from = event.clientX; x = Math.min(Math.max(0, x - moved), whole[2] - w); show();
  });
  svg.addEventListener("dblclick", () => { [x, y, w, h] = whole; show(); });
}
"""


def page(document: Mapping[str, Any]) -> str:
    """The page for a search's JSON."""
    if document.get("overlapc_search") != VERSION:
        raise FileError(
            f"a search of version {document.get('overlapc_search')!r}: expected the JSON that "
            "`overlapc search --json` of this version prints"
        )
    try:
        model, cluster, best = document["model"], document["cluster"], document["best"]
        title = f"{model['name']} on {cluster['gpus']} x {cluster['hardware']}"
        body = [f"<h1>{_text(title)}</h1>", *_verdict(document)]
        if best is not None:
            body += _section(
                "This layout with the plans of", _founds(document["compared"], "solver")
            )
            if document.get("pipeline"):
                body += _section("What the ranks do", _timeline(document["pipeline"]))
            body += _section(
                "Memory of each rank of the pipeline",
                _memory(best, document.get("pipeline"), cluster["memory_bytes"]),
            )
            fitting = [found for found in document["tried"] if not found["smallest_bytes"]]
            less = [
                found for found in document.get("less_memory", []) if not found["smallest_bytes"]
            ]
            body += _section(
                "Memory and step of all layouts planned, and of the fastest with less memory",
                _scatter([*less, *fitting], best),
            )
            body += _section("Next to it", _founds(fitting[:12], "layout"))
            if document.get("explain"):
                why = f"<pre>{_text(document['explain'])}</pre>"
                body += _section(
                    "Why what remains is exposed: a few blocks of the slowest stage", why
                )
        body += _section("What went in", _inputs(document))
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        raise FileError(
            f"a search's JSON lacks or garbles something ({error!r}): expected what `overlapc "
            "search --json` printed, unchanged"
        ) from None
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<title>{_text(title)}</title>\n<link rel="icon" href="data:,">\n'
        f"<style>{_STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + f"\n<script>{_SCRIPT}</script>\n</body>\n</html>\n"
    )


def _section(title: str, content: str) -> list[str]:
    return [f"<h2>{_text(title)}</h2>", f'<div class="wide">{content}</div>']


def _verdict(document: Mapping[str, Any]) -> list[str]:
    best = document["best"]
    note = '<p class="note">Every figure is predicted.</p>'
    if best is None and document["interrupted"]:
        return ["<p>Interrupted before anything that fits was found.</p>", note]
    if best is None:
        known = (
            "The smallest memory that works is" if document.get("certain", True) else "More than"
        )
        least = min(document["tried"], key=lambda f: f["smallest_bytes"])
        size, stage = _gb(least["smallest_bytes"]), least["blocking_stage"]
        return [
            f"<p>Nothing fits, layers split evenly. {known} {size} GB a GPU, with "
            f"{_text(layout_name(least))}; rank {int(stage)} of the pipeline blocks.</p>",
            note,
        ]
    gap = best["step_ns"] / max(1, document["bound_ns"]) - 1
    kept = "Interrupted, the best so far: " if document["interrupted"] else ""
    layers = "|".join(str(int(count)) for count in best["layers"])
    return [
        f'<p class="best">{kept}{_text(layout_name(best))}: {_ms(best["step_ns"])} ms a step, '
        f"{best['tokens_per_s']:,.0f} tokens/s, MFU {best['mfu']:.1%}</p>",
        f"<p>{int(best['microbatches'])} microbatches, layers {layers}. No layout that fits with "
        f"its layers split evenly is more than {gap:.1%} faster, by bound: "
        f"{len(document['tried'])} were planned, {int(document['pruned'])} cannot win. "
        f"{document['seconds']:.0f} s.</p>",
        note,
    ]


def layout_name(found: Mapping[str, Any]) -> str:
    return str(Layout(**found["layout"]))


def _founds(found: Sequence[Mapping[str, Any]], by: str) -> str:
    head = ("step ms", "tokens/s", "MFU", "exposed TP", "all-to-all", "DP", "p2p", "bubble")
    more = ("recompute", "hidden", "peak GB", "gap")
    rows = []
    for one in found:
        name = one["solver"] if by == "solver" else layout_name(one)
        if one["smallest_bytes"]:
            lacks = f"does not fit: {_gb(one['smallest_bytes'])} GB at least"
            rows.append(f'<tr class="no"><td>{_text(name)}</td><td colspan="12">{lacks}</td></tr>')
            continue
        step, exposed = one["step_ns"], one["exposed_ns"] or {}
        cells = [
            _ms(step),
            f"{one['tokens_per_s']:,.0f}",
            f"{one['mfu']:.1%}",
            *(f"{exposed.get(kind, 0) / step:.1%}" for kind in ("tp", "all-to-all", "dp", "p2p")),
            f"{one['bubble']:.1%}",
            f"{one['recompute_ns'] / step:.1%}",
            f"{one['recompute_hidden_ns'] / step:.1%}",
            _gb(max(one["peak_bytes"])),
            f"{one['gap']:.1%}",
        ]
        rows.append(_row([name, *cells]))
    return _table(["", *head, *more], rows)


def _timeline(pipeline: Mapping[str, Any]) -> str:
    """One line a rank, one box a step. Colours are kinds of actions."""
    ranks, step, height = pipeline["ranks"], max(1, pipeline["step_ns"]), 26
    boxes = []
    for rank, row in enumerate(ranks):
        for word, start, end in row["steps"]:
            kinds = [letter for letter in word if letter in COLOURS]
            x, wide = start / step * _WIDTH, max((end - start) / step * _WIDTH - 0.3, 0.1)
            for i, kind in enumerate(kinds):  # merged pieces above each other
                tall = (height - 6) / len(kinds)
                title = f"rank {rank}, {word}: {_ms(start)} to {_ms(end)} ms"
                boxes.append(_box(x, rank * height + i * tall, wide, tall, COLOURS[kind], title))
    legend = " &nbsp; ".join(
        f'<span style="color:{COLOURS[kind]}">&#9632;</span> {what}' for kind, what in KINDS.items()
    )
    bubbles = ", ".join(f"{rank['bubble_ns'] / step:.0%}" for rank in ranks)
    drawn = _svg(len(ranks) * height, boxes, "timeline", 'class="zoom" preserveAspectRatio="none"')
    return (
        f'{drawn}<p class="note">{legend}<br>A line for each rank, {_ms(step)} ms of few '
        f"microbatches; wheel zooms, drag moves, double click shows all. Bubbles: {bubbles}.</p>"
    )


def _memory(best: Mapping[str, Any], pipeline: Mapping[str, Any] | None, cap: int) -> str:
    """What each rank holds in each of its steps, and the line that it may not pass."""
    parts, left, tall = [], 70, 60
    full = _WIDTH - left - 90
    step = max(1, pipeline["step_ns"]) if pipeline else 1
    for rank, peak in enumerate(best["peak_bytes"]):
        top = rank * (tall + 14) + 16
        floor = top + tall
        parts.append(_label(0, floor, f"rank {rank}"))
        parts.append(_box(left, top, full, 1, "#b03030", f"{cap:,} bytes may be used"))
        parts.append(_box(left, floor, full, 1, "#888", ""))
        parts.append(_label(left + full + 6, floor, f"{_gb(peak)} GB"))
        row = pipeline["ranks"][rank] if pipeline else {"steps": [], "memory": []}
        for (word, start, end), level in zip(row["steps"], row["memory"], strict=True):
            x, high = left + start / step * full, level / cap * tall
            title = f"rank {rank}, {word}: at most {level:,} bytes"
            wide = (end - start) / step * full
            parts.append(_box(x, floor - high, wide, high, COLOURS["F"], title))
    height = len(best["peak_bytes"]) * (tall + 14) + 16
    parts.append(_label(left + full, 11, f"{_gb(cap)} GB may be used", "end"))
    drawn = _svg(height + 4, parts, "memory of each rank over time")
    return (
        f'{drawn}<p class="note">While each step runs, of few microbatches. The figures beside '
        "count the ops within, too: they may differ by a few percent.</p>"
    )


def _scatter(found: Sequence[Mapping[str, Any]], best: Mapping[str, Any]) -> str:
    """Memory to the right, time up; the winner is marked."""
    high, left, low = 300, 86, 40
    sizes = [max(one["peak_bytes"]) for one in found]
    times = [one["step_ns"] for one in found]

    def scale(values: Sequence[int], length: float) -> Callable[[int], float]:
        least, most = min(values), max(values)
        return lambda value: (value - least) / max(1, most - least) * length

    across, up = scale(sizes, _WIDTH - left - 60), scale(times, high - low - 20)
    parts = [
        _box(left, 10, 1, high - 40, "#888", ""),
        _box(left, high - 30, _WIDTH - 20 - left, 1, "#888", ""),
        _label(left + 14, high - 14, f"{_gb(min(sizes))} GB"),
        _label(_WIDTH - 40, high - 14, f"{_gb(max(sizes))} GB", "end"),
        _label(left - 6, high - low, f"{_ms(min(times))} ms", "end"),
        _label(left - 6, 26, f"{_ms(max(times))} ms", "end"),
    ]
    for one, size, took in zip(found, sizes, times, strict=True):
        winner = one["layout"] == best["layout"] and took == best["step_ns"]
        x, y = left + 14 + across(size), high - low - up(took)
        title = f"{layout_name(one)}: {_gb(size)} GB, {_ms(took)} ms"
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{6 if winner else 4}" '
            f'fill="{"#b03030" if winner else "#4878a8"}"><title>{_text(title)}</title></circle>'
        )
    return _svg(high, parts, "memory and step of layouts")


def _svg(height: float, parts: Iterable[str], label: str, more: str = "") -> str:
    return (
        f'<svg {more} viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        f'role="img" aria-label="{label}">{"".join(parts)}</svg>'
    )


def _box(x: float, y: float, wide: float, tall: float, fill: str, title: str) -> str:
    return (
        f'<rect x="{x:.2f}" y="{y:.1f}" width="{wide:.2f}" height="{tall:.1f}" fill="{fill}">'
        f"<title>{_text(title)}</title></rect>"
    )


def _label(x: float, y: float, text: str, anchor: str = "start") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="12" text-anchor="{anchor}">{_text(text)}</text>'
    )


def _inputs(document: Mapping[str, Any]) -> str:
    model, cluster = document["model"], document["cluster"]
    rows = [_row([f"model: {key}", str(value), model["source"]]) for key, value in model.items()]
    rows += [_row([f"cluster: {key}", str(value), "as asked"]) for key, value in cluster.items()]
    for key, source in document.get("hardware_sources", {}).items():
        rows.append(_row([f"hardware: {key}", "", source]))
    return f'<div class="text">{_table(["what", "value", "source"], rows)}</div>'


def _row(cells: Iterable[str]) -> str:
    return "<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in cells) + "</tr>"


def _table(head: Sequence[str], rows: Sequence[str]) -> str:
    cells = "".join(f"<th>{_text(cell)}</th>" for cell in head)
    return f"<table><thead><tr>{cells}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _text(text: object) -> str:
    return html.escape(str(text))


def _ms(ns: float) -> str:
    return f"{ns / 1e6:,.1f}"


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f}"
