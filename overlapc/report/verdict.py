"""`verdict` writes the text of a search: the question with its sources, the answer, and the
reasons."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Any

from overlapc.core.pipeline import PipelineTimeline
from overlapc.report.answer import Answer, guessed
from overlapc.report.table import gigabytes, milliseconds, table
from overlapc.search.evaluate import Found
from overlapc.search.frameworks.known import find_framework
from overlapc.search.layouts import Cluster
from overlapc.search.memory import answer, needed_bytes
from overlapc.search.models.transformer import Model
from overlapc.search.search import Result
from overlapc.search.weights import divides_optimizer, held_bytes
from overlapc.solvers.pipeline.partition import layout
from overlapc.validation.nearest import Nearest

_PUBLIC = 4  # published runs that are shown


def verdict(
    model: Model,
    cluster: Cluster,
    machine: Any,
    result: Result,
    compared: Sequence[Found],
    timeline: PipelineTimeline | None,
    top: int,
    public: Nearest | None = None,
) -> str:
    """Write the whole report as text. `public` are the published runs nearest to the winner."""
    lines = _question(model, cluster, machine)
    said = Answer.of(model, cluster, machine, result)
    if result.best is None or said is None:
        return "\n".join([*lines, "", *_nothing(result), "", *_guesses(machine)])
    lines += [
        "",
        *_winner(said, result, result.best),
        *_room(model, cluster, result, result.best, machine),
        *_words(result, result.best),
        *_by_framework(said),
    ]
    if timeline is not None and result.best.layout.pp > 1:
        lines += ["", *_picture(timeline, result.best.microbatches)]
    if compared:
        lines += ["", "this layout, planned by", *_rows(compared)]
    if result.rivals:
        lines += ["", "each on its own best layout, layers split evenly"]
        lines += _rows([*result.rivals, *([result.ours] if result.ours else [])], _by_both)
    fitting = [found for found in result.tried if found.fits]
    if len(fitting) > 1:
        lines += ["", "the next layouts", *_rows(fitting[:top], lambda found: str(found.layout))]
    lines += _memory(result, result.best, fitting)
    lines += _public(public) if public is not None else ()
    return "\n".join([*lines, "", *_guesses(machine)])


def counted(result: Result) -> str:
    """How many plans of layouts were made, and what became of the others."""
    plans = f"{result.counted or len(result.tried)} layouts planned or found too large"
    if len(result.alone) > 1:
        plans += f" ({', '.join(result.alone)})"
    left = f", {result.left} not looked at" if result.left else ""
    return f"{plans}, {result.pruned} cannot win{left}, {result.seconds:.1f} s"


def _room(model: Model, cluster: Cluster, result: Result, best: Found, machine: Any) -> list[str]:
    """The fastest of the planned layouts that leaves room, if the winner does not."""

    def needed(found: Found) -> int:
        static = held_bytes(model, cluster, found.layout, found.layers)
        return max(map(needed_bytes, repeat(found.layout), static, found.peak_bytes), default=0)

    if answer(machine, needed(best)) == "fits":
        return []
    others = [found for found in result.tried if found.fits and found.layers]
    safe = [found for found in others if answer(machine, needed(found)) == "fits"]
    if not safe:
        return ["  no layout that was planned leaves room; a smaller --memory asks for one"]
    one = min(safe, key=lambda found: found.step_ns)
    slower = one.step_ns / max(1, best.step_ns) - 1
    return [
        f"  of those planned, the fastest that leaves room: {one.layout}, "
        f"{milliseconds(one.step_ns)} ms ({slower:.1%} more), {gigabytes(needed(one))} GB"
    ]


def _winner(said: Answer, result: Result, best: Found) -> list[str]:
    gap = best.step_ns / max(1, result.bound_ns) - 1
    return [
        said.headline,
        f"  step {milliseconds(best.step_ns)} ms, {best.tokens_per_s:,.0f} tokens/s, MFU "
        f"{best.mfu:.1%}; {said.recompute}",
        f"  predicted: {said.within}",
        f"  memory of a GPU: {said.memory}",
        f"  layers {layout(best.layers)}, {best.microbatches} microbatches",
        "  (E embedding, t*n so many transformer layers, L loss, | between stages: Megatron's "
        "--pipeline-model-parallel-layout)",
        f"  {counted(result)}; no layout that fits{' by itself' * bool(result.alone)} with its "
        f"layers split evenly is more than {gap:.1%} faster, by bound",
    ]


def _words(result: Result, best: Found) -> list[str]:
    """What the words of the winner's layout mean."""
    lines = []
    if any(found.layout.sequence for found in result.tried):
        lines.append("  +sp: tp ranks share sequences (Megatron's --sequence-parallel)")
    if best.layout.shares_experts:
        lines.append(
            "  +etp: tp ranks share each expert (Megatron's --expert-tensor-parallel-size)"
        )
    if best.layout.cp > 1:
        lines += _context(best.layout.cp_comm_type)
    if best.rows:
        lines.append("  rows placed: recompute and weight gradients are where ranks would wait")
    if best.merged:
        lines.append("  microbatches merged: each forward with the backward before (TrainStep)")
    if best.slices > 1:
        lines.append(
            f"  microbatches in {best.slices} slices that hide each other's collectives "
            f"(slices={best.slices}); a model that sees the whole batch is refused when it runs"
        )
    return lines


