"""The arguments of `overlapc search`; `search_run.py` runs the command."""

from __future__ import annotations

import argparse
from pathlib import Path

from overlapc.cli.shared import FAILED, GOOD, Declare, bytes_or_text, positive

COMPARED = "none,full,selective,megatron,checkmate,heu,opt"


def declare_search(command: Declare) -> None:
    search = command("search", _search, "find the fastest layout, schedule and plan of a model")
    add = search.add_argument
    add(
        "model",
        help="a preset (see `overlapc models`), a HuggingFace config.json, or module:function that "
        "returns an overlapc.Repeats: a block of your own",
    )
    add("--gpus", type=positive, required=True, help="how many there are")
    add("--hardware", default="a100-sxm-80", help="a profile (see `overlapc hardware`) or a .toml")
    add(
        "--costs",
        type=Path,
        help="file of op times measured on this hardware, as training keeps them with cache=FILE: "
        "they take the place of estimates",
    )
    add(
        "--framework",
        default="overlapc",
        help="that runs the model: overlapc, megatron, megatron-2021 ... (docs/validation.md)",
    )
    add("--memory", help='of one GPU that may be used, as "72GB"; by default 92%% of what it has')
    add("--batch", type=positive, help="sequences in a step on all GPUs; by default 8 a GPU")
    add("--seq", type=positive, help="tokens in a sequence; by default the model's")
    for name, what in (("tp", "tensor"), ("pp", "pipeline"), ("dp", "data")):
        add(f"--{name}", type=positive, default=0, help=f"{what}-parallel ranks; open by default")
    add("--microbatch", type=positive, default=0, help="sequences in a microbatch; open by default")
    add(
        "--schedule",
        default="",
        choices=["", "1f1b", "zero-bubble", "interleaved", "zero-bubble-v"],
        help="open by default",
    )
    add(
        "--chunks",
        type=positive,
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
    add("--top", type=positive, default=5, help="layouts to list")
    add("--exhaustive", action="store_true", help="plan every layout, leave none out by its bound")
    add("--cache", type=Path, help="folder that keeps what was planned (~/.cache/overlapc)")
    add("--no-cache", action="store_true", help="plan everything anew and keep nothing")
    add("--out", type=Path, help="folder for the report, schedule, plan and Perfetto trace")


def _search(args: argparse.Namespace) -> int:
    from overlapc.cli.search_run import run

    return (
        GOOD if run(args, None if args.memory is None else bytes_or_text(args.memory)) else FAILED
    )
