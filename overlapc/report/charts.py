"""Functions that draw the charts of a search's page, as HTML that scales with the window.

Positions are in percent of the plot, and text stands beside it. So a chart is legible on a phone
and on paper, and needs no script. Every function takes parts of the JSON of `overlapc search
--json`.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from overlapc.core.schedule import Step, parse_step
from overlapc.report.table import gigabytes, milliseconds

COLOURS = {"F": "#4878a8", "B": "#c47a3d", "I": "#d9a05b", "W": "#7a9a5a", "R": "#a05a7a"}
KINDS = {
    "F": "forward",
    "B": "whole backward",
    "I": "input gradients",
    "W": "weight gradients",
    "R": "recompute",
    "D": "gradients over the replicas",
}
# The parts of a step's time: class and name, in the order of a bar
PARTS = {
    "compute": "compute",
    "recompute": "recompute",
    "hidden": "recompute beside communication",
    "tp": "exposed tensor-parallel",
    "all-to-all": "exposed all-to-all",
    "dp": "exposed data-parallel",
    "p2p": "exposed between stages",
    "bubble": "bubble",
}
_LEGIBLE = 1.7  # from this width on (percent of the plot) a microbatch's number has room
Found = Mapping[str, Any]
Named = Callable[[Found], str]


@dataclass(frozen=True)
class Dot:
    """A point of the memory-time chart."""

    found: Found
    name: str
    kind: str  # planned, less, rival or best


def parts_of(found: Found) -> dict[str, int]:
    """Split a step's nanoseconds on the slowest rank by cause; the parts add up to the step."""
    exposed = found["exposed_ns"] or {}
    parts = {
        "recompute": found["recompute_ns"] - found["recompute_hidden_ns"],
        "hidden": found["recompute_hidden_ns"],
        **{kind: exposed.get(kind, 0) for kind in ("tp", "all-to-all", "dp", "p2p")},
        "bubble": round(found["bubble"] * found["step_ns"]),
    }
    return {"compute": max(0, found["step_ns"] - sum(parts.values())), **parts}


def bars(named: Sequence[tuple[str, Found]]) -> str:
    """Draw a bar for each entry, in proportion to its step."""
    longest = max(found["step_ns"] for _, found in named)
    rows = []
    for name, found in named:
        ms = milliseconds(found["step_ns"])
        rows.append(
            f"<div>{text(name)}</div>"
            f'<div class="bar">{bar(found, longest)}</div><div class="num">{ms}</div>'
        )
    used = [part for part in PARTS if any(parts_of(found)[part] for _, found in named)]
    return (
        f'{legend([(part, PARTS[part]) for part in used])}<div class="bars">'
        f'<div></div><div></div><div class="num note">ms</div>{"".join(rows)}</div>'
    )


def bar(found: Found, longest: int) -> str:
    """Draw the parts of one bar."""
    pieces = []
    for part, ns in parts_of(found).items():
        if ns:
            share = f"{ns / found['step_ns']:.1%} of the step"
            title = f"{PARTS[part]}: {milliseconds(ns)} ms, {share}"
            pieces.append(
                f'<i class="{part}" style="width:{ns / longest:.3%}" title="{title}"></i>'
            )
    return "".join(pieces)


