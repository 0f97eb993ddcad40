"""`overlapc report` makes a page, or pictures, of a search."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from overlapc.cli.shared import GOOD, Declare
from overlapc.core.errors import OptionError


def declare_report(command: Declare) -> None:
    report = command("report", _page, "make an HTML page, or pictures, of the result of a search")
    report.add_argument("search", help="the JSON that `overlapc search --json` printed")
    report.add_argument("--out", type=Path, help="the page, a .html file")
    report.add_argument(
        "--pictures", type=Path, help="folder for PNGs and SVGs, drawn by matplotlib"
    )


def _page(args: argparse.Namespace) -> int:
    from overlapc.core.files import make_folder, read_json, write_file
    from overlapc.report.page import page

    document = read_json(args.search, "search")
    if not isinstance(document, dict):
        raise OptionError(f"{args.search}: found {type(document).__name__}, expected a JSON object")
    if args.out is None and args.pictures is None:
        raise OptionError("nothing to write: expected --out PAGE.html, --pictures FOLDER, or both")
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
