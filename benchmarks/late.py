"""Are the late waited for, and the dead and the disagreeing named? Many short runs, each with one
trouble, spread by a seed over 2, 4 and 8 ranks, front doors and moments.

    python benchmarks/late.py [--late 55] [--very-late 5] [--killed 200] [--stopped 6] [--other 12]
                              [--beside 3] [--seed 0] [--minutes 90] [--out FILE]

Late (8 to 30 s, the very late 150 s) and stopped ranks (60 s): no error, and gradients equal to
those of a run without trouble. Killed ones, and ones that wait elsewhere or have raised:
an error on every other rank within 10 s that names the rank. Runs whose rank sleeps go `--beside`
each other; of the others one at a time, as their seconds count.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).parents[1]))

from overlapc.core.files import write_file
from tests.multiprocess.spawn import processes_that_know_torch
from tests.multiprocess.test_late import assert_named, assert_waited_for
from tests.multiprocess.troubled import Trouble, run

ASLEEP = ("late", "stopped")


def drawn(args: argparse.Namespace) -> list[Trouble]:
    first = args.seed * 10_000
    found = [Trouble.drawn("late", first + i) for i in range(args.late)]
    found += [Trouble.drawn("late", first + 5_000 + i, 150.0) for i in range(args.very_late)]
    found += [Trouble.drawn("killed", first + i) for i in range(args.killed)]
    found += [Trouble.drawn("stopped", first + i, 60.0) for i in range(args.stopped)]
    kinds = ("in a barrier", "raises")
    found += [Trouble.drawn(kinds[i % 2], first + i) for i in range(args.other)]
    Random(args.seed).shuffle(found)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, count in (("late", 55), ("very-late", 5), ("killed", 200), ("stopped", 6)):
        parser.add_argument(f"--{name}", type=int, default=count)
    parser.add_argument("--other", type=int, default=12)
    parser.add_argument("--beside", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=90.0, help="begin none after so long")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    began, lock = time.monotonic(), threading.Lock()
    done, failed, longest = Counter[str](), list[str](), dict[str, float]()

    def one(trouble: Trouble) -> None:
        if time.monotonic() - began > 60 * args.minutes:
            return
        said = "ok"
        try:
            outcomes = run(trouble)
            (assert_waited_for if trouble.kind in ASLEEP else assert_named)(trouble, outcomes)
        except AssertionError as error:
            said = f"FAILED: {error}"
        with lock:
            done[trouble.kind] += 1
            if said != "ok":
                failed.append(said)
            elif trouble.kind not in ASLEEP:
                others = [o.seconds for r, o in enumerate(outcomes) if o and r != trouble.victim]
                longest[trouble.kind] = max(longest.get(trouble.kind, 0.0), *others)
            at = (time.monotonic() - began) / 60
            print(f"{at:5.1f} min: {trouble} {said}", flush=True)

    troubles = drawn(args)
    processes_that_know_torch()  # one server of processes for all threads
    with ThreadPoolExecutor(args.beside) as asleep, ThreadPoolExecutor(1) as alone:
        for trouble in troubles:
            (asleep if trouble.kind in ASLEEP else alone).submit(one, trouble)
    said = {
        "runs": dict(done),
        "failed": failed,
        "longest_s": {kind: round(seconds, 1) for kind, seconds in longest.items()},
        "minutes": round((time.monotonic() - began) / 60, 1),
        "seed": args.seed,
    }
    print(json.dumps(said, indent=1))
    if args.out is not None:
        write_file(args.out, json.dumps(said, indent=1) + "\n")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
