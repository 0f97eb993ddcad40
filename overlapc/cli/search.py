"""The arguments of `overlapc search`; `search_run.py` runs the command."""

from __future__ import annotations

import argparse
from pathlib import Path

from overlapc.cli.shared import COMPARED, FAILED, GOOD, Declare, bytes_or_text, positive
from overlapc.search.layouts import CP_COMM_TYPES


def declare_search(command: Declare) -> None:
    search = command("search", _search, "find the fastest layout, schedule and plan of a model")
    add = search.add_argument
    add(
        "model",
        help="a preset (see `overlapc presets`), a HuggingFace config.json, or module:function, "
        "which returns your own block as a Repeats (overlapc.search.models.own)",
    )
    add("--gpus", type=positive, required=True, help="number of GPUs")
    add(
        "--hardware",
        default="a100-sxm-80",
        help="a preset (see `overlapc presets`) or a .toml; by default a100-sxm-80",
    )
    add(
        "--costs",
        type=Path,
        help="file of op times measured on this hardware, used instead of estimates; training "
        "writes it with cache=FILE",
    )
    add(
        "--framework",
        default="overlapc",
        help="framework that runs the model: overlapc, megatron ... (see docs/validation.md)",
    )
    add(
        "--fp8",
        action="store_true",
        help="the layers' products of matrices in FP8, cast and scaled",
    )
    add(
        "--memory",
        help='what a run may take of one GPU, such as "72GB", with what is beside its tensors; by '
        "default 93%% of what CUDA reports",
    )
    add("--batch", type=positive, help="sequences in a step on all GPUs; by default 8 for each GPU")
    add("--seq", type=positive, help="tokens in a sequence; by default the model's")
    _declare_layout(search)
    add(
        "--solver",
        help="solver of overlapc's plans: heu (the default), overlap, opt or a baseline; or the "
        "baseline that the framework is to run by itself, such as "
        "megatron-selective:layernorm+moe_act, which recomputes these of Megatron's modules",
    )
    add(
        "--compare",
        help=f"solvers to compare with the winner ({COMPARED}; with another framework what it runs "
        "by itself, and ours); opt gets seconds",
    )
    add("--top", type=positive, default=5, help="number of layouts to list")
    add(
        "--exhaustive",
        action="store_true",
        help="plan every layout, also those whose bound rules them out",
    )
    add("--cache", type=Path, help="folder that keeps planned layouts (~/.cache/overlapc)")
    add("--no-cache", action="store_true", help="plan everything again and keep nothing")
    add("--out", type=Path, help="folder for the report, schedule, plan and Perfetto trace")


def _declare_layout(search: argparse.ArgumentParser) -> None:
    """What the user may decide of the layout."""
    add = search.add_argument
    for name, what in (("tp", "tensor"), ("pp", "pipeline"), ("dp", "data")):
        add(f"--{name}", type=positive, default=0, help=f"{what}-parallel ranks; open by default")
    add(
        "--cp",
        type=positive,
        default=1,
        help="context-parallel ranks: each has a part of every sequence; 1 by default",
    )
    add(
        "--cp-comm-type",
        default="",
        choices=["", *CP_COMM_TYPES],
        help="how they exchange keys and values, by Megatron's names: in a ring of sends under "
        "attention (p2p), by all-to-alls of heads (a2a), or by gathering all; open by default",
    )
    add(
        "--ep",
        type=positive,
        default=0,
        help="ranks that divide the experts; open by default: as many as can, or as a node has",
    )
    add(
        "--expert-tensor-parallel",
        action="store_true",
        help="tensor-parallel ranks share each expert's matrices; else each has whole experts",
    )
    add("--microbatch", type=positive, default=0, help="sequences in a microbatch; open by default")
    add(
        "--schedule",
        default="",
        choices=["", "1f1b", "zero-bubble", "interleaved", "zero-bubble-v"],
        help="schedule of the pipeline; open by default",
    )
    add(
        "--chunks",
        type=positive,
        default=0,
        help="interleaved stages of a rank: layouts without are left out; open by default: 2, and "
        "up to 8 if all stages have equally many layers",
    )
    add(
        "--slices",
        type=positive,
        action="append",
        default=[],
        metavar="K",
        help="plan layouts of a model of your own in K slices of each microbatch, too, the listed "
        "ones and all that may then be the fastest, and take what is faster; may be given again",
    )
    for name in ("first", "last"):
        what = f"layers of the {name} stage of a pipeline; open by default"
        add(f"--{name}-layers", type=positive, default=0, help=what)
    add(
        "--no-sequence-parallel",
        action="store_true",
        help="between the matrices each tensor-parallel rank has whole sequences, not parts",
    )


def _search(args: argparse.Namespace) -> int:
    from overlapc.cli.search_run import run

    return (
        GOOD if run(args, None if args.memory is None else bytes_or_text(args.memory)) else FAILED
    )
