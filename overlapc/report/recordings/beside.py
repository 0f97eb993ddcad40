"""`beside` puts what a run measured beside what its plan predicted, op by op.

A planned graph runs its ops in the plan's order, so the two lists are matched by name, in order; a
run of several steps is matched again and again. Ops that the plan does not have (a loader's, an
optimizer's) are left out. Collectives are matched in their order, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from statistics import mean

from overlapc.core.ir import COMPUTE, Plan, Problem, parse_issue
from overlapc.core.simulate import simulate
from overlapc.report.recordings.kineto import RecordedRun

_HALF = 0.5  # of a plan's ops, at least, that a step of the run must have


@dataclass(frozen=True)
class Pair:
    """An issue of the plan and how long it took, in nanoseconds; measured is a mean of steps."""

    issue: str
    name: str  # of the op, as the profiler has it
    predicted_ns: int
    measured_ns: float


@dataclass(frozen=True)
class Beside:
    """What could be matched. `exposed` are those of collectives: predicted and measured."""

    steps: int
    ops: tuple[Pair, ...]
    unmatched: tuple[str, ...]  # issues that take time and were not found in the run
    collectives: tuple[Pair, ...]
    exposed: tuple[tuple[int, float], ...]

    @property
    def predicted_ns(self) -> int:
        return sum(pair.predicted_ns for pair in self.ops)

    @property
    def measured_ns(self) -> float:
        return sum(pair.measured_ns for pair in self.ops)


def beside(run: RecordedRun, problem: Problem, plan: Plan) -> Beside:
    """Match the run's ops with the plan's issues."""
    trace = problem.trace
    timed, starts = [], []
    for text in plan.order:
        op = trace.op.get(parse_issue(text)[0])
        if op is not None and op.lane != COMPUTE and op.role == "start":
            starts.append(text)
        elif op is not None and op.role != "wait" and problem.compute_ns[text]:
            timed.append(text)
    names = {text: called(trace.op[parse_issue(text)[0]].signature) for text in (*timed, *starts)}
    wanted = [names[text] for text in timed]
    found: dict[str, list[float]] = {}
    steps = 0
    there = [event for event in run.ops if event.name in set(wanted)]
    while there:
        places = _aligned(wanted, [event.name for event in there[: 2 * len(wanted) + 1]])
        if len(places) < _HALF * len(wanted):
            break
        steps += 1
        for at, place in places.items():
            found.setdefault(timed[at], []).append(there[place].took * 1000)
        there = there[max(places.values()) + 1 :]
    ops = tuple(
        Pair(text, names[text], problem.compute_ns[text], mean(found[text]))
        for text in timed
        if text in found
    )
    unmatched = tuple(text for text in timed if text not in found)
    return Beside(steps, ops, unmatched, *_collectives(run, problem, plan, starts, names))


def _collectives(
    run: RecordedRun, problem: Problem, plan: Plan, starts: Sequence[str], names: dict[str, str]
) -> tuple[tuple[Pair, ...], tuple[tuple[int, float], ...]]:
    """The plan's collectives, each with those of the run at its place in the order."""
    predicted = {one.issue: one for one in simulate(problem, plan).exposures}
    issued = [text for text in starts if text in predicted]
    if not issued or not run.collectives or len(run.collectives) % len(issued):
        return (), ()  # the run has others, too: nobody knows which is which
    pairs, exposed = [], []
    for at, text in enumerate(issued):
        same = run.collectives[at :: len(issued)]
        one = predicted[text]
        took = mean(each.event.took for each in same) * 1000
        pairs.append(Pair(text, names[text], one.comm_ns, took))
        exposed.append((one.exposed_ns, mean(each.exposed for each in same) * 1000))
    return tuple(pairs), tuple(exposed)


def _aligned(wanted: Sequence[str], there: Sequence[str]) -> dict[int, int]:
    """Place in `wanted` -> place in `there` of the same name, both in order."""
    blocks = SequenceMatcher(None, wanted, there, autojunk=False).get_matching_blocks()
    return {block.a + i: block.b + i for block in blocks for i in range(block.size)}


def called(signature: str) -> str:
    """How the profiler calls the op of a signature: `aten::mm` of `aten.mm.default ...`."""
    namespace, _, rest = signature.split(" ", 1)[0].partition(".")
    return f"{namespace}::{rest.split('.')[0]}"


def by_name(found: Beside) -> list[tuple[str, int, int, float]]:
    """(name, issues, predicted, measured) of ops by their name, those that take longest first."""
    sums: dict[str, tuple[int, int, float]] = {}
    for pair in found.ops:
        count, predicted, measured = sums.get(pair.name, (0, 0, 0.0))
        after = count + 1, predicted + pair.predicted_ns, measured + pair.measured_ns
        sums[pair.name] = after
    return sorted(((name, *row) for name, row in sums.items()), key=lambda row: -row[3])
