"""`page` writes a search's result as one HTML page that needs no network.

The document is the JSON of `overlapc search --json`. Style and script are copied into the page from
`page.css` and `page.js`; `charts` draws the charts. The page is complete without script, which only
zooms the timeline and changes the compared layouts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from overlapc.core.errors import FileError
from overlapc.core.schedule import parse_step
from overlapc.report import charts
from overlapc.report.answer import Answer, guessed
from overlapc.report.charts import Dot, Found, row, table, text
from overlapc.report.table import gigabytes, milliseconds
from overlapc.search.chosen import VERSION
from overlapc.search.layouts import Layout
from overlapc.solvers.pipeline.partition import layout as megatron_layout
from overlapc.validation.nearest import Nearest

_SHOWN = 12  # most layouts in a table
GLOSSARY = {
    "step": "One optimizer step: all microbatches, forward and backward, gradients added over the "
    "replicas, weights updated. Predicted.",
    "tokens/s": "Tokens of a step on all GPUs, by the time of the step.",
    "MFU": "Model flops utilization: flops of forward and backward without recompute, of what the "
    "GPUs could do at most.",
    "tp, pp, dp": "How the GPUs are divided: tp ranks share each matrix, pp ranks hold different "
    "layers, dp replicas see different sequences.",
    "+sp": "The tp ranks share sequences between the matrices (Megatron's sequence parallelism).",
    "microbatch": "So many sequences go through the model at a time.",
    "stage": "Layers that are on one rank of the pipeline and follow each other. Some schedules "
    "give a rank several stages (chunks).",
    "layers": "A string like Et*8|t*8L is what Megatron's --pipeline-model-parallel-layout takes: "
    "E embedding, t*8 eight transformer layers, L loss, a bar between stages.",
    "exposed": "Communication that nothing hides: the GPU waits for it. Of tensor-parallel ranks "
    "(TP), of experts (all-to-all), of replicas (DP: a stage's gradients, from its last weight "
    "gradient on, and the new weights), between stages (p2p).",
    "bubble": "Time in which a rank of the pipeline stands still since no microbatch has come, on "
    "the slowest rank, of the whole step. Waiting for transfers counts as p2p.",
    "recompute": "Forward work done again in the backward, because its results were not kept.",
    "hidden": "Recompute that runs while a collective is on its way, which the GPU would else "
    "spend waiting.",
    "peak GB": "The most that a GPU holds at a time, the largest of all ranks. A GB is 10^9 bytes.",
    "gap": "How far the plans of the stages are above a proven lower bound, at most.",
    "octaves apart": "How unlike two runs are: an octave is a factor of two in the GPU's flops, "
    "parameters, GPUs, tp, pp or a microbatch's tokens; having experts or not counts as two.",
    "plan": "What to keep, what to recompute, and in what order to run everything in a stage.",
    "Pareto": "The layouts for which no other is both smaller and faster.",
}


def page(document: Mapping[str, Any]) -> str:
    """Write the page for a search's JSON."""
    if document.get("overlapc_search") != VERSION:
        raise FileError(
            f"a search of version {document.get('overlapc_search')!r}: expected the JSON that "
            "`overlapc search --json` of this version prints"
        )
    try:
        model, cluster = document["model"], document["cluster"]
        title = f"{model['name']} on {cluster['gpus']} x {cluster['hardware']}"
        body = [
            '<div class="eyebrow">overlapc search</div>',
            f"<h1>{text(title)}</h1>",
            f'<p class="note">{_question(model, cluster)}</p>',
            *_verdict(document),
            *(_found(document) if document["best"] is not None else ()),
            *_section("What went in", _inputs(document), look="long"),
            *_section("Words", _glossary(), look="long"),
        ]
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        raise FileError(
            f"a search's JSON lacks or garbles something ({error!r}): expected what `overlapc "
            "search --json` printed, unchanged"
        ) from None
    here = Path(__file__).parent
    style, script = ((here / name).read_text("utf-8") for name in ("page.css", "page.js"))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<title>{text(title)}</title>\n<link rel="icon" href="data:,">\n'
        f"<style>\n{style}</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + f"\n<script>\n{script}</script>\n</body>\n</html>\n"
    )


