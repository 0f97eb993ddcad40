"""`overlapc verify` and `overlapc profile` measure on this machine."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict
from pathlib import Path

from overlapc.cli.shared import (
    FAILED,
    GOOD,
    Declare,
    can_write,
    print_table,
    seconds,
)
from overlapc.core.errors import OptionError


def declare_verify(command: Declare) -> None:
    verify = command(
        "verify",
        _verify,
        "compare a plan with eager PyTorch on this machine: gradients, time, peak",
    )
    add = verify.add_argument
    add("model", help="module:function that returns a model and a tuple of inputs")
    add("--memory", help='budget of a step, "8GB", or a fraction of eager\'s activations, 0.5')
    add("--solver", default="overlap")
    add("--plan", help="a plan file to apply instead of solving")


def declare_profile(command: Declare) -> None:
    profile = command(
        "profile", _profile, "measure this machine into a file; under torchrun also its links"
    )
    add = profile.add_argument
    add("--out", type=Path, required=True, help="the profile, a .toml for `search --hardware`")
    add(
        "--base",
        help="a profile for figures that are not measured; by default one of the same kind",
    )
    add("--seconds", type=seconds, default=30.0, help="about how long to measure")


def _verify(args: argparse.Namespace) -> int:
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or the profiler logs each start
    from overlapc.planning.options import value_of
    from overlapc.runtime.verify import verify

    memory = None if args.memory is None else value_of(args.memory)
    verified = verify(args.model, memory_budget=memory, solver=args.solver, plan=args.plan)
    if os.environ.get("RANK", "0") != "0":
        pass  # only the first rank prints
    elif args.json:
        print(json.dumps(asdict(verified), indent=1))
    else:
        verdict = "equal, bit by bit"
        if not verified.equal:
            verdict = f"DIFFER: {', '.join(verified.different)} ({verified.blame})"
        rows = [("", "step ms", "peak MB", "gradients")]
        for name, ns, size, said in (
            ("eager, measured", verified.eager_ns, verified.eager_peak_bytes, "reference"),
            ("planned, measured", verified.planned_ns, verified.planned_peak_bytes, verdict),
            ("planned, predicted", verified.predicted_ns, verified.predicted_peak_bytes, ""),
        ):
            rows.append((name, f"{ns / 1e6:.3f}", f"{size / 1e6:.2f}", said))
        print_table(rows)
        for reason in verified.fallbacks:
            print(f"runs as plain PyTorch: {reason}")
    return GOOD if verified.equal else FAILED


def _profile(args: argparse.Namespace) -> int:
    import torch
    import torch.distributed as dist

    from overlapc.core.files import write_file
    from overlapc.profiler.hardware import format_hardware, load_hardware
    from overlapc.profiler.machine import measure_machine
    from overlapc.ranks.exchange import Exchange

    if args.out.suffix != ".toml":
        raise OptionError(f"--out {args.out}: expected a name that ends in .toml")
    cuda = torch.cuda.is_available()
    base = load_hardware(args.base or ("a100-sxm-80" if cuda else "cpu-gloo"))
    can_write(args.out)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        if cuda:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group("nccl" if cuda else "gloo")
    try:
        with Exchange(range(ranks)) as exchange:  # a lost rank is an error on all ranks
            machine = exchange.during(
                "measuring", lambda: measure_machine(args.out.stem, base, args.seconds)
            )
    finally:
        if ranks > 1:
            dist.destroy_process_group()
    if os.environ.get("RANK", "0") != "0":
        return GOOD  # only the first rank prints
    write_file(args.out, format_hardware(machine))
    guessed = [key for key, source in machine.sources.items() if source.startswith("not measured")]
    figures = {
        "written": str(args.out),
        "peak_flops": dict(machine.peak_flops),
        "memory_bytes_per_s": machine.memory_bytes_per_s,
        "launch_ns": machine.launch_ns,
        "ranks": ranks,
        "not_measured": guessed,
    }
    if args.json:
        print(json.dumps(figures, indent=1))
        return GOOD
    for dtype, rate in machine.peak_flops.items():
        print(f"{dtype:10} {rate / 1e12:10.3f} TFLOP/s")
    print(f"memory     {machine.memory_bytes_per_s / 1e9:10.1f} GB/s")
    print(f"launch     {machine.launch_ns / 1e3:10.1f} us")
    link = machine.intra if "intra.alpha_ns" not in guessed else machine.inter
    for kind, table in link.busbw.items() if ranks > 1 else ():
        size, rate = table[-1]
        print(f"{kind:16} {rate / 1e9:6.2f} GB/s of {ranks} ranks at {size / 1e6:.0f} MB")
    print(f"written: {args.out}; as {base.name}, not measured: {len(guessed)} figures")
    return GOOD
