"""`verdict` writes the text of a search: the question with its sources, the answer, and the
reasons."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Any

from overlapc.pipeline import PipelineTimeline
from overlapc.report.table import gigabytes, milliseconds, table
from overlapc.search.evaluate import Found
from overlapc.search.frameworks import find_framework
from overlapc.search.interval import interval
from overlapc.search.layouts import Cluster, expert_ranks
from overlapc.search.megatron import (
    RUN_BY_MEGATRON,
    megatron_arguments,
    recompute_arguments,
    replica_arguments,
)
from overlapc.search.memory import answer, needed_bytes
from overlapc.search.models import Model
from overlapc.search.nearest import Nearest
from overlapc.search.search import Result
from overlapc.search.weights import divides_optimizer, held_bytes
from overlapc.solvers.partition import layout

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
    if result.best is None:
        return "\n".join([*lines, "", *_nothing(result)])
    lines += [
        "",
        *_winner(model, cluster, result, result.best, machine),
        *_megatron(model, cluster, result.best),
    ]
    if timeline is not None and result.best.layout.pp > 1:
        lines += ["", *_picture(timeline, result.best.microbatches)]
    if compared:
        lines += ["", "this layout, planned by", *_rows(compared)]
    if result.rivals:
        lines += ["", "each on its own best layout, layers split evenly"]
        lines += _rows(result.rivals, _by_both)
    fitting = [found for found in result.tried if found.fits]
    if len(fitting) > 1:
        lines += ["", "the next layouts", *_rows(fitting[:top], lambda found: str(found.layout))]
    lines += _memory(result, result.best, fitting)
    return "\n".join([*lines, *(_public(public) if public is not None else ())])


def _room(model: Model, cluster: Cluster, result: Result, best: Found, machine: Any) -> list[str]:
    """What a run of the winner needs, if that is near all memory of a GPU or more, and the fastest
    of the planned layouts that leaves room."""

    def needed(found: Found) -> int:
        static = held_bytes(model, cluster, found.layout, found.layers)
        return max(map(needed_bytes, repeat(found.layout), static, found.peak_bytes), default=0)

    said = answer(machine, needed(best))
    if said == "fits":
        return []
    lines = [
        f"  {said}: {gigabytes(needed(best))} of {gigabytes(machine.total_bytes)} GB with what "
        "CUDA, NCCL and fragments take; so near the whole, steps are slow or fail"
    ]
    others = [found for found in result.tried if found.fits and found.layers]
    safe = [found for found in others if answer(machine, needed(found)) == "fits"]
    if not safe:
        return [*lines, "  no layout that was planned leaves room; a smaller --memory asks for one"]
    one = min(safe, key=lambda found: found.step_ns)
    slower = one.step_ns / max(1, best.step_ns) - 1
    lines.append(
        f"  of those planned, the fastest that leaves room: {one.layout}, "
        f"{milliseconds(one.step_ns)} ms ({slower:.1%} more), {gigabytes(needed(one))} GB"
    )
    return lines


def _winner(model: Model, cluster: Cluster, result: Result, best: Found, machine: Any) -> list[str]:
    kept = "interrupted, the best so far" if result.interrupted else "the fastest"
    gap = best.step_ns / max(1, result.bound_ns) - 1
    lines = [
        f"{kept}: {best.layout}",
        f"  step {milliseconds(best.step_ns)} ms, {best.tokens_per_s:,.0f} tokens/s, MFU "
        f"{best.mfu:.1%}; no layout that fits with its layers split evenly is more than "
        f"{gap:.1%} faster, by bound",
        _within(best, cluster),
        f"  layers {layout(best.layers)}, {best.microbatches} microbatches",
        "  (E embedding, t*n so many transformer layers, L loss, | between stages: Megatron's "
        "--pipeline-model-parallel-layout)",
        f"  {len(result.tried)} layouts planned or found too large, {result.pruned} cannot win, "
        f"{result.seconds:.1f} s",
    ]
    lines += _room(model, cluster, result, best, machine)
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


def _within(best: Found, cluster: Cluster) -> str:
    """Where a measured step should be, and what its sources only guess."""
    found = interval(best, cluster)
    low, high = milliseconds(found.low_ns), milliseconds(found.high_ns)
    guessed = f"; guessed: {', '.join(found.guessed)}" if found.guessed else ""
    return f"  predicted: four of five measured steps should be within {low} to {high} ms{guessed}"


def _megatron(model: Model, cluster: Cluster, best: Found) -> list[str]:
    """The arguments of Megatron's scripts for this layout."""
    schedule, framework = best.layout.schedule, find_framework(cluster.framework)
    if framework.gathers and framework.pytorch:
        return [
            "  PyTorch's FSDP gathers and sums around layers, which no plan of overlapc sees: none "
            "and full",
            "  are what it runs by itself",
        ]
    if schedule not in RUN_BY_MEGATRON:
        return [f"  Megatron has no schedule {schedule}: search with --schedule 1f1b for its runs"]
    experts = expert_ranks(model, best.layout)
    where = best.layout, best.layers, best.microbatches, experts
    if model.experts and best.layout.tp > 1 and not best.layout.sequence:
        return ["  Megatron has no experts beside tp without sequence parallelism"]
    said = " ".join(
        [
            *megatron_arguments(*where, cluster.fp8, model.experts > 0, framework),
            *replica_arguments(model, best.layout, framework),
            *recompute_arguments(best.solver),
        ]
    )
    unseen = "Megatron-FSDP" * bool(framework.gathers) or "CUDA graphs" * framework.graphs
    more = f" (overlapc.megatron plans no run with {unseen})" if unseen else ""
    return textwrap.wrap(
        f"Megatron: {said}{more}",
        100,
        initial_indent="  ",
        subsequent_indent="    ",
        break_on_hyphens=False,
    )


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
    guessed = [key for key, source in machine.sources.items() if _is_guess(source)]
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
        f"{gigabytes(cluster.memory_bytes)} of {gigabytes(machine.memory_bytes)} GB each "
        f"({machine.status})",
        f"{cluster.global_batch} sequences a step; {'FP8 products, all else ' * cluster.fp8}bf16, "
        f"{kept} replicas",
        f"every figure is predicted, a GB is 10^9 bytes; {len(guessed)} of {len(machine.sources)} "
        "figures of the hardware are guesses (`overlapc hardware --json` has the sources)"
        + ":"
        * bool(guessed),
        *textwrap.wrap(", ".join(guessed), 100, initial_indent="  ", subsequent_indent="  "),
    ]


def _is_guess(source: str) -> bool:
    return "guess" in source or "unknown" in source


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