def _found(document: Mapping[str, Any]) -> list[str]:
    """The sections on the results."""
    best = document["best"]
    fitting = [found for found in document["tried"] if not found["smallest_bytes"]]
    less = [found for found in document["less_memory"] if not found["smallest_bytes"]]
    rivals = [found for found in _rivals(document) if not found["smallest_bytes"]]
    others = [found for found in document["compared"] if not found["smallest_bytes"]]
    mine = {"layout": best["layout"], "solver": best["solver"]}
    bars = [(f"{best['solver']}, the fastest", best)]
    bars += [(f"{f['solver']}, same layout", f) for f in others if f["solver"] != best["solver"]]
    bars += [(_both(f), f) for f in rivals if f["layout"] != best["layout"]]
    bars += [(layout_name(f), f) for f in fitting[:6] if f["layout"] != mine["layout"]]
    dots = [Dot(found, layout_name(found), "planned") for found in fitting]
    dots += [Dot(found, f"{layout_name(found)}, less memory", "less") for found in less]
    dots += [Dot(found, _both(found), "rival") for found in rivals]
    dots += [Dot(best, f"{layout_name(best)}, the fastest", "best")]
    body = [
        *_section(
            "Where the step goes",
            charts.bars(bars),
            "On the slowest rank. Compute has the optimizer in it.",
        )
    ]
    if document["pipeline"]:
        body += _pipeline(document, document["pipeline"])
    body += [
        '<div class="pair">',
        *_section(
            "Memory against time",
            charts.scatter(dots),
            "All layouts planned; the line is what a GPU with less memory could still do.",
        ),
        *_section(
            "Side by side",
            _sides(best, bars, fitting, less),
            "Choose any two layouts or plans.",
        ),
        "</div>",
        *_section(
            "This layout, planned by",
            _founds(document["compared"], lambda found: str(found["solver"]), best),
        ),
    ]
    if _rivals(document):
        body += _section(
            "Each on its own best layout",
            _founds([best, *_rivals(document)], _both, best),
            "Layers split evenly.",
        )
    body += _section(
        f"The fastest layouts of {len(document['tried'])} planned",
        _founds(fitting[:_SHOWN], layout_name, best),
    )
    if document.get("public"):  # a search before it was kept has none
        body += _public(Nearest.parse(document["public"]))
    if document["explain"]:
        why = f"<pre>{text(document['explain'])}</pre>"
        note = "Each collective of a few blocks of the slowest stage."
        body += _section("Why what remains is exposed", why, note, "long")
    return body


def _rivals(document: Mapping[str, Any]) -> list[Found]:
    """The best of other solvers, each on its own best layout; ours, too, if it is not the best."""
    ours = document["ours"] and document["ours"]["found"]
    return [*document["rivals"], *([ours] if ours and ours != document["best"] else [])]


def _section(title: str, content: str, note: str = "", look: str = "") -> list[str]:
    said = f'<p class="note">{text(note)}</p>' if note else ""
    named = f' class="{look}"' if look else ""
    return [f"<section{named}><h2>{text(title)}</h2>{said}{content}</section>"]


def _question(model: Mapping[str, Any], cluster: Mapping[str, Any]) -> str:
    return text(
        f"{model['layers']} layers of width {model['width']}, sequences of {model['seq']:,} "
        f"tokens, {cluster['global_batch']:,} of them a step; {cluster['gpus_per_node']} GPUs a "
        f"node, {gigabytes(cluster['memory_bytes'])} GB of each may be used. "
        "Every figure is predicted; a GB is 10^9 bytes."
    )


