"""The command line: `overlapc COMMAND`. Data goes to stdout, talk to stderr.

Exit codes: 0 good, 1 nothing fits or a check failed, 2 wrong use. What needs torch is imported
when a command needs it, so that `--help` is instant.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from overlapc import __version__
from overlapc.errors import (
    FileError,
    Infeasible,
    InvalidPlan,
    InvalidProblem,
    InvalidSchedule,
    OverlapcError,
)

GOOD, FAILED, USAGE = 0, 1, 2
_MOST = 1_000_000
COMPARED = "none,full,selective,megatron,checkmate,heu,opt"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    parser = _parser()
    for stream in (sys.stdout, sys.stderr):  # no name in a file is a reason to fall over
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        args = parser.parse_args(argv)
    except SystemExit as ended:  # argparse has said why
        return int(ended.code or 0)
    try:
        args.command = shlex.join(["overlapc", *(sys.argv[1:] if argv is None else argv)])
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except (Infeasible, InvalidPlan, InvalidProblem, InvalidSchedule) as error:
        _say(f"overlapc: {error}")
        return FAILED
    except OverlapcError as error:
        _say(f"overlapc: {error}")
        return USAGE
    except BrokenPipeError:  # whoever read the output has seen enough
        _write_no_more()
        return GOOD
    except OSError as error:  # most often a full disk behind `> file`
        _write_no_more()
        _say(f"overlapc: {error}; expected to read and write: free space, or name another file")
        return FAILED
    except KeyboardInterrupt:
        _say("overlapc: interrupted")
        return FAILED


def _write_no_more() -> None:
    """What is still in the buffer of stdout must not fail again when the process ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="overlapc",
        description="Which parallel layout, schedule and overlap plan trains a model fastest.",
        epilog="Every figure is predicted unless it says measured. A GB is 10^9 bytes, everywhere.",
    )
    parser.add_argument("--version", action="version", version=f"overlapc {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def command(
        name: str, run: Callable[[argparse.Namespace], int], what: str
    ) -> argparse.ArgumentParser:
        found = commands.add_parser(name, help=what, description=what)
        found.set_defaults(run=run)
        found.add_argument("--json", action="store_true", help="print JSON instead of text")
        return found

    search = command("search", _search, "find the fastest layout, schedule and plan of a model")
    add = search.add_argument
    add(
        "model",
        help="a preset (see `overlapc models`), a HuggingFace config.json, or module:function that "
        "returns an overlapc.Repeats: a block of your own",
    )
    add("--gpus", type=_positive, required=True, help="how many there are")
    add("--hardware", default="a100-sxm-80", help="a profile (see `overlapc hardware`) or a .toml")
    add("--memory", help='of one GPU that may be used, as "72GB"; by default 92%% of what it has')
    add("--batch", type=_positive, help="sequences in a step on all GPUs; by default 8 a GPU")
    add("--seq", type=_positive, help="tokens in a sequence; by default the model's")
    for name, what in (("tp", "tensor"), ("pp", "pipeline"), ("dp", "data")):
        add(f"--{name}", type=_positive, default=0, help=f"{what}-parallel ranks; open by default")
    add(
        "--microbatch", type=_positive, default=0, help="sequences in a microbatch; open by default"
    )
    add(
        "--schedule",
        default="",
        choices=["", "1f1b", "zero-bubble", "interleaved", "zero-bubble-v"],
        help="open by default",
    )
    add(
        "--chunks",
        type=_positive,
        default=0,
        help="stages of a rank where they are interleaved; open by default: 2, and up to 8 where "
        "all are of as many layers",
    )
    add(
        "--no-sequence-parallel",
        action="store_true",
        help="tensor-parallel ranks have whole sequences between the matrices, not a part of each",
    )
    add("--solver", default="heu", help="that plans the stages (heu, overlap, opt or a baseline)")
    add(
        "--compare",
        default=COMPARED,
        help=f"solvers to compare on the winner ({COMPARED}); opt within seconds",
    )
    add("--top", type=_positive, default=5, help="layouts to list")
    add("--exhaustive", action="store_true", help="plan every layout, leave none out by its bound")
    add("--cache", type=Path, help="folder that keeps what was planned (~/.cache/overlapc)")
    add("--no-cache", action="store_true", help="plan everything anew and keep nothing")
    add("--out", type=Path, help="folder for the report, schedule, plan and Perfetto trace")

    command("models", _models, "list the model presets")
    command("hardware", _hardware, "list the hardware profiles")
    explain = command(
        "explain", _explain, "say what hides each collective of a plan, and why not more"
    )
    explain.add_argument("problem", help="a problem file")
    explain.add_argument("plan", help="a plan file for it")
    explain.add_argument(
        "--ops", action="store_true", help="say of each op, too, what is saved, or made again where"
    )
    plan = command("plan", _plan, "solve a problem file")
    plan.add_argument("problem", help="a problem file")
    plan.add_argument("--solver", default="overlap")
    plan.add_argument("--memory", help='the budget, as "8GB"; by default the problem\'s own')
    plan.add_argument("--seconds", type=_seconds, default=60.0, help="limit of solver opt")
    plan.add_argument("--out", type=Path, help="write the plan here instead of to stdout")
    diff = command("diff", _diff, "compare two plans of a problem")
    for name in ("problem", "first", "second"):
        diff.add_argument(name, help="a problem file" if name == "problem" else "a plan file")
    simulate = command("simulate", _simulate, "run a plan or a schedule in the simulator")
    simulate.add_argument("file", help="a problem file, or a schedule file")
    simulate.add_argument("plan", nargs="?", help="the plan, for a problem")
    simulate.add_argument(
        "--costs", type=Path, help="for a schedule: JSON, a list of stages' costs"
    )
    simulate.add_argument("--trace", type=Path, help="write a Perfetto trace here")
    report = command("report", _page, "make an HTML page, or pictures, of what a search found")
    report.add_argument("search", help="what `overlapc search --json` printed")
    report.add_argument("--out", type=Path, help="the page, a .html file")
    report.add_argument(
        "--pictures", type=Path, help="folder for PNGs and SVGs of it, drawn by matplotlib"
    )
    verify = command(
        "verify", _verify, "run a plan here against eager PyTorch: gradients, time, peak"
    )
    add = verify.add_argument
    add("model", help="module:function that returns a model and a tuple of inputs")
    add("--memory", help='budget of a step, as "8GB", or a fraction of eager\'s, as 0.5')
    add("--solver", default="overlap")
    add("--plan", help="a plan file to apply instead of solving")
    profile = command(
        "profile", _profile, "measure this machine, under torchrun its links too, into a file"
    )
    add = profile.add_argument
    add("--out", type=Path, required=True, help="the profile, a .toml for `search --hardware`")
    add("--base", help="a profile for what is not measured; by default one of the same kind")
    add("--seconds", type=_seconds, default=30.0, help="to measure for, about")
    show = command("show", _show, "draw a plan's or a schedule's timeline as text")
    show.add_argument("file", help="a problem file, or a schedule file")
    show.add_argument("plan", nargs="?", help="the plan, for a problem")
    show.add_argument("--columns", type=_positive, default=100)
    return parser