def timeline(pipeline: Found, names: Sequence[str]) -> str:
    """Draw a lane for each rank, a box for each action with its microbatch; merged pieces above
    each other. Later stages of a rank are lighter."""
    step = max(1, pipeline["step_ns"])
    lanes, kinds = [], set()
    for rank, row in enumerate(pipeline["ranks"]):
        mine = sorted({a.stage for word, _, _ in row["steps"] for a in parse_step(word)})
        boxes = []
        for (word, start, end), level in zip(row["steps"], row["memory"], strict=True):
            actions = parse_step(word)
            kinds |= {action.kind for action in actions}
            span = f"{milliseconds(start)} to {milliseconds(end)} ms, {gigabytes(level)} GB at most"
            title = f"rank {rank}: {told(actions)}, {span}"
            for i, action in enumerate(actions):
                look = action.kind + (" later" if action.stage != mine[0] else "")
                look += " tiny" if (end - start) / step * 100 < _LEGIBLE else ""
                tall = f";top:{i / len(actions):.0%};height:{1 / len(actions):.0%}"
                boxes.append(
                    f'<i class="{look}" style="left:{start / step:.3%};width:'
                    f'{(end - start) / step:.3%}{tall if len(actions) > 1 else ""}" '
                    f'title="{title}">{action.microbatch}</i>'
                )
        for stage, there, start, end in pipeline["reductions"]:
            if there == rank:
                kinds.add("D")
                span = f"{milliseconds(start)} to {milliseconds(end)} ms"
                boxes.append(
                    f'<i class="D tiny" style="left:{start / step:.3%};width:'
                    f'{(end - start) / step:.3%};top:70%;height:30%" title="gradients '
                    f'of stage {int(stage)} over the replicas of rank {rank}, {span}"></i>'
                )
        lanes.append(f'<div class="lane">{"".join(boxes)}</div>')
    known = [(kind, what) for kind, what in KINDS.items() if kind in kinds]
    if any(" later" in lane for lane in lanes):
        known.append(("later", "lighter: a later stage of the rank"))
    tools = "".join(
        f'<button type="button" data-zoom="{by}">{what}</button>'
        for by, what in (("2", "closer"), ("0.5", "wider"), ("0", "whole"))
    )
    return (
        f'{legend([*known, ("still", "stands still")])}<div class="tools">{tools}</div>'
        f'<div class="lanes"><div class="names">{"".join(f"<div>{name}</div>" for name in names)}'
        f'</div><div class="scroll" tabindex="0"><div class="stretch">{"".join(lanes)}'
        f"{across(pipeline['step_ns'] / 1e6, 'ms')}</div></div></div>"
    )


def told(step: Step) -> str:
    """Describe a step in words."""
    return " and ".join(
        f"{KINDS[a.kind]} of microbatch {a.microbatch}, stage {a.stage}" for a in step
    )


def memory(
    pipeline: Found, names: Sequence[str], static: Sequence[int], peaks: Sequence[int], cap: int
) -> str:
    """Draw the memory of each rank over time, also during stalls: weights with gradients and
    optimizer below, activations above; and the limit as a line."""
    step = max(1, pipeline["step_ns"])
    most = max(cap, *(level for row in pipeline["ranks"] for level in row["memory"])) * 1.04
    rows = []
    for name, row, below, peak in zip(names, pipeline["ranks"], static, peaks, strict=True):
        corners = [(0.0, below)]
        for (_, start, end), level, after in zip(
            row["steps"], row["memory"], row["held"], strict=True
        ):
            corners += [(start / step, corners[-1][1]), (start / step, level)]
            corners += [(end / step, level), (end / step, after)]
        corners += [(1.0, corners[-1][1])]
        line = " ".join(f"{x * 1000:.1f},{100 - y / most * 100:.2f}" for x, y in corners)
        floor = 100 - below / most * 100
        rows.append(
            f'<div class="name">{name}</div><div class="plot low">'
            '<svg viewBox="0 0 1000 100" preserveAspectRatio="none" role="img" '
            f'aria-label="memory over time">'
            f'<polygon class="held" points="0,100 {line} 1000,100"/>'
            f'<rect class="static" x="0" y="{floor:.2f}" width="1000" height="{100 - floor:.2f}"/>'
            f'</svg><hr style="bottom:{cap / most:.3%}"></div>'
            f'<div class="num">{gigabytes(peak)}</div>'
        )
    key = legend(
        [
            ("held", "activations and what works on them"),
            ("static", "weights, gradients, optimizer"),
            ("cap", f"{gigabytes(cap)} GB may be tensors"),
        ]
    )
    return (
        f'{key}<div class="tracks"><div></div><div></div><div class="num note">peak GB</div>'
        f'{"".join(rows)}<div></div><div class="axis-only">{across(step / 1e6, "ms")}</div></div>'
    )


