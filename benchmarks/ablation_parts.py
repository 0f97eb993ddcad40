"""What each part of a search is worth, by leaving it out.

    python benchmarks/ablation_parts.py --of rows --json benchmarks/results/ablation_rows.json
    python benchmarks/ablation_parts.py --of merged --every 6 --json ...
    python benchmarks/ablation_parts.py --of opt --every 12 --json ...   on an idle machine
    python benchmarks/ablation_parts.py --of constants --every 6 --json ...

`rows` places the actions of drawn pipelines (`drawn_pipelines.py`), `merged` plans a step of four
merged microbatches of a case of the set, `opt` searches a case of the set for so many seconds, and
`constants` solves it by HEU and by `overlap` with half and twice of each of the solvers' constants.
Each part of the search is left out in turn. It *wins* a case if what is found without it is slower
by more than 0.2%; how much slower is its *gain*. Cases are halved: the first half may decide what
to delete, the other half is held out. Times of steps are *predicted*; `cpu` is the CPU time of the
search without the part, as a share of the whole search's. Of `constants`, what modules make of one
while they are imported (a menu, say) keeps its value.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.ablation import WINS, half, write
from benchmarks.drawn_pipelines import drawn
from benchmarks.problems import build, cases
from overlapc.core.errors import Infeasible
from overlapc.core.ir import Problem
from overlapc.core.merge import merge
from overlapc.core.pipeline import simulate_pipeline
from overlapc.core.simulate import step_ns
from overlapc.solvers import constants, solve
from overlapc.solvers.order import merging
from overlapc.solvers.pipeline import rows
from overlapc.solvers.step import solve_step

opt = sys.modules["overlapc.solvers.choose.opt"]  # the package has a function of that name
WHOLE = "nothing"  # is left out
Parts = Mapping[str, Callable[[], AbstractContextManager[Any]]]  # name -> leaves the part out


@dataclass(frozen=True)
class Subject:
    """A search: its parts, the names of the cases, and what it finds for one, None if nothing
    fits."""

    parts: Parts
    cases: tuple[str, ...]
    step_ns: Callable[[str], int | None]
    held_out: Callable[[str], bool]


def less(module: Any, menu: str) -> dict[str, Callable[[], AbstractContextManager[Any]]]:
    """A part for each entry of a menu that stands in a module."""
    entries = getattr(module, menu)

    def leave_out(entry: Any) -> AbstractContextManager[Any]:
        return mock.patch.object(module, menu, tuple(e for e in entries if e is not entry))

    name = menu.strip("_").lower()
    return {f"{name} {entry}": partial(leave_out, entry) for entry in entries}


def change(owner: Any, name: str, other: Any) -> Callable[[], AbstractContextManager[Any]]:
    """The part is left out while something else stands in its place."""
    return lambda: mock.patch.object(owner, name, other)


def of_rows(args: argparse.Namespace) -> Subject:
    refill = rows._RowSearch.refill

    def words(split: bool, early: bool) -> str:
        return f"{'late W' if split else 'W in place'}, {'early R' if early else 'R in place'}"

    def unfilled(which: str) -> Callable[..., Any]:
        return lambda self, start, timeline, split, early: (
            [] if which == words(split, early) else refill(self, start, timeline, split, early)
        )

    fills = [words(split, early) for split in (True, False) for early in (True, False)]
    parts = {
        **less(rows, "_SHARES"),
        **less(rows, "PATIENCE"),
        **{f"fill {w}": change(rows._RowSearch, "refill", unfilled(w)) for w in fills},
        "scratch": change(rows, "_through_time", lambda *_, **__: ()),
        "again": change(rows, "_ROUNDS", 1),
        "second": change(rows, "_POLISHED", 1),
        "polish": change(rows._RowSearch, "polish", lambda *_: None),
    }

    def step(case: str) -> int | None:
        schedule, costs, limits = drawn(int(case))
        timeline = simulate_pipeline(rows.placed(schedule, costs, limits), costs)
        fits = all(peak <= limit for peak, limit in zip(timeline.peak_bytes, limits, strict=True))
        return timeline.step_ns if fits else None

    names = tuple(map(str, range(args.pipelines)))
    return Subject(parts, names, step, lambda case: int(case) >= args.pipelines // 2)


def of_merged(args: argparse.Namespace) -> Subject:
    kept, paces = merging.keep_sets, merging.PACES
    search = merging._MergeSearch
    parts = {
        **less(merging, "_SHARES"),
        **less(merging, "_TASTES"),
        "every other share left to the other": change(merging, "LEFT", merging.LEFT[::2]),
        "shares left to the other": change(merging, "LEFT", ()),
        "every other set of the hull": change(merging, "keep_sets", lambda *a: kept(*a)[::2]),
        "sets of the hull": change(merging, "keep_sets", lambda *_: []),
        "more than four paces": change(merging, "PACES", ()),
        "paces in a hurry": change(merging, "PACES", tuple(p for p in paces if not p.hurry)),
        "paces that are not in a hurry": change(
            merging, "PACES", tuple(p for p in paces if p.hurry)
        ),
        "filling the 4th..6th choice": change(merging, "_FILLED", merging._FILLED // 2),
        "filling the 2nd..6th choice": change(merging, "_FILLED", 1),
        "filling the 3rd and 4th order": change(merging, "_STARTS", 2),
        "filling the 2nd..4th order": change(merging, "_STARTS", 1),
        "all filling": change(search, "filled", lambda _, merged: merged),
        "polish of the 2nd and 3rd": change(merging, "_POLISHED", 1),
        "polish": change(search, "polished", lambda _, merged: merged),
        "half of polish's patience": change(merging, "_IDLE", merging._IDLE // 2),
    }

    def step(case: str) -> int | None:
        problem = problem_of(case)
        try:
            lone, *merged = solve_step(problem, "heu", partial(solve, problem, "heu"), 4)
        except Infeasible:
            return None
        lone_ns = step_ns(problem, lone)
        together_ns = step_ns(merge(problem), merged[0]) if merged else lone_ns
        return lone_ns + 3 * together_ns

    return Subject(parts, set_cases(args.every), step, is_held_out)


def of_opt(args: argparse.Namespace) -> Subject:
    search: Any = opt._OptSearch
    take = search.take

    def nothing(*_: Any, **__: Any) -> None:
        return None

    def without_others(self: Any, plans: Any) -> None:
        if self.proof is None:  # the others come last, while the proof goes on
            take(self, plans)

    parts = {
        "every other margin": change(opt, "_MARGINS", opt._MARGINS[::2]),
        "groups of blocks": change(search, "groups", nothing),
        "windows filled anew": change(search, "polish", nothing),
        "refilling each choice": change(opt, "_SEEDS", 0),
        "one more kept": change(search, "vary", nothing),
        "closer margins": change(search, "closer", lambda _: iter(())),
        "others' plans": change(search, "take", without_others),
        "list scheduling": change(search, "listed", nothing),
    }

    def step(case: str) -> int | None:
        problem = problem_of(case)
        try:
            return step_ns(problem, solve(problem, "opt", time_limit_s=args.seconds))
        except Infeasible:
            return None

    return Subject(parts, set_cases(args.every), step, is_held_out)


def of_constants(args: argparse.Namespace) -> Subject:
    modules = [m for name, m in sys.modules.items() if name.startswith("overlapc.solvers.")]

    @contextmanager
    def instead(name: str, other: float) -> Iterator[None]:
        with ExitStack() as stack:
            for module in modules:
                if hasattr(module, name):
                    stack.enter_context(mock.patch.object(module, name, other))
            yield

    parts: dict[str, Callable[[], AbstractContextManager[Any]]] = {}
    for name, value in vars(constants).items():
        if name.isupper():
            half_of = (
                1 + (value - 1) / 2 if 1 < value < 1.1 else value / 2
            )  # of AT_BOUND its margin
            twice = 1 + (value - 1) * 2 if 1 < value < 1.1 else value * 2
            kind = type(value)
            parts[f"{name} {kind(half_of)}"] = partial(instead, name, kind(half_of))
            parts[f"{name} {kind(twice)}"] = partial(instead, name, kind(twice))

    def step(case: str) -> int | None:
        name, _, solver = case.partition(" ")
        problem = problem_of(name)
        try:
            return step_ns(problem, solve(problem, solver))
        except Infeasible:
            return None

    names = (f"{case} {s}" for case in set_cases(args.every) for s in ("heu", "overlap"))
    return Subject(parts, tuple(names), step, is_held_out)


def set_cases(every: int) -> tuple[str, ...]:
    return tuple(case.name for case in cases())[::every]


@cache
def problem_of(name: str) -> Problem:
    return build(next(case for case in cases() if case.name == name))


def is_held_out(case: str) -> bool:
    return half(case) == "held out"


SUBJECTS = {"rows": of_rows, "merged": of_merged, "opt": of_opt, "constants": of_constants}


def measure(subject: Subject, case: str) -> dict[str, Any]:
    """What is found, and in how much CPU time, with the whole search and without each part."""
    found, cpu_s = {}, {}
    subject.step_ns(case)  # what it builds and imports is not the search's time
    whole: Parts = {WHOLE: nullcontext}
    for name, leave_out in {**whole, **subject.parts}.items():
        began = time.process_time()
        with leave_out():
            found[name] = subject.step_ns(case)
        cpu_s[name] = round(time.process_time() - began, 2)
        if found[WHOLE] is None:
            break
    return {"case": case, "step_ns": found, "cpu_s": cpu_s}


def summarise(subject: Subject, measured: list[dict[str, Any]]) -> None:
    """A row for each part, columns for both halves: wins, their mean gain and the most."""
    fit = [row for row in measured if row["step_ns"][WHOLE]]
    halves = [[r for r in fit if subject.held_out(r["case"]) == out] for out in (False, True)]
    print(f"| without | calibration ({len(halves[0])}) | held out ({len(halves[1])}) | cpu |")
    for part in subject.parts:
        cells = [gain(rows, part) for rows in halves]
        shares = [r["cpu_s"][part] / max(r["cpu_s"][WHOLE], 0.01) for r in fit if "cpu_s" in r]
        cpu = f"{statistics.median(shares):.2f}" if shares else "-"
        print(f"| {part} | {' | '.join(cells)} | {cpu} |")


def gain(rows: list[dict[str, Any]], part: str) -> str:
    steps = [row["step_ns"] for row in rows]
    losses = [step[part] / step[WHOLE] if step[part] else 2.0 for step in steps]
    won = [loss for loss in losses if loss > WINS]
    lost = f"; faster without in {n}" if (n := sum(loss < 1 / WINS for loss in losses)) else ""
    mean = f", {statistics.mean(won) - 1:.2%}, most {max(won) - 1:.2%}" if won else ""
    return f"{len(won)}{mean}{lost}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--of", choices=SUBJECTS, default="merged")
    parser.add_argument("--every", type=int, default=6, help="only every N-th case of the set")
    parser.add_argument("--pipelines", type=int, default=60, help="how many are drawn")
    parser.add_argument("--seconds", type=float, default=20, help="the time limit of opt")
    parser.add_argument("--json", type=Path, help="file that keeps results and is continued")
    args = parser.parse_args()
    subject = SUBJECTS[args.of](args)
    measured = json.loads(args.json.read_text()) if args.json and args.json.exists() else []
    known = {row["case"] for row in measured}
    left = [case for case in subject.cases if case not in known]
    for number, case in enumerate(left, 1):
        measured.append(measure(subject, case))
        if args.json:
            write(args.json, measured)
        print(f"{number} of {len(left)}: {case}", file=sys.stderr, flush=True)
    summarise(subject, measured)


if __name__ == "__main__":
    main()