_EXCHANGES = {
    "p2p": "keys and values go round in a ring under attention",
    "a2a": "all-to-alls give each rank whole sequences of a part of the heads",
    "all_gather": "ranks gather keys and values of whole sequences",
}


def _context(kind: str) -> list[str]:
    """What context-parallel ranks exchange, and who runs it."""
    return [
        f"  cp: {_EXCHANGES[kind]} (Megatron's --cp-comm-type {kind}); exposed tp has it, too",
        "  Under overlapc.megatron attention is one op, Transformer Engine's own: what a plan puts "
        "between its parts runs outside of it",
    ]


def _started(script: str, arguments: str) -> list[str]:
    """What to start, with all arguments, in lines that can be pasted."""
    lines = textwrap.wrap(
        f"{script} {arguments}",
        96,
        initial_indent="    ",
        subsequent_indent="      ",
        break_on_hyphens=False,
        break_long_words=False,
    )
    return ["  Megatron's arguments:", *(f"{line} \\" for line in lines[:-1]), lines[-1]]


def _by_framework(said: Answer) -> list[str]:
    """The arguments of the winner, and what overlapc makes of the framework."""
    lines = _started(said.script, said.arguments) if said.arguments else [f"  {said.why_none}"]
    if said.ours_arguments:
        return [*lines, "", said.ours, *_started(said.ours_script, said.ours_arguments)]
    return [*lines, *([f"  {said.ours}"] if said.ours else [])]


def _picture(timeline: PipelineTimeline, microbatches: int) -> list[str]:
    shown = len({action.microbatch for ran in timeline.ran[0] for action in ran.step})
    if shown >= microbatches:
        return [timeline.picture()]
    rest = "the others go on as in the middle"
    return [timeline.picture(), f"({shown} of {microbatches} microbatches; {rest})"]


def _memory(result: Result, best: Found, fitting: Sequence[Found]) -> list[str]:
    """The winner's step with less memory, and the least memory that it needs."""
    lines: list[str] = []
    less = [found for found in result.less if found.fits]
    front = pareto([*fitting, *less])
    if len(front) > 1:
        lines += [
            "",
            "memory of a GPU and step (pareto of the layouts planned, and of the fastest with less "
            "memory)",
        ]
        lines += [
            f"  {gigabytes(max(f.peak_bytes)):>6} GB  {milliseconds(f.step_ns):>9} ms  {f.layout}"
            + (f", recompute {f.recompute_ns / f.step_ns:.1%}" if f in less else "")
            for f in front
        ]
    needs = [
        f"  {best.layout} needs at least {gigabytes(found.smallest_bytes)} GB"
        for found in result.less
        if not found.fits
    ]
    return lines + needs[:1]


def _public(near: Nearest) -> list[str]:
    """How far off predictions were of runs that others measured, those nearest to this one."""
    rows = [("off by", "measured ms", "predicted ms", "apart", "what ran", "table")]
    for run, far in list(zip(near.runs, near.octaves, strict=True))[:_PUBLIC]:
        steps = milliseconds(run.measured_ns), milliseconds(run.predicted_ns)
        rows.append((f"{run.error:+.1%}", *steps, f"{far:.1f}", str(run), run.named))
    count, most = len(near.runs), max(near.octaves)
    return [
        "",
        f"published runs nearest to this one, of {near.known:,}, and how far off predictions are",
        *table(rows, indent="  "),
        f"  the {count} nearest, up to {most:.1f} octaves apart, are off by {near.middle:.1%} in "
        f"the median, by {near.bias:+.1%} on average",
        "  (an octave: a factor of two in the GPU's flops, parameters, GPUs, tp, pp or a "
        "microbatch's tokens)",
    ]


