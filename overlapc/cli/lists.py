"""`overlapc presets` lists models and hardware."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from overlapc.cli.shared import GOOD, Declare, print_table


def declare_presets(command: Declare) -> None:
    presets = command("presets", _presets, "list the presets of models, or of hardware")
    presets.add_argument("kind", choices=("models", "hardware"))


def _presets(args: argparse.Namespace) -> int:
    return _models(args) if args.kind == "models" else _hardware(args)


def _models(args: argparse.Namespace) -> int:
    from overlapc.search.presets import PRESETS

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
    print_table(rows)
    return GOOD


def _hardware(args: argparse.Namespace) -> int:
    from overlapc.profiler.hardware import known_hardware, load_hardware

    machines = {name: load_hardware(name) for name in known_hardware()}
    if args.json:
        described = {
            name: {"status": m.status, "memory_bytes": m.memory_bytes, "sources": dict(m.sources)}
            for name, m in machines.items()
        }
        print(json.dumps(described, indent=1))
        return GOOD
    rows = [("hardware", "TFLOP/s", "memory", "a node", "between GPUs", "trust")]
    for name, m in machines.items():
        rows.append(
            (
                name,
                f"{m.half_flops / 1e12:.0f}",
                f"{m.memory_bytes / 1e9:.0f} GB",
                str(m.gpus_per_node),
                f"{m.intra.bytes_per_s / 1e9:.0f} GB/s",
                m.status,
            )
        )
    print_table(rows)
    return GOOD