def _search(args: argparse.Namespace) -> int:
    from overlapc.search.command import run

    return GOOD if run(args, None if args.memory is None else _memory(args.memory)) else FAILED


# --- lists


def _models(args: argparse.Namespace) -> int:
    from overlapc.search.models import PRESETS

    if args.json:
        print(json.dumps({name: asdict(model) for name, model in PRESETS.items()}, indent=1))
        return GOOD
    rows: list[tuple[str, ...]] = []
    rows.append(("model", "parameters", "layers", "width", "heads", "seq", "experts", "source"))
    for model in PRESETS.values():
        experts = f"{model.experts}, top {model.top_k}" if model.experts else "-"
        rows.append(
            (
                model.name,
                f"{model.parameters() / 1e9:.1f}B",
                *map(str, (model.layers, model.width, model.heads, model.seq)),
                experts,
                model.source,
            )
        )
    print(_table(rows))
    return GOOD


def _hardware(args: argparse.Namespace) -> int:
    from overlapc.profiler.hardware import known_hardware, load_hardware

    machines = {name: load_hardware(name) for name in known_hardware()}
    if args.json:
        found = {
            name: {"status": m.status, "memory_bytes": m.memory_bytes, "sources": dict(m.sources)}
            for name, m in machines.items()
        }
        print(json.dumps(found, indent=1))
        return GOOD
    rows = [("hardware", "TFLOP/s", "memory", "a node", "between GPUs", "trust")]
    for name, m in machines.items():
        rows.append(
            (
                name,
                f"{max(m.peak_flops.values()) / 1e12:.0f}",
                f"{m.memory_bytes / 1e9:.0f} GB",
                str(m.gpus_per_node),
                f"{m.intra.bytes_per_s / 1e9:.0f} GB/s",
                m.status,
            )
        )
    print(_table(rows))
    return GOOD


