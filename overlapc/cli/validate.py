"""`overlapc validate` predicts published measurements and prints the errors."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from overlapc.cli.shared import FAILED, GOOD, Declare, positive, say
from overlapc.core.errors import OptionError

_HERE = Path("benchmarks/public")  # in the project's folder


def declare_validate(command: Declare) -> None:
    validate = command("validate", _validate, "compare predictions with published measurements")
    add = validate.add_argument
    add(
        "tables",
        nargs="*",
        type=Path,
        help=f"tables or folders of them; by default {_HERE} of the project's sources",
    )
    add("--every", type=positive, default=1, help="predict only every N-th row, for a quick look")
    add("--workers", type=positive, help="number of processes")
    add(
        "--write",
        type=Path,
        metavar="FILE",
        help="write the predicted rows that have a measured step; "
        "overlapc/validation/public_runs.csv is such a file, from which `search` takes the rows "
        "nearest to its question",
    )


def _validate(args: argparse.Namespace) -> int:
    from overlapc.core.files import write_file
    from overlapc.report.scoreboard import as_json, scoreboard
    from overlapc.search.captures import UnitKey
    from overlapc.search.pool import WORKERS, planners
    from overlapc.tools.progress import doing
    from overlapc.validation.nearest import as_csv
    from overlapc.validation.public import Predicted, Row, load_table, predict_alike

    given = args.tables or [_HERE]
    paths = [
        p for path in given for p in (sorted(path.glob("*.toml")) if path.is_dir() else [path])
    ]
    if not paths or not all(path.exists() for path in paths):
        raise OptionError(
            f"no tables at {', '.join(map(str, given))}; expected .toml files or folders of them, "
            f"such as {_HERE} in the project's folder"
        )
    skipped: list[str] = []
    tables = [table for path in paths if (table := load_table(path, skipped)).rows]
    for wrong in skipped:
        say(f"overlapc: {wrong}; the row is skipped")
    asked = [row for one in tables for row in one.rows[:: args.every]]
    alike: dict[UnitKey, dict[Row, None]] = {}
    for row in asked:
        alike.setdefault(row.alike, {})[row] = None
    found: dict[Row, Predicted] = {}
    with doing("predicting published runs") as note, planners(args.workers or WORKERS) as pool:
        tasks = [pool.submit(predict_alike, tuple(rows)) for rows in alike.values()]
        for task in tasks:
            found |= {each.row: each for each in task.result()}
            note(f"{len(found)} of {len(set(asked))} rows")
    judged = [(one, [found[row] for row in one.rows[:: args.every]]) for one in tables]
    if args.write is not None:
        write_file(args.write, as_csv(judged))
    print(json.dumps(as_json(judged), indent=1) if args.json else scoreboard(judged))
    if skipped:
        say(f"overlapc: {len(skipped)} rows were skipped (above); expected to read all")
    return FAILED if skipped else GOOD
