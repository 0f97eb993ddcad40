"""Layers of GPTs to pipeline stages: the even split and the proven best.

    python benchmarks/partition.py --models 7B,13B,23B --stages 4,8 --hardware a100-sxm-80,l20

What a stage takes is what HEU's plan for it takes, in the memory that weights, gradients and
optimizer leave, and with as many microbatches in flight as 1F1B holds there (`overlapc.search`).
Memory is so tight that early stages must recompute. Everything is *predicted*, but the search's
time is measured.
"""

from __future__ import annotations

import argparse
import sys
import time
from concurrent.futures import Executor
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.lab import write_results
from overlapc.profiler.hardware import load_hardware
from overlapc.search.captures import UnitKey
from overlapc.search.layouts import Cluster, Layout
from overlapc.search.partition import partitioned
from overlapc.search.pool import planners
from overlapc.search.presets import PRESETS
from overlapc.search.units import make_unit
from overlapc.search.weights import static_bytes
from overlapc.solvers.pipeline.partition import Partition

TP, MICROBATCH, SEQUENCES = 8, 4, 64


def row(name: str, found: Partition) -> str:
    slowest = "does not fit" if found.slowest_ns is None else f"{found.slowest_ns / 1e6:9.2f} ms"
    return f"  {name:5} {slowest}  {found.layout()}{'  (proven)' if found.optimal else ''}"


def measure(
    hardware: str, name: str, stages: int, rooms: list[float], pool: Executor
) -> list[dict[str, Any]]:
    model, layout = PRESETS[f"gpt-{name.lower()}"], Layout(TP, stages, 1, MICROBATCH)
    begin = time.perf_counter()
    unit = make_unit(UnitKey(model, hardware, TP * stages, TP, 1, MICROBATCH))
    captured = time.perf_counter() - begin
    rows = []
    for room in rooms:
        memory = max(static_bytes(model, layout)) + int(room * 1e9)
        per_node = load_hardware(hardware).gpus_per_node
        cluster = Cluster(hardware, TP * stages, per_node, memory, SEQUENCES)
        begin = time.perf_counter()
        split, best = partitioned(model, cluster, layout, unit, pool)
        took = time.perf_counter() - begin
        print(
            f"{name} on {stages} stages of {TP} {hardware}, {memory / 1e9:.1f} GB: "
            f"{took:.1f} s, and {captured:.1f} s to capture"
        )
        print(f"{row('even', split)}\n{row('best', best)}", flush=True)
        rows.append(
            {
                "model": name,
                "stages": stages,
                "hardware": hardware,
                "memory_bytes": memory,
                "capture_seconds": captured,
                "seconds": took,
                "even_ns": split.slowest_ns,
                "best_ns": best.slowest_ns,
                "best_layout": best.layout(),
                "proven": best.optimal,
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--models", default="7B,13B,23B")
    add("--stages", default="4,8")
    add("--hardware", default="a100-sxm-80")
    add(
        "--room-gb",
        default="1.5,4",
        help="memory for activations beside what the largest stage holds",
    )
    args = parser.parse_args()
    rooms = [float(word) for word in args.room_gb.split(",")]
    cases = product(args.hardware.split(","), args.models.split(","), args.stages.split(","))
    rows = []
    with planners() as pool:
        for hardware, name, stages in cases:
            rows += measure(hardware, name, int(stages), rooms, pool)
    write_results("partition", {"what": "predicted; seconds are measured", "rows": rows})


if __name__ == "__main__":
    main()