# --- files


def _explain(args: argparse.Namespace) -> int:
    from overlapc.files import load_plan, load_problem
    from overlapc.report.explain import explain_ops, op_fates, report_on

    report = report_on(load_problem(args.problem), load_plan(args.plan), args.plan)
    if args.json:
        ops = {"ops": [asdict(fate) for fate in op_fates(report)]} if args.ops else {}
        print(json.dumps(_figures(report) | ops, indent=1))
    else:
        _print("\n".join([report.explain(), *([explain_ops(report)] if args.ops else [])]))
    return GOOD


def _figures(report: Any) -> dict[str, Any]:
    timeline = report.timeline
    return {
        "solver": report.plan.solver,
        "step_ns": timeline.step_ns,
        "bound_ns": report.bound_ns,
        "exposed_ns": timeline.exposed_ns,
        "comm_ns": timeline.comm_ns,
        "recompute_ns": timeline.recompute_ns,
        "peak_bytes": timeline.peak_bytes,
        "collectives": [asdict(exposure) for exposure in timeline.exposures],
    }


def _plan(args: argparse.Namespace) -> int:
    from overlapc.files import load_problem, write_file
    from overlapc.planning import check_solver, parse_budget
    from overlapc.progress import doing
    from overlapc.report.explain import report_on
    from overlapc.solvers import solve
    from overlapc.text import format_plan

    check_solver(args.solver)
    problem = load_problem(args.problem)
    if args.memory:
        problem = replace(problem, budget_bytes=parse_budget(_memory(args.memory), 0, 0))
    _can_write(args.out)
    with doing(f"solving ({args.solver}, {len(problem.trace.ops)} ops)"):
        plan = solve(problem, args.solver, time_limit_s=args.seconds)
    if args.out is not None:
        write_file(args.out, format_plan(plan))
    if args.json:
        print(json.dumps(_figures(report_on(problem, plan, args.problem)), indent=1))
    elif args.out is None:
        print(format_plan(plan), end="")
    return GOOD


def _diff(args: argparse.Namespace) -> int:
    from overlapc.files import load_plan, load_problem
    from overlapc.ir import issue
    from overlapc.report.explain import report_on

    problem = load_problem(args.problem)
    plans = [load_plan(path) for path in (args.first, args.second)]
    reports = [report_on(problem, plan, plan.solver) for plan in plans]
    first, second = (set(plan.recomputed) for plan in plans)
    figures = {
        key: [getattr(report.timeline, key) for report in reports]
        for key in ("step_ns", "exposed_ns", "recompute_ns", "peak_bytes")
    }
    moved = _moved(plans[0].order, plans[1].order)
    if args.json:
        found = {
            **figures,
            "recomputed_only_in_first": sorted(first - second),
            "recomputed_only_in_second": sorted(second - first),
            "moved": moved,
        }
        print(json.dumps(found, indent=1))
        return GOOD
    rows = [("", args.first, args.second, "ratio")]
    for key, (a, b) in figures.items():
        unit = "ms" if key.endswith("ns") else "MB"
        name = key.removesuffix("_ns").removesuffix("_bytes")
        ratio = f"{b / a:.3f}" if a else "-"
        rows.append((name, f"{a / 1e6:.3f} {unit}", f"{b / 1e6:.3f} {unit}", ratio))
    print(_table(rows))
    for name, only in ((args.first, first - second), (args.second, second - first)):
        issued = ", ".join(issue(op, True) for op in sorted(only)) or "nothing"
        _print(f"recomputed only in {name}: {issued}")
    _print(f"issued in another place: {', '.join(moved) or 'nothing'}")
    return GOOD


