"""Lynx's claims (arXiv 2406.08756, v1 and v4) beside what the benchmark set predicts.

    python benchmarks/papers/lynx.py [--set benchmarks/results/solvers.json]

Reads what `benchmarks/solvers.py --json` and `benchmarks/partition.py` kept: GPT 1.3B to 23B on
cards with NVLink and on PCIe, at budgets from the smallest to all saved. Ratios are of predicted
steps, search times are measured. The paper's exact configurations are not public, so its bands
can be met or missed, not reproduced.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lab import RESULTS, write_results

MEGATRON = ("full", "uniform", "block", "selective", "megatron")
LINKS = {"NVLink": ("a100-sxm-80", "h100-sxm"), "PCIe": ("a100-pcie-80", "l20")}


def step(row: dict[str, Any], name: str) -> float | None:
    found = row["solvers"].get(name)
    return None if found is None else float(found["step_ms"])


def ratios(rows: Sequence[dict[str, Any]], rivals: Sequence[str], ours: str) -> list[float]:
    """Of the fastest of these that fits, where one does."""
    found = []
    for row in rows:
        theirs = [ms for ms in (step(row, rival) for rival in rivals) if ms is not None]
        mine = step(row, ours)
        if theirs and mine is not None:
            found.append(min(theirs) / mine)
    return found


def spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f}..{max(values):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--set", type=Path, default=RESULTS / "solvers.json")
    parser.add_argument("--partition", type=Path, default=RESULTS / "partition.json")
    args = parser.parse_args()
    rows = [row for row in json.loads(args.set.read_text()) if row["case"][0].isdigit()]
    table = []
    print(f"{len(rows)} GPT stages; median (least..most)")
    for link, cards in LINKS.items():
        here = [row for row in rows if row["hardware"] in cards]
        for claim, rivals, ours in (
            ("HEU over Megatron's full recompute (1.02..1.53)", ("full",), "heu"),
            ("HEU over the best of Megatron's (1.02..1.53)", MEGATRON, "heu"),
            ("HEU over Checkmate (1.02..1.53)", ("checkmate",), "heu"),
            ("OPT over HEU (close to 1)", ("heu",), "opt"),
        ):
            found = ratios(here, rivals, ours)
            if found:
                print(f"  {link:7} {claim:50} {spread(found)} in {len(found)} of {len(here)}")
                median = statistics.median(found)
                table.append([link, claim, median, min(found), max(found), len(found), len(here)])
    seconds = [row["solvers"]["heu"]["search_s"] for row in rows if step(row, "heu")]
    both = [row["solvers"] for row in rows if step(row, "heu") and step(row, "opt")]
    shares = [solvers["heu"]["search_s"] / solvers["opt"]["search_s"] for solvers in both]
    print(f"  HEU's whole search (0.16 s on average): {spread(seconds)} s")
    print(f"  less than OPT's search (99%): {1 - statistics.mean(shares):.1%}")
    for row in json.loads(args.partition.read_text())["rows"]:
        even, best = row["even_ns"], row["best_ns"]
        gain = f"{even / best:.3f}x" if even and best else "the even split does not fit"
        where = f"{row['model']} on {row['stages']} stages, {row['memory_bytes'] / 1e9:.1f} GB"
        print(f"  partition, {where}: {gain if best else 'nothing fits'}")
    note = {"what": "predicted ratios, measured seconds", "search_s": statistics.mean(seconds)}
    write_results("papers_lynx", {**note, "rows": table})


if __name__ == "__main__":
    main()