def _verdict(document: Mapping[str, Any]) -> list[str]:
    best = document["best"]
    if best is None and document["interrupted"]:
        return ['<p class="answer">Interrupted before anything that fits was found.</p>']
    if best is None:
        known = (
            "The smallest memory that works is" if document.get("certain", True) else "More than"
        )
        least = min(document["tried"], key=lambda f: f["smallest_bytes"])
        size, stage = gigabytes(least["smallest_bytes"]), least["blocking_stage"]
        return [
            f'<p class="answer">Nothing fits, layers split evenly. {known} {size} GB a GPU, with '
            f"{text(layout_name(least))}; rank {int(stage)} of the pipeline blocks.</p>",
        ]
    gap = best["step_ns"] / max(1, document["bound_ns"]) - 1
    placed = "Recompute and weight gradients are where ranks would wait. " if best["rows"] else ""
    if best["merged"]:
        placed = "Microbatches merged: each forward with the backward before (TrainStep). "
    if best.get("slices", 1) > 1:
        placed += (
            f"Microbatches in {int(best['slices'])} slices, which hide each other's collectives. "
        )
    said = Answer.parse(document["answer"])
    alarm = ' <span class="alarm">Interrupted</span>' if document["interrupted"] else ""
    tiles = [
        (milliseconds(best["step_ns"]), "ms a step"),
        (f"{best['tokens_per_s']:,.0f}", "tokens a second"),
        (f"{best['mfu']:.1%}", "MFU"),
        (gigabytes(max(best["peak_bytes"])), "GB at the peak"),
    ]
    for rival in document["rivals"]:
        if rival["solver"] in ("full", "megatron") and not rival["smallest_bytes"]:
            told = {"full": "full recompute", "megatron": "Megatron's best settings"}
            what = f"as fast as {told[rival['solver']]}, on its own best layout"
            tiles.append((f"{rival['step_ns'] / best['step_ns']:.2f}×", what))
    tiles.append((f"≤ {gap:.1%}", "that any other layout could be faster, by bound"))
    arguments = [_command(f"{said.script} {said.arguments}")] if said.arguments else []
    ours = [_command(f"{said.ours_script} {said.ours_arguments}")] if said.ours_arguments else []
    shown = "".join(f"<div><b>{value}</b><span>{what}</span></div>" for value, what in tiles)
    return [
        f'<p class="answer">{text(said.headline)}{alarm}</p>',
        f'<div class="tiles">{shown}</div>',
        f'<p class="note">Predicted: {text(said.within)}. Memory of a GPU: {text(said.memory)}. It '
        f"{text(said.recompute)}.</p>",
        f'<p class="note">{int(best["microbatches"])} microbatches; layers '
        f"<b>{text(megatron_layout(list(map(int, best['layers']))))}</b> (E embedding, t*n so many "
        "transformer layers, L loss, | between stages). "
        f"{text(document['counted'])}; layers split evenly meanwhile. {placed}</p>",
        _command(document["command"]),
        *(arguments or [f'<p class="note">{text(said.why_none)}.</p>']),
        *([f'<p class="note">{text(said.ours)}</p>'] if said.ours else []),
        *ours,
        f'<p class="note">{text(guessed(document["hardware_sources"]))}</p>',
    ]


def _command(line: str) -> str:
    """A line to paste."""
    return f'<div class="command"><pre>{text(line)}</pre><button type="button">copy</button></div>'


def layout_name(found: Mapping[str, Any]) -> str:
    return str(Layout(**found["layout"]))


def _both(found: Found) -> str:
    return f"{found['solver']}: {layout_name(found)}"


_HEAD = (
    "", "step ms", "tokens/s", "MFU", "exposed TP", "all-to-all", "DP", "p2p", "bubble",
    "recompute", "hidden", "peak GB", "gap",
)  # fmt: skip
_TITLES = {
    **{word: GLOSSARY[word] for word in _HEAD if word in GLOSSARY},
    "step ms": GLOSSARY["step"],
    **dict.fromkeys(("exposed TP", "all-to-all", "DP", "p2p"), GLOSSARY["exposed"]),
}