def pareto(found: Sequence[Found]) -> list[Found]:
    """Return the layouts that no other beats in both time and memory; the smallest first."""
    best: list[Found] = []
    for one in sorted(found, key=lambda f: (f.step_ns, max(f.peak_bytes))):
        if not best or max(one.peak_bytes) < max(best[-1].peak_bytes):
            best.append(one)
    return best[::-1]


def _question(model: Model, cluster: Cluster, machine: Any) -> list[str]:
    framework = find_framework(cluster.framework)
    kept = {
        2: "bf16 gradients, float32 optimizer, the latter",
        4: "float32 gradients and optimizer, the latter",
    }.get(framework.gradient_bytes, "bf16 and float32 gradients, float32 optimizer, the latter")
    kept += f" {'divided over' if divides_optimizer(model, framework) else 'on all'}"
    if framework.gathers:
        kept = "weights, gradients and optimizer divided over"
        kept += " a node's" if framework.in_node else ""
    return [
        f"{model.name}: {model.parameters() / 1e9:.2f}B parameters, {model.layers} layers of width "
        f"{model.width}, sequences of {model.seq}" + (f" ({model.source})" if model.source else ""),
        f"{cluster.gpus} x {machine.name}, {cluster.gpus_per_node} a node, "
        f"{gigabytes(cluster.memory_bytes)} of {gigabytes(machine.total_bytes)} GB each may be "
        f"used ({machine.status})",
        f"{cluster.global_batch} sequences a step; {'FP8 products, all else ' * cluster.fp8}bf16, "
        f"{kept} replicas",
        "every figure is predicted, a GB is 10^9 bytes",
    ]


def _guesses(machine: Any) -> list[str]:
    return textwrap.wrap(guessed(machine.sources), 100, subsequent_indent="  ")


def _nothing(result: Result) -> list[str]:
    if result.interrupted:
        return ["interrupted before anything was planned"]
    smallest = min(result.tried, key=lambda f: f.smallest_bytes)
    known = "the smallest memory that works is" if result.certain else "what works is more than"
    return [
        f"nothing fits with layers split evenly; {known} {gigabytes(smallest.smallest_bytes)} GB a "
        f"GPU, with {smallest.layout}; rank {smallest.blocking_stage} of the pipeline blocks.",
        "More GPUs, a larger tp or pp, a smaller microbatch or shorter sequences would help.",
    ]


def _by_both(found: Found) -> str:
    return f"{found.solver}: {found.layout}"


def _share(found: Found, ns: int | None) -> str:
    """A time as a share of the step."""
    return f"{(ns or 0) / found.step_ns:.1%}"


def _rows(
    found: Sequence[Found], named: Callable[[Found], str] = lambda found: found.solver
) -> list[str]:
    head = ("", "step ms", "tokens/s", "MFU", "exposed tp", "a2a", "dp", "p2p", "bubble")
    rows: list[tuple[str, ...]] = [(*head, "recompute", "hidden", "peak GB", "gap")]
    for one in found:
        name = named(one)
        if not one.fits:
            rows.append((name, "does not fit", *[""] * 9, f"> {gigabytes(one.smallest_bytes)}", ""))
            continue
        exposed = dict(one.exposed_ns or {})
        rows.append(
            (
                name,
                milliseconds(one.step_ns),
                f"{one.tokens_per_s:,.0f}",
                f"{one.mfu:.1%}",
                *(_share(one, exposed.get(kind, 0)) for kind in ("tp", "all-to-all", "dp", "p2p")),
                f"{one.bubble:.1%}",
                _share(one, one.recompute_ns),
                _share(one, one.recompute_hidden_ns),
                " ".join(sorted({gigabytes(peak) for peak in one.peak_bytes}, reverse=True)[:3]),
                f"{one.gap:.1%}",
            )
        )
    return table(rows, indent="  ")
