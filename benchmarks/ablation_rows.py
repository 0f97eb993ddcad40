"""What each part of the search for a pipeline's rows is worth, on drawn pipelines.

    python benchmarks/ablation_rows.py --pipelines 60 --json benchmarks/results/ablation_rows.json

All stages of a pipeline take about the same times, and recompute none, a third or nine tenths
of their forward. Transfers take nothing, 2% or 20% of a forward. A rank's memory is 0.7, 1 or
1.3 times what the named schedule holds. Each part of the search is left out in turn. It *wins*
a pipeline if the rows found without it are slower by more than 0.2%; how much slower is its
*gain*. The first half of the pipelines may decide what to delete; the other half is held out.
All figures are *predicted*.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.ablation import WINS, write
from overlapc.pipeline import StageCost, simulate_pipeline
from overlapc.schedule import Schedule
from overlapc.solvers import rows
from overlapc.solvers.schedules import make_schedule

NAMES = ("gpipe", "1f1b", "interleaved", "zero-bubble", "zero-bubble-v")


def drawn(seed: int) -> tuple[Schedule, list[StageCost], list[int]]:
    """A schedule, what its stages take, and how much memory each rank may hold."""
    random = Random(seed)
    name, ranks = random.choice(NAMES), random.choice((2, 3, 4))
    schedule = make_schedule(name, ranks, ranks * random.choice((1, 2)))
    forward_ns = random.randint(5_000_000, 40_000_000)
    remade, sent = random.choice((0.0, 0.3, 0.9)), random.choice((0.0, 0.02, 0.2))

    def about(share: float) -> int:
        return int(forward_ns * share * random.uniform(0.95, 1.1))

    costs = [
        StageCost(
            about(1.0), about(1.05), about(0.9), about(remade),
            saved=random.randint(1, 10) * 10**8, remade=random.randint(0, 5) * 10**8,
            for_weights=10**8, sent_ns=int(forward_ns * sent), coming=10**7, returning=10**7,
            working=(("F", 10**7), ("I", 2 * 10**7)),
        )
        for _ in range(schedule.stages)
    ]  # fmt: skip
    most = max(simulate_pipeline(schedule, costs).peak_bytes)
    return schedule, costs, [int(most * random.choice((0.7, 1.0, 1.3)))] * ranks


@contextmanager
def without(part: str) -> Iterator[None]:
    """The search without a part of it."""
    kind, _, which = part.partition(" ")
    refill = rows._RowSearch.refill
    change: Any = {
        "share": lambda: mock.patch.object(
            rows, "_SHARES", tuple(s for s in rows._SHARES if str(s) != which)
        ),
        "patience": lambda: mock.patch.object(
            rows, "PATIENCE", tuple(p for p in rows.PATIENCE if str(p) != which)
        ),
        "fill": lambda: mock.patch.object(
            rows._RowSearch,
            "refill",
            lambda self, start, timeline, split, early: (
                [] if which == words(split, early) else refill(self, start, timeline, split, early)
            ),
        ),
        "polish": lambda: mock.patch.object(rows._RowSearch, "polish", return_value=None),
        "scratch": lambda: mock.patch.object(rows, "_through_time", return_value=()),
        "again": lambda: mock.patch.object(rows, "_ROUNDS", 1),
        "second": lambda: mock.patch.object(rows, "_POLISHED", 1),
        "nothing": lambda: mock.patch.object(rows, "_LARGE", rows._LARGE),
    }[kind]
    with change():
        yield


def words(split: bool, early: bool) -> str:
    return f"{'late W' if split else 'W in place'}, {'early R' if early else 'R in place'}"


def parts() -> list[str]:
    fills = [f"fill {words(split, early)}" for split in (True, False) for early in (True, False)]
    shares = [f"share {s}" for s in rows._SHARES]
    patience = [f"patience {p}" for p in rows.PATIENCE]
    return [*shares, *patience, *fills, "scratch", "again", "second", "polish"]


def measure(seed: int) -> dict[str, Any]:
    schedule, costs, limits = drawn(seed)
    found: dict[str, int | None] = {}
    for part in ("nothing", *parts()):
        with without(part):
            timeline = simulate_pipeline(rows.placed(schedule, costs, limits), costs)
        fits = all(peak <= limit for peak, limit in zip(timeline.peak_bytes, limits, strict=True))
        found[part] = timeline.step_ns if fits else None
    return {"seed": seed, "schedule": schedule.name, "ranks": len(schedule.rows), "step_ns": found}


def summarise(measured: list[dict[str, Any]]) -> None:
    """A row for each part, columns for both halves: wins, their mean gain and the most."""
    fit = [row["step_ns"] for row in measured if row["step_ns"]["nothing"]]
    halves = fit[: len(fit) // 2], fit[len(fit) // 2 :]
    print(f"| without | calibration ({len(halves[0])}) | held out ({len(halves[1])}) |")
    for part in parts():
        cells = []
        for half in halves:
            losses = [row[part] / row["nothing"] if row[part] else 2.0 for row in half]
            won = [loss for loss in losses if loss > WINS]
            mean = f", {statistics.mean(won) - 1:.2%}, most {max(won) - 1:.2%}" if won else ""
            cells.append(f"{len(won)}{mean}")
        print(f"| {part} | {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pipelines", type=int, default=60)
    parser.add_argument("--json", type=Path, help="file that keeps results and is continued")
    args = parser.parse_args()
    measured = json.loads(args.json.read_text()) if args.json and args.json.exists() else []
    for seed in range(len(measured), args.pipelines):
        measured.append(measure(seed))
        if args.json:
            write(args.json, measured)
        print(f"{seed + 1} of {args.pipelines}", file=sys.stderr, flush=True)
    summarise(measured)


if __name__ == "__main__":
    main()
