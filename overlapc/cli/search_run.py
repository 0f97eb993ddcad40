"""`overlapc search` reads its options, searches, prints, and writes the files of `--out`.

Separate from `search.py`, because its imports take long.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from overlapc.cli.shared import COMPARED
from overlapc.core.errors import OptionError, did_you_mean
from overlapc.core.files import make_folder, save_plan, save_problem, write_file
from overlapc.core.schedule import format_schedule
from overlapc.planning.options import parse_budget
from overlapc.planning.report import Report
from overlapc.profiler.cache import Cache
from overlapc.profiler.hardware import Hardware, load_hardware
from overlapc.profiler.known import hardware_name
from overlapc.report.answer import Answer, located
from overlapc.report.page import page
from overlapc.report.trace import chrome_trace, pipeline_json
from overlapc.report.verdict import counted, verdict
from overlapc.search.alone import BY_MEGATRON, alone, unplanned
from overlapc.search.chosen import VERSION, ours
from overlapc.search.evaluate import Found, Outcome, evaluate
from overlapc.search.frameworks.framework import Framework
from overlapc.search.frameworks.known import find_framework
from overlapc.search.layouts import Cluster, Fixed
from overlapc.search.memory import tensor_bytes, usable_bytes
from overlapc.search.models.transformer import Model, Transformer
from overlapc.search.presets import find_model
from overlapc.search.search import Progress, Result, compare, search
from overlapc.search.weights import held_bytes
from overlapc.solvers import PREFIX, SOLVERS
from overlapc.tools.progress import doing, stoppable
from overlapc.validation.interval import interval
from overlapc.validation.nearest import Nearest, PublishedRun, load_runs

_NO_UNIT = 1_000_000  # fewer bytes than this are a number without its unit


def run(args: argparse.Namespace, memory: int | str | None) -> bool:
    """Search, print, then write; return whether anything fits. A full disk loses no verdict."""
    model = find_model(args.model, args.seq or 0)
    machine = load_hardware(args.hardware)
    framework = find_framework(args.framework)
    itself, solver = _asked(framework, model, args)
    compared = _compared(args, framework, itself, solver)
    cluster = _cluster(args, machine, framework, _usable(machine, memory))
    fixed = _fixed(args)
    cache = None if args.no_cache else args.cache or _cache_folder()
    if not isinstance(model, Transformer):
        cache = None  # the user's code may have changed since
    if args.out is not None:
        make_folder(args.out)

    with doing("searching layouts") as note:

        def tell(progress: Progress) -> None:
            left = progress.doing or f"{progress.left} left"
            note(f"{progress.tried} planned, {left}, {_best(progress)}")

        result = search(
            model,
            cluster,
            fixed,
            solver,
            alone=itself,
            instead=() if unplanned(framework, args.fp8) else itself or BY_MEGATRON,
            prune=not args.exhaustive,
            shown=args.top,
            rivals=[name for name in compared if name not in (solver, *itself)],
            cache=cache,
            progress=tell,
            slices=args.slices,
        )
    outcome, rows = _judged(model, cluster, result, compared)
    asked = {"command": args.command, "fixed": asdict(fixed), "solver": solver}
    public = _public(model, cluster, result)
    document = asked | _document(model, cluster, machine, result, rows, outcome)
    document["public"] = public and public.as_json()
    if args.out is not None and document["answer"]:
        document["answer"]["ours_script"] = located(document["answer"]["ours_script"], args.out)
    timeline = None if outcome is None else outcome.timeline
    try:
        if args.json:
            print(json.dumps(document, indent=1), flush=True)
        else:
            told = verdict(model, cluster, machine, result, rows, timeline, args.top, public)
            print(told if args.out is None else located(told, args.out), flush=True)
    finally:  # write the files even if stdout fails
        if args.out is not None:
            _write(args.out, document, outcome)
    if args.out is not None and not args.json:
        print(_written(args.out, outcome is not None, document["ours"] is not None))
    return result.best is not None


def _cluster(
    args: argparse.Namespace, machine: Hardware, framework: Framework, usable: int
) -> Cluster:
    """The GPUs, and what is asked of them."""
    batch = args.batch or 8 * args.gpus
    return Cluster(
        hardware_name(args.hardware),
        args.gpus,
        machine.gpus_per_node,
        usable,
        batch,
        _costs(args.costs),
        framework.name,
        args.fp8,
        of_run=True,
    )


def _usable(machine: Hardware, memory: int | str | None) -> int:
    """The bytes of a GPU that a plan may take: those that the user names, if it has as many."""
    if memory is None:
        return usable_bytes(machine)
    usable = parse_budget(memory, 0, 0)
    if isinstance(memory, int) and memory < _NO_UNIT:
        raise OptionError(
            f"--memory {memory}: found {memory} bytes; expected a unit, such as --memory "
            f'"{memory}GB"'
        )
    if usable > machine.total_bytes:
        raise OptionError(
            f"--memory {memory}: a GPU of {machine.name} has {machine.total_bytes / 1e9:.1f} GB; "
            "expected no more (a hardware file of your own may say another memory.bytes)"
        )
    return usable


def _costs(path: Path | None) -> str:
    """The file of measured op times, which is read before anything else takes long."""
    if path is None:
        return ""
    if not path.exists():
        raise OptionError(
            f"--costs {path}: there is no such file; expected one that training wrote with "
            "cache=FILE"
        )
    Cache(path)
    return str(path)


def _fixed(args: argparse.Namespace) -> Fixed:
    """What the user has decided of the layout."""
    return Fixed(
        args.tp,
        args.pp,
        args.dp,
        args.microbatch,
        args.schedule,
        not args.no_sequence_parallel,
        args.chunks,
        args.cp,
        args.expert_tensor_parallel,
        args.first_layers,
        args.last_layers,
        args.cp_comm_type,
        args.ep,
    )


def _asked(
    framework: Framework, model: Model, args: argparse.Namespace
) -> tuple[tuple[str, ...], str]:
    """The solvers of what the framework runs by itself; and the one whose plan is ours, or one of
    them where overlapc plans nothing."""
    itself = alone(framework, model, args.solver or "")
    if itself and (args.solver in itself or unplanned(framework, args.fp8)):
        return itself, itself[0]
    return itself, args.solver or "heu"


def _compared(
    args: argparse.Namespace, framework: Framework, itself: Sequence[str], solver: str
) -> list[str]:
    """The solvers that the winner is compared with."""
    compared = [name for name in (args.compare or "").split(",") if name]
    if args.compare is None:
        compared = list(dict.fromkeys([*itself, solver])) if itself else COMPARED.split(",")
    for name in (solver, *compared):
        if name == "torch" or not (name in SOLVERS or name.startswith(PREFIX)):
            names = ", ".join(known for known in SOLVERS if known != "torch")
            meant = did_you_mean(name, SOLVERS)
            raise OptionError(f"solver {name!r}: expected one of {names}, {PREFIX}MODULES{meant}")
    return compared


def _best(progress: Progress) -> str:
    best = progress.best
    if best is None:
        return "nothing fits yet"
    gap = best.step_ns / max(1, progress.bound_ns) - 1
    return f"{best.layout}: {best.step_ns / 1e6:.1f} ms, gap {gap:.1%}"


def _judged(
    model: Model, cluster: Cluster, result: Result, compared: Sequence[str]
) -> tuple[Outcome | None, list[Found]]:
    """Plan the winner again for its details, and with other solvers."""
    outcome: Outcome | None = None
    rows: list[Found] = []
    best, unit = result.best, result.unit
    try:
        with doing(f"comparing {', '.join(compared) or 'nothing'}"), stoppable():
            if best is not None and unit is not None and not result.interrupted:
                outcome = result.outcome or evaluate(
                    model,
                    cluster,
                    best.layout,
                    unit,
                    best.solver,
                    layers=best.layers,
                    known=best.rows,
                )
                rows = compare(model, cluster, outcome.found, unit, compared, result.planned)
    except KeyboardInterrupt:
        result.interrupted = True  # report the results so far
    return outcome, rows


def _public(model: Model, cluster: Cluster, result: Result) -> Nearest | None:
    """The published runs nearest to the winner."""
    if result.best is None:
        return None
    return Nearest.to(PublishedRun.of(model, cluster, result.best.layout), load_runs())


def _document(
    model: Model,
    cluster: Cluster,
    machine: Hardware,
    result: Result,
    rows: Sequence[Found],
    outcome: Outcome | None,
) -> dict[str, Any]:
    """Everything as JSON, for the page and for scripts."""
    best, pipeline, why = result.best, None, ""
    static = None if best is None else held_bytes(model, cluster, best.layout, best.layers)
    said = Answer.of(model, cluster, machine, result)
    planned = not unplanned(find_framework(cluster.framework), cluster.fp8)
    if outcome is not None and best is not None:
        why = _why(outcome.slowest.report, best.solver)
        pipeline = None if outcome.timeline is None else pipeline_json(outcome.timeline)
    return {
        "overlapc_search": VERSION,
        "model": asdict(model),
        "cluster": asdict(cluster),
        "seconds": round(result.seconds, 3),
        "interrupted": result.interrupted,
        "bound_ns": result.bound_ns,
        "certain": result.certain,
        "pruned": result.pruned,
        "counted": counted(result),
        "best": None if best is None else best.as_json(),
        "within": best and asdict(interval(best, cluster)),
        "static_bytes": static,
        "tensor_bytes": best
        and [tensor_bytes(cluster, best.layout, size) for size in static or ()],
        "answer": said and said.as_json(),
        "ours": ours(model, cluster, best if planned and not result.alone else result.ours),
        "tried": [found.as_json() for found in result.tried],
        "less_memory": [found.as_json() for found in result.less],
        "rivals": [found.as_json() for found in result.rivals],
        "compared": [found.as_json() for found in rows],
        "pipeline": pipeline,
        "explain": why,
        "hardware_sources": dict(machine.sources),
    }


def _why(report: Report, solver: str) -> str:
    """What `explain` says of a lone microbatch of the winner, by the name of its solver."""
    plan, found_by = report.plan, report.plan.found_by
    if plan.solver != solver:
        found_by = f"its plan is that of {plan.solver}"
    named = replace(plan, solver=solver, found_by=found_by)
    return replace(report, microbatches=1, plan=named).explain()


def _write(folder: Path, document: dict[str, Any], outcome: Outcome | None) -> None:
    write_file(folder / "search.json", json.dumps(document, indent=1) + "\n")
    write_file(folder / "report.html", page(document))
    if outcome is None or outcome.timeline is None:
        return
    best, slowest = outcome.found, outcome.slowest.report
    write_file(folder / "schedule.txt", format_schedule(best.schedule))
    write_file(folder / "trace.json", json.dumps(chrome_trace(outcome.timeline)))
    save_problem(folder / "problem.txt", slowest.problem)
    save_plan(folder / "plan.txt", slowest.plan)


def _written(folder: Path, whole: bool, ours: bool) -> str:
    if not whole:
        return f"\nwritten to {folder}: report.html and search.json"
    written = (
        f"\nwritten to {folder}: report.html, search.json, schedule.txt, trace.json (open it\nin "
        "Perfetto), problem.txt and plan.txt, a few blocks of the slowest stage:\n"
        f"overlapc explain {folder}/problem.txt {folder}/plan.txt"
    )
    if not ours:
        return written
    return (
        f"{written}\nTo train with overlapc: load_search (in overlapc.search.chosen) reads "
        f"{folder}/search.json:\nschedule, layers and memory budgets as overlapc.Pipeline and "
        "overlapc.optimize take them."
    )


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "overlapc" / "search"
