"""Were vTrain's steps on one node run, or put together? And do they recompute? From its own files.

    git clone https://github.com/VIA-Research/vTrain
    python benchmarks/composed.py vTrain

`data/ground_truth_single.csv` is said to be measured. Three things are compared with what the
project's simulator (`src/predictor.py`) would add, in nanoseconds:

- of each step with replicas, how much longer it is than the same without, with the entry of the
  table of all-reduces (`trace/a100`) for the first stage's or the last one's gradients, rounded to
  MiB. Gradients of more than a GiB are not in it: they take their size over the bus bandwidth of
  the last entry, which no run would;
- of each step on four stages, how much longer it is than on two, beyond what its layers explain,
  with the time that the simulator gives a transfer between stages: twice its bytes over a quarter
  of 800 Gb/s (of 2^30), though all stages are on one node. Two stages more are four transfers more;
- of each step on several stages, how much longer a layer takes than of the same step on one. The
  simulator recomputes in all stages but the last, so that a first stage that does would be a third
  slower. A step on one stage has none that recomputes.
"""

from __future__ import annotations

import csv
import sys
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

_MIB = 1 << 20
_WORDS = 50257
_RATE = 800 * (1 << 30) / 8 / 4  # bytes a second between stages


class _Step(NamedTuple):
    """What a step ran as, but for its replicas, stages and layers."""

    width: int
    tp: int
    microbatch: int
    count: int  # of microbatches


def steps_of(folder: Path) -> dict[tuple[_Step, int, int, int], float]:
    """Milliseconds by step, replicas, stages and layers."""
    found = {}
    with (folder / "data" / "ground_truth_single.csv").open(encoding="utf-8-sig") as file:
        for row in list(csv.reader(file))[1:]:
            _, batch, microbatch, width, _, layers, _, tp, dp, pp = map(int, row[:10])
            step = _Step(width, tp, microbatch, batch // dp // microbatch)
            found[step, dp, pp, layers] = float(row[10])
    return found


def sums_of(folder: Path, ranks: int) -> tuple[dict[int, float], float]:
    """Milliseconds of all-reduces by MiB; and of a MiB of more than the table has."""
    lines = (folder / "trace" / "a100" / f"AR_GPU{ranks}_1M_1024M_LUT").read_text().splitlines()
    rows = [line.split(",") for line in lines[1:]]
    by_mib = {int(row[0]) // _MIB: int(row[-2]) / 1e6 for row in rows}
    rate = next(float(row[-1]) for row in rows if int(row[0]) == 1024 * _MIB)
    return by_mib, 1e3 / (rate * 1024)


def gradients(step: _Step, layers: int, pp: int, stage: int) -> int:
    """Bytes of a stage's gradients in half precision, as the simulator counts parameters."""
    width, tp = step.width, step.tp
    matrices = 3 * width * (width // tp) + width * (width // tp) + 8 * width * (width // tp)
    biases = 3 * width // tp + width + 4 * width // tp + width
    count = (matrices + biases + 4 * width) * (layers // pp)
    words = _WORDS // tp * width
    count += (words + 1024 * width) * (stage == 0) + words * (stage == pp - 1)
    return 2 * count


def main() -> None:
    folder = Path(sys.argv[1])
    steps = steps_of(folder)
    sums = {ranks: sums_of(folder, ranks) for ranks in (2, 4, 8)}
    apart = []
    for (step, dp, pp, layers), took in steps.items():
        alone = steps.get((step, 1, pp, layers))
        if dp == 1 or alone is None:
            continue
        by_mib, each = sums[dp]
        sizes = [round(gradients(step, layers, pp, stage) / _MIB) for stage in (0, pp - 1)]
        nearest = min(abs(took - alone - by_mib.get(size, size * each)) for size in sizes)
        apart.append(nearest * 1e6)
    print(f"{len(apart)} steps with replicas: all within {max(apart):.2f} ns")

    # Without its layers a step is what a line through its depths has at none.
    ends: dict[tuple[_Step, int], dict[int, float]] = defaultdict(dict)
    for (step, dp, pp, layers), took in steps.items():
        if dp == 1:
            ends[step, pp][layers] = took
    apart = []
    for (step, pp), of in ends.items():
        if pp != 2 or (step, 4) not in ends:
            continue
        alone = [_at_none(each) for each in (of, ends[step, 4])]
        transfer = 1e3 * 2 * (2 * step.microbatch * 1024 * step.width) / _RATE
        apart.append(abs(alone[1] - alone[0] - 4 * transfer) / (4 * transfer))
    print(f"{len(apart)} pairs of stages: all within {max(apart):.4%} of four transfers")

    longer = []
    for (step, pp), of in ends.items():
        if pp > 1 and (step, 1) in ends:
            alone = _of_a_layer(ends[step, 1]) / step.count
            longer.append(_of_a_layer(of) * pp / (step.count + pp - 1) / alone - 1)
    print(f"{len(longer)} steps on several stages: a layer takes {max(longer):+.3%} at most")


def _of_a_layer(steps: dict[int, float]) -> float:
    """How much longer a step takes with a layer more."""
    few, many = min(steps), max(steps)
    return (steps[many] - steps[few]) / (many - few)


def _at_none(steps: dict[int, float]) -> float:
    return steps[min(steps)] - _of_a_layer(steps) * min(steps)


if __name__ == "__main__":
    main()