def _moved(first: Sequence[str], second: Sequence[str]) -> list[str]:
    """What is in both orders but not in what they have in common."""
    from difflib import SequenceMatcher

    both = set(first) & set(second)
    a, b = ([text for text in order if text in both] for order in (first, second))
    blocks = SequenceMatcher(None, a, b, autojunk=False).get_matching_blocks()
    still = {text for block in blocks for text in a[block.a : block.a + block.size]}
    return [text for text in a if text not in still]


def _timeline(args: argparse.Namespace) -> Any:
    """Of the plan of a problem, or of a schedule with its stages' costs."""
    from overlapc.files import load_plan, load_problem, read_json, read_text
    from overlapc.pipeline import StageCost, simulate_pipeline
    from overlapc.report.explain import report_on
    from overlapc.schedule import parse_schedule

    if args.plan is not None:
        return report_on(load_problem(args.file), load_plan(args.plan), args.plan).timeline
    schedule = parse_schedule(read_text(args.file, "schedule"))
    costs = [StageCost(1, 1, 1)] * schedule.stages
    if getattr(args, "costs", None) is not None:
        try:
            costs = [_stage_cost(stage) for stage in read_json(args.costs, "costs")]
        except (FileError, ValueError, TypeError, AttributeError) as error:
            raise _usage(
                f"--costs {args.costs}: {error}; expected a JSON list with an object for each "
                'stage: {"forward_ns": 1, "input_ns": 1, "weight_ns": 1}'
            ) from None
    return simulate_pipeline(schedule, costs)


def _stage_cost(given: dict[str, Any]) -> Any:
    from overlapc.pipeline import StageCost

    working = tuple((str(kind), int(size)) for kind, size in given.get("working", ()))
    return StageCost(**{**given, "working": working})


def _simulate(args: argparse.Namespace) -> int:
    from overlapc.files import write_file
    from overlapc.pipeline import PipelineTimeline, describe
    from overlapc.report.trace import chrome_trace, pipeline_json

    timeline = _timeline(args)
    if args.trace is not None:
        write_file(args.trace, json.dumps(chrome_trace(timeline)))
    if isinstance(timeline, PipelineTimeline):
        print(json.dumps(pipeline_json(timeline), indent=1) if args.json else describe(timeline))
        return GOOD
    keys = ("step_ns", "phase_ns", "exposed_ns", "comm_ns", "recompute_ns", "peak_bytes")
    found = {key: getattr(timeline, key) for key in keys}
    if args.json:
        print(json.dumps(found, indent=1))
    else:
        print("\n".join(f"{key:13} {value}" for key, value in found.items()))
    return GOOD


def _show(args: argparse.Namespace) -> int:
    from overlapc.pipeline import PipelineTimeline
    from overlapc.report.picture import picture
    from overlapc.report.trace import chrome_trace

    timeline = _timeline(args)
    if args.json:
        print(json.dumps(chrome_trace(timeline)))
    elif isinstance(timeline, PipelineTimeline):
        print(timeline.picture(args.columns))
    else:
        _print(picture(timeline, args.columns))
    return GOOD


def _verify(args: argparse.Namespace) -> int:
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler reports each start
    from overlapc.runtime.verify import verify

    memory: Any = None if args.memory is None else _memory(args.memory)
    if isinstance(memory, str):
        with contextlib.suppress(ValueError):  # text with a unit
            memory = float(memory)
    found = verify(args.model, memory_budget=memory, solver=args.solver, plan=args.plan)
    if os.environ.get("RANK", "0") != "0":
        pass  # the first rank tells
    elif args.json:
        print(json.dumps(asdict(found), indent=1))
    else:
        verdict = "equal, bit by bit"
        if not found.equal:
            verdict = f"DIFFER: {', '.join(found.different)} ({found.blame})"
        rows = [("", "step ms", "peak MB", "gradients")]
        for name, ns, size, said in (
            ("eager, measured", found.eager_ns, found.eager_peak_bytes, "reference"),
            ("planned, measured", found.planned_ns, found.planned_peak_bytes, verdict),
            ("planned, predicted", found.predicted_ns, found.predicted_peak_bytes, ""),
        ):
            rows.append((name, f"{ns / 1e6:.3f}", f"{size / 1e6:.2f}", said))
        print(_table(rows))
        for reason in found.unchanged:
            print(f"runs as plain PyTorch: {reason}")
    return GOOD if found.equal else FAILED