def _founds(found: Sequence[Found], named: charts.Named, best: Found) -> str:
    rows = []
    for one in found:
        name = text(named(one))
        if one["smallest_bytes"]:
            lacks = f"does not fit: {gigabytes(one['smallest_bytes'])} GB at least"
            rows.append(f'<tr class="no"><td>{name}</td><td colspan="12">{lacks}</td></tr>')
            continue
        step, exposed = one["step_ns"], one["exposed_ns"] or {}
        cells = [
            milliseconds(step),
            f"{one['tokens_per_s']:,.0f}",
            f"{one['mfu']:.1%}",
            *(f"{exposed.get(kind, 0) / step:.1%}" for kind in ("tp", "all-to-all", "dp", "p2p")),
            f"{one['bubble']:.1%}",
            f"{one['recompute_ns'] / step:.1%}",
            f"{one['recompute_hidden_ns'] / step:.1%}",
            gigabytes(max(one["peak_bytes"])),
            f"{one['gap']:.1%}",
        ]
        rows.append(row([named(one), *cells], "best" if one == best else ""))
    return f'<div class="wide">{table(_HEAD, rows, _TITLES)}</div>'


def _public(near: Nearest) -> list[str]:
    """The section on published runs."""
    rows = [
        row(
            [
                f"{run.error:+.1%}",
                milliseconds(run.measured_ns),
                milliseconds(run.predicted_ns),
                f"{far:.1f}",
                str(run),
                run.named,
            ]
        )
        for run, far in zip(near.runs, near.octaves, strict=True)
    ]
    head = ("off by", "measured ms", "predicted ms", "octaves apart", "what ran", "table")
    return _section(
        "Published runs nearest to this one",
        f'<div class="wide">{table(head, rows, GLOSSARY)}</div>',
        f"Of {near.known:,} that others measured. These {len(near.runs)} are off by "
        f"{near.middle:.1%} in the median, by {near.bias:+.1%} on average.",
    )


def _pipeline(document: Mapping[str, Any], pipeline: Found) -> list[str]:
    """The sections on the ranks' timeline and memory."""
    best = document["best"]
    layout, layers = Layout(**best["layout"]), best["layers"]
    names = []
    for rank in range(layout.pp):
        stages = layout.stages_of(rank)
        held = "+".join(str(int(layers[stage])) for stage in stages)
        which = f"stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}"
        names.append(f"rank {rank}<small>{which}: {held} layers</small>")
    body = []
    if layout.pp > 1:
        body += _section(
            "What the ranks do", charts.timeline(pipeline, names), _still(best, pipeline)
        )
    body += _section(
        "What the ranks hold",
        charts.memory(
            pipeline,
            names,
            document["static_bytes"],
            best["peak_bytes"],
            min(document["tensor_bytes"]),
        ),
        ("The same time. " if layout.pp > 1 else "")
        + "While an action runs, its worst moment is drawn; the figures beside count "
        "the ops within it, and may differ by a few percent.",
    )
    return body


def _still(best: Found, pipeline: Found) -> str:
    """How long ranks are idle, in the picture and in the whole step."""
    step, count = max(1, pipeline["step_ns"]), int(best["microbatches"])
    drawn = {
        action.microbatch
        for word, _, _ in pipeline["ranks"][0]["steps"]
        for action in parse_step(word)
    }
    still = [rank["bubble_ns"] / step for rank in pipeline["ranks"]]
    picture = f"a rank stands still {min(still):.1%} to {max(still):.1%} of the time here"
    waits = best["bubble"] + (best["exposed_ns"] or {}).get("p2p", 0) / best["step_ns"]
    whole = f"{waits:.1%} of the whole step, the tables' bubble and p2p"
    hint = "Numbers are microbatches; Ctrl and wheel zoom, too."
    if len(drawn) < count:
        return (
            f"The first {len(drawn)} of {count} microbatches as if they were all, "
            f"{milliseconds(step)} of {milliseconds(best['step_ns'])} ms: {picture}. The others go "
            f"on as in the middle, so the slowest rank stands still {whole}. {hint}"
        )
    return (
        f"All of the step's {count} microbatches, {milliseconds(step)} of "
        f"{milliseconds(best['step_ns'])} ms; the optimizer and gathering the weights follow. "
        f"{picture.capitalize()}; the slowest {whole}. {hint}"
    )


