"""How wide do intervals have to be? From the tables that calibrate alone.

    python benchmarks/intervals.py

Every row of every table of `benchmarks/public` that calibrates is predicted. Rows of the same
blocks, framework and recompute are one kind: they share most of what may be wrong. Each kind is
left out in turn: what all other kinds of its table are off by on average is taken from it, as
calibrating on them would. What is then left of its error is divided by the width of its interval,
and the width that holds four of five kinds is printed, of those whose host takes half of their time
or more to launch them, and of all others. Of few kinds more must be held: of `n` that are at hand,
four fifths of `n + 1` (a conformal bound). 1.0 says that `overlapc/validation/interval.py` is right
as it is.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from overlapc.search.captures import UnitKey
from overlapc.validation.public import Predicted, Table, load_table, predict_alike

ROOT = Path(__file__).resolve().parents[1]
_HELD = 0.8
_Kind = tuple[str, UnitKey, str]


def kinds_of(table: Table) -> dict[_Kind, list[Predicted]]:
    """The table's timed rows, predicted, by kind."""
    found: dict[_Kind, list[Predicted]] = defaultdict(list)
    rows = [row for row in table.rows if row.step_ns]
    for key in dict.fromkeys(row.key for row in rows):
        alike = tuple(dict.fromkeys(row for row in rows if row.key == key))
        for each in predict_alike(alike):
            if not each.refused:
                found[table.name, key, each.row.recompute].append(each)
    return found


def scores_of(kinds: dict[_Kind, list[Predicted]]) -> dict[_Kind, list[float]]:
    """How far off each kind's rows are, in widths of their intervals, if it is left out."""
    errors = {
        kind: [math.log(each.row.step_ns / each.step_ns) for each in rows]
        for kind, rows in kinds.items()
    }
    means = {kind: mean(found) for kind, found in errors.items()}
    total = sum(means.values())
    scores: dict[_Kind, list[float]] = {}
    for kind, rows in kinds.items():
        others = (total - means[kind]) / max(1, len(kinds) - 1)
        scores[kind] = [
            abs(error - others) / math.log(each.within.high_ns / each.step_ns)
            for error, each in zip(errors[kind], rows, strict=True)
            if each.within is not None
        ]
    return scores


def holds(scores: Sequence[Sequence[float]]) -> float:
    """The score that four fifths of the kinds, and of one more, are within; kinds count alike."""
    weighted = sorted((score, 1 / len(kind)) for kind in scores for score in kind)
    wanted, seen = min(len(scores), _HELD * (len(scores) + 1)), 0.0
    for score, weight in weighted:
        seen += weight
        if seen >= wanted - 1e-9:
            return score
    return weighted[-1][0]


def main() -> None:
    by_wait: dict[bool, list[list[float]]] = {False: [], True: []}
    for path in sorted((ROOT / "benchmarks" / "public").glob("*.toml")):
        table = load_table(path)
        if not table.calibrates:
            continue
        kinds = kinds_of(table)
        for kind, scores in scores_of(kinds).items():
            waits = any(each.within and each.within.launching for each in kinds[kind])
            by_wait[waits].append(scores)
    for waits, found in by_wait.items():
        name = "launched in half of their time or more" if waits else "others"
        print(f"{len(found):3} kinds, {name}: four of five within {holds(found):.2f} widths")


if __name__ == "__main__":
    main()