def scatter(dots: Sequence[Dot]) -> str:
    """Draw a chart of memory (to the right) and time (up), and the line of points that none beats
    in both."""
    sizes = [max(dot.found["peak_bytes"]) / 1e9 for dot in dots]
    times = [dot.found["step_ns"] / 1e6 for dot in dots]
    left, right = around(sizes)
    low, high = around(times)
    x = [(size - left) / (right - left) for size in sizes]
    y = [(time - low) / (high - low) for time in times]
    front: list[int] = []
    for i in sorted(range(len(dots)), key=lambda i: (sizes[i], times[i])):
        if not front or times[i] < times[front[-1]]:
            front.append(i)
    corners: list[tuple[float, float]] = []
    for i in front:  # best with less memory than the next point
        corners += [(x[i], corners[-1][1])] if corners else []
        corners.append((x[i], y[i]))
    line = " ".join(f"{a * 1000:.1f},{1000 - b * 1000:.1f}" for a, b in corners)
    marks = "".join(
        f'<b class="{dot.kind}" style="left:{a:.2%};bottom:{b:.2%}" title="{text(dot.name)}: '
        f'{gigabytes(max(dot.found["peak_bytes"]))} GB, {milliseconds(dot.found["step_ns"])} ms">'
        "</b>"
        for dot, a, b in zip(dots, x, y, strict=True)
    )
    levels = "".join(
        f'<span style="bottom:{(tick - low) / (high - low):.2%}">{shown}</span>'
        for tick, shown in ticks(low, high)
    )
    told = {"planned": "layouts planned", "less": "the fastest with less memory",
            "rival": "what others run, each on its best layout", "best": "the fastest"}  # fmt: skip
    used = [(kind, what) for kind, what in told.items() if any(d.kind == kind for d in dots)]
    return (
        f"{legend([*used, ('front', 'Pareto: nothing is both smaller and faster')])}"
        f'<div class="note">ms a step</div><div class="graph"><div class="up">{levels}</div>'
        '<div class="plot high"><svg viewBox="0 0 1000 1000" preserveAspectRatio="none" '
        f'role="img" aria-label="memory and step of layouts"><polyline points="{line}"/></svg>'
        f'{marks}</div><div></div><div class="axis-only">{across(right, "GB at the peak", left)}'
        "</div></div>"
    )


def around(values: Sequence[float]) -> tuple[float, float]:
    """Return the range of the values, with margins at both ends."""
    least, most = min(values), max(values)
    room = (most - least) * 0.08 or most * 0.1 or 1.0
    return max(0.0, least - room), most + room


def across(most: float, unit: str, least: float = 0.0) -> str:
    """Draw a horizontal axis."""
    marks = [
        f'<span style="left:{(tick - least) / (most - least):.2%}">{shown}</span>'
        for tick, shown in ticks(least, most)
        if (tick - least) / (most - least) < 0.97
    ]
    return f'<div class="axis">{"".join(marks)}</div><div class="unit">{unit}</div>'


def ticks(least: float, most: float) -> list[tuple[float, str]]:
    """Return about five round numbers in a range."""
    rough = max(most - least, 1e-9) / 7
    power = 10 ** math.floor(math.log10(rough))
    each = next(power * by for by in (1, 2, 5, 10) if power * by >= rough)
    digits = max(0, -math.floor(math.log10(each) + 1e-9))
    first = math.ceil(least / each - 1e-9)
    count = math.floor((most - first * each) / each + 1e-9)
    return [((first + i) * each, f"{(first + i) * each:,.{digits}f}") for i in range(count + 1)]


def legend(known: Iterable[tuple[str, str]]) -> str:
    return '<p class="legend">' + "".join(
        f'<span><i class="{look}"></i>{text(what)}</span>' for look, what in known
    ) + "</p>"  # fmt: skip


def table(head: Sequence[str], rows: Iterable[str], titles: Mapping[str, str] | None = None) -> str:
    """Write rows under a head; `titles` explains its words when the pointer rests on them."""
    known = titles or {}
    cells = "".join(
        f"<th{f' title={chr(34)}{text(known[cell])}{chr(34)}' if cell in known else ''}>"
        f"{text(cell)}</th>"
        for cell in head
    )
    return f"<table><thead><tr>{cells}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def row(cells: Iterable[str], look: str = "") -> str:
    named = f' class="{look}"' if look else ""
    return f"<tr{named}>" + "".join(f"<td>{text(cell)}</td>" for cell in cells) + "</tr>"


def text(words: object) -> str:
    return html.escape(str(words))