def _sides(
    best: Found,
    bars: Sequence[tuple[str, Found]],
    fitting: Sequence[Found],
    less: Sequence[Found],
) -> str:
    """Two layouts side by side; the script changes which."""
    named = {f"{name} ({layout_name(found)})" if "," in name else name: found
             for name, found in bars}  # fmt: skip
    for found in fitting:
        if found["layout"] != best["layout"]:
            named.setdefault(layout_name(found), found)
    for found in less:
        named[f"{gigabytes(max(found['peak_bytes']))} GB: {layout_name(found)}"] = found
    founds = list(named.values())
    longest = max(found["step_ns"] for found in founds)
    cells = [_cells(found) for found in founds]
    different = (i for i, found in enumerate(founds) if found["step_ns"] != best["step_ns"])
    right = next(different, len(founds) - 1)
    data = [
        {"bar": charts.bar(found, longest), "cells": list(figures.values())}
        for found, figures in zip(founds, cells, strict=True)
    ]
    picks = []
    for side, chosen in enumerate((0, right)):
        options = "".join(
            f'<option value="{i}"{" selected" * (i == chosen)}>{text(name)}</option>'
            for i, name in enumerate(named)
        )
        what = "left" if side == 0 else "right"
        picks.append(f'<th><select aria-label="{what}">{options}</select></th>')
    two = (0, right)
    rows = ["<tr><td>where it goes</td>" + "".join(
        f'<td><div class="bar">{data[i]["bar"]}</div></td>' for i in two) + "</tr>"]  # fmt: skip
    rows += [row([key, *(cells[i][key] for i in two)]) for key in cells[0]]
    shown = json.dumps(data, ensure_ascii=True).replace("<", "\\u003c")
    return (
        f'<div class="wide sides"><table><thead><tr><th></th>{"".join(picks)}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
        f'<script type="application/json" id="founds">{shown}</script>'
    )


def _cells(found: Found) -> dict[str, str]:
    step = found["step_ns"]
    parts = {
        charts.PARTS[part]: f"{milliseconds(ns)} ms ({ns / step:.1%})"
        for part, ns in charts.parts_of(found).items()
    }
    return {
        "step": f"{milliseconds(step)} ms",
        "tokens/s": f"{found['tokens_per_s']:,.0f}",
        "MFU": f"{found['mfu']:.1%}",
        **parts,
        "peak": f"{gigabytes(max(found['peak_bytes']))} GB",
        "layers": megatron_layout(list(map(int, found["layers"]))),
        "microbatches": str(int(found["microbatches"])),
    }


def _inputs(document: Mapping[str, Any]) -> str:
    model, cluster = document["model"], document["cluster"]
    rows = [row([f"model: {key}", value, model["source"]]) for key, value in model.items()]
    rows += [row([f"cluster: {key}", value, "as asked"]) for key, value in cluster.items()]
    for key, source in document["hardware_sources"].items():
        rows.append(row([f"hardware: {key}", "", source]))
    shown = table(["what", "value", "source"], rows)
    return (
        "<details><summary>Model, cluster, and where the hardware's figures come from</summary>"
        f'<div class="words wide">{shown}</div></details>'
    )


def _glossary() -> str:
    terms = "".join(
        f"<dt>{text(word)}</dt><dd>{text(told)}</dd>" for word, told in GLOSSARY.items()
    )
    return f"<dl>{terms}</dl>"