def _profile(args: argparse.Namespace) -> int:
    import torch
    import torch.distributed as dist

    from overlapc.files import write_file
    from overlapc.profiler.hardware import format_hardware, load_hardware
    from overlapc.profiler.machine import measure_machine
    from overlapc.runtime.exchange import Exchange

    if args.out.suffix != ".toml":
        raise _usage(f"--out {args.out}: expected a name that ends in .toml")
    cuda = torch.cuda.is_available()
    base = load_hardware(args.base or ("a100-sxm-80" if cuda else "cpu-gloo"))
    _can_write(args.out)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        if cuda:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group("nccl" if cuda else "gloo")
    try:
        with Exchange(range(ranks)) as exchange:  # a rank that is lost is an error on all
            found = exchange.during(
                "measuring", lambda: measure_machine(args.out.stem, base, args.seconds)
            )
    finally:
        if ranks > 1:
            dist.destroy_process_group()
    if os.environ.get("RANK", "0") != "0":
        return GOOD  # the first rank tells
    write_file(args.out, format_hardware(found))
    guessed = [key for key, source in found.sources.items() if source.startswith("not measured")]
    figures = {
        "written": str(args.out),
        "peak_flops": dict(found.peak_flops),
        "memory_bytes_per_s": found.memory_bytes_per_s,
        "launch_ns": found.launch_ns,
        "ranks": ranks,
        "not_measured": guessed,
    }
    if args.json:
        print(json.dumps(figures, indent=1))
        return GOOD
    for dtype, rate in found.peak_flops.items():
        print(f"{dtype:10} {rate / 1e12:10.3f} TFLOP/s")
    print(f"memory     {found.memory_bytes_per_s / 1e9:10.1f} GB/s")
    print(f"launch     {found.launch_ns / 1e3:10.1f} us")
    link = found.intra if "intra.alpha_ns" not in guessed else found.inter
    for kind, table in link.busbw.items() if ranks > 1 else ():
        size, rate = table[-1]
        print(f"{kind:16} {rate / 1e9:6.2f} GB/s of {ranks} ranks at {size / 1e6:.0f} MB")
    print(f"written: {args.out}; as {base.name}, not measured: {len(guessed)} figures")
    return GOOD


def _page(args: argparse.Namespace) -> int:
    from overlapc.files import make_folder, read_json, write_file
    from overlapc.report.page import page

    document = read_json(args.search, "search")
    if not isinstance(document, dict):
        raise _usage(f"{args.search}: found {type(document).__name__}, expected a JSON object")
    if args.out is None and args.pictures is None:
        raise _usage("nothing to write: expected --out PAGE.html, --pictures FOLDER, or both")
    written = []
    if args.out is not None:
        write_file(args.out, page(document))
        written.append(str(args.out))
    if args.pictures is not None:
        from overlapc.report.pictures import draw

        make_folder(args.pictures, "--pictures")
        written += map(str, draw(document, args.pictures))
    print(json.dumps({"written": written}) if args.json else f"written: {', '.join(written)}")
    return GOOD


# --- small things


def _table(rows: Sequence[Sequence[str]]) -> str:
    from overlapc.report.table import table

    return "\n".join(table(rows))


def _positive(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if not 0 < number <= _MOST:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number from 1 to {_MOST}")
    return number


def _seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number <= _MOST:  # NaN neither
        raise argparse.ArgumentTypeError(f"{text!r}: expected more than 0 and at most {_MOST}")
    return number


def _memory(text: str) -> int | str:
    """Bytes, where it is a whole number."""
    return int(text) if text.strip().isdigit() and len(text) < 20 else text


def _can_write(path: Path | None) -> None:
    """Better to know before the work than after it."""
    if path is not None and not path.absolute().parent.is_dir():
        raise _usage(f"--out {path}: there is no folder {path.absolute().parent}; make it first")


def _usage(message: str) -> OverlapcError:
    from overlapc.errors import OptionError

    return OptionError(message)


def _print(text: str) -> None:
    """With the names that files give, whatever these hold."""
    from overlapc.files import printable

    print("\n".join(map(printable, text.split("\n"))))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
