"""`explain` says for every collective its time, what hides it, how much is exposed and why;
`op_fates` says for every forward op what becomes of its outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from overlapc.core.ir import COMPUTE, Exposure, Problem, Span, issue, issues, parse_issue
from overlapc.planning.report import Report
from overlapc.report.table import table
from overlapc.solvers.choose.choice import Needs

# What a GPU's host may take for a kernel of PyTorch's: docs/results.md has what one took.
_SHORT_NS = 20_000


def explain(report: Report) -> str:
    """Write a summary and a table, one row for each collective in order of issue."""
    problem, plan, timeline = report.problem, report.plan, report.timeline
    eager = report.eager
    budget = problem.budget_bytes or 0
    sources = {problem.cost(op.name).source for op in problem.trace.ops}
    found_by = f" ({plan.found_by})" if plan.found_by else ""
    lines = [
        f"{report.name}: {len(problem.trace.ops)} ops, solver {plan.solver}{found_by}, "
        f"costs {'/'.join(sorted(sources))}; every figure below is predicted",
        f"  step {_ms(timeline.step_ns)} ms (plain order, all saved: {_ms(eager.step_ns)} ms; "
        f"lower bound: {_ms(report.bound_ns)} ms)",
        f"  exposed communication {_ms(timeline.exposed_ns)} of {_ms(timeline.comm_ns)} ms, "
        f"recompute {_ms(timeline.recompute_ns)} ms",
        f"  peak {_mb(timeline.peak_bytes)} MB of {_mb(budget)} MB "
        f"(all saved: {_mb(eager.peak_bytes)} MB)",
    ]
    if report.rank_peaks:
        lines.append(
            f"  the fullest rank holds {_mb(report.peak_bytes)} MB: ranks, slices or microbatches "
            "differ in the sizes of values, and the plan has room for the largest of each"
        )
    lines += _launches(problem)
    if not timeline.exposures:
        return "\n".join([*lines, "  no collectives"])
    rows: list[tuple[str, ...]] = [
        ("collective", "group", "ms", "exposed", "hidden by", "why not more")
    ]
    reasons = Reasons(problem, plan.order)
    for exposure in timeline.exposures:
        rows.append(
            (
                exposure.issue,
                exposure.lane,
                _ms(exposure.comm_ns),
                _ms(exposure.exposed_ns),
                _hidden_by(problem, exposure),
                reasons.why(exposure),
            )
        )
    modules = problem.trace.modules
    if modules:
        names = [modules.get(parse_issue(e.issue)[0], "") for e in timeline.exposures]
        rows = [(*row, name) for row, name in zip(rows, ["module", *names], strict=True)]
    return "\n".join([*lines, *table(rows, indent="  ")])


def _launches(problem: Problem) -> list[str]:
    """What an estimate leaves out if kernels are so short that a host may not keep up."""
    costs = [problem.cost(op.name) for op in problem.trace.ops]
    kernels = [cost.compute_ns for cost in costs if cost.compute_ns > 0]
    if any(cost.source != "estimated" for cost in costs) or not kernels:
        return []
    mean_ns = sum(kernels) / len(kernels)
    if mean_ns >= _SHORT_NS:
        return []
    return [
        f"  {len(kernels)} kernels of {mean_ns / 1000:.1f} us on average: a GPU's host that needs "
        "longer to launch one makes the step longer, which estimates leave out"
    ]


@dataclass(frozen=True)
class Fate:
    """What becomes of a forward op's outputs: saved, recomputed or dropped; where and why."""

    op: str
    compute_ns: int
    bytes: int  # bytes that it makes, without aliases of inputs
    what: str
    why: str
    module: str = ""


def op_fates(report: Report) -> list[Fate]:
    """Return the fate of every forward op that allocates outputs, in order."""
    problem, plan = report.problem, report.plan
    trace, needs = problem.trace, Needs(problem.trace)
    saved = {trace.value[name].storage for name in plan.saved}
    returned = {trace.value[name].storage for name in trace.outputs}
    again = set(plan.recomputed)
    spans = report.timeline.spans
    ran = {span.issue: span for span in spans if span.lane == COMPUTE}
    windows = [span for span in spans if span.lane != COMPUTE]
    seen = set(trace.resident)
    fates = []
    for op in trace.ops:
        if not op.is_forward:
            continue
        made = {trace.value[name].storage: trace.value[name].bytes for name in op.outputs}
        made = {storage: size for storage, size in made.items() if storage not in seen}
        seen |= made.keys()
        if not sum(made.values()):
            continue
        cost_ns = problem.cost(op.name).compute_ns
        if op.name in again:
            what, why = "recomputed", _where(ran.get(issue(op.name, True)), windows)
        elif made.keys() & saved:
            what = "saved"
            why = f"{_ms(cost_ns)} ms to recompute"
            if not needs.may_rerun(op):
                why = "must not run twice"
        elif made.keys() & returned:
            what, why = "returned", "an output of the graph"
        else:
            what, why = "dropped", "only the forward reads it"
        module = trace.modules.get(op.name, "")
        fates.append(Fate(op.name, cost_ns, sum(made.values()), what, why, module))
    return fates


def explain_ops(report: Report) -> str:
    """Write the fates as a table."""
    fates = op_fates(report)
    rows: list[tuple[str, ...]] = [("op", "ms", "MB", "its result is", "where, or why")]
    rows += [(f.op, _ms(f.compute_ns), _mb(f.bytes), f.what, f.why) for f in fates]
    if report.problem.trace.modules:
        names = ["module", *(fate.module for fate in fates)]
        rows = [(*row, name) for row, name in zip(rows, names, strict=True)]
    return "\n".join(table(rows, indent="  "))


def _where(mine: Span | None, windows: Sequence[Span]) -> str:
    """The collectives beside which the op runs."""
    if mine is None:
        return "takes no time"
    beside = {
        span.issue: None
        for span in windows
        if span.start_ns < mine.end_ns and mine.start_ns < span.end_ns
    }
    return f"beside {', '.join(beside)}" if beside else "beside no collective"


class Reasons:
    """Says why a collective stays exposed, by what else could have run beside it."""

    def __init__(self, problem: Problem, order: tuple[str, ...]) -> None:
        self.problem = problem
        self.order = list(issues(order))
        self.at = {text: i for i, text in enumerate(order)}
        self.wait_at: dict[str, int] = {}  # start -> its first wait, as issues
        made: dict[str, int] = {}
        for i, (name, again) in enumerate(self.order):
            if start := problem.trace.start_of.get(name):
                self.wait_at.setdefault(issue(start, again), i)
            if again or not problem.trace.op[name].is_forward:
                for value in problem.trace.op[name].outputs:
                    made[value] = i
        self.made = made

    def why(self, exposure: Exposure) -> str:
        if exposure.exposed_ns * 50 <= exposure.comm_ns:
            return ""
        trace = self.problem.trace
        name, again = parse_issue(exposure.issue)
        wait = self.wait_at[exposure.issue]
        phase = self.problem.phase_of(trace.op[name], again)
        later_ns = 0
        for i in range(wait + 1, len(self.order)):
            op_name, op_again = self.order[i]
            op = trace.op[op_name]
            if self.problem.phase_of(op, op_again) != phase or op.role == "wait":
                continue
            if all(self._there(value, wait, op.is_forward and not op_again) for value in op.inputs):
                later_ns += self.problem.cost(op_name).compute_ns
        awaited = set(trace.op[self.order[wait][0]].outputs)
        reader = next(
            (
                issue(*later)
                for later in self.order[wait + 1 :]
                if awaited.intersection(trace.op[later[0]].inputs)
            ),
            "end",
        )
        alone = not any(each.piece.microbatch for each in trace.ops)
        if alone and phase == 0 and len(self.problem.phases) > 1:
            return f"forward: all that follows needs it ({reader})"
        if later_ns * 20 <= exposure.exposed_ns:
            return f"nothing else is ready: {reader} needs it"
        return f"{_ms(later_ns)} ms of ready work is kept for later windows, or by memory"

    def _there(self, value: str, wait: int, forward: bool) -> bool:
        if forward:
            producer = self.problem.trace.value[value].producer
            return not producer or self.at.get(producer, -1) < wait
        return self.made.get(value, -1) < wait


def _hidden_by(problem: Problem, exposure: Exposure) -> str:
    """The work that ran beside the collective: kind, slice (if there are several), and time."""
    kinds: dict[str, int] = {}
    ops = problem.trace.ops
    slices = len({op.piece.microbatch for op in ops if op.is_forward}) > 1
    for text in exposure.hidden_by:
        name, again = parse_issue(text)
        piece = problem.trace.op[name].piece
        letter = f"{'R' if again else piece.letter}{piece.microbatch if slices else ''}"
        kinds[letter] = kinds.get(letter, 0) + problem.cost(name).compute_ns
    return " ".join(f"{letter} {_ms(ns)}" for letter, ns in sorted(kinds.items()) if ns) or "-"


def _ms(ns: int) -> str:
    return f"{ns / 1e6:.1f}" if ns >= 100_000 or ns == 0 else f"{ns / 1e6:.3f}"


def _mb(count: int) -> str:
    return f"{count / 1e6:.1f}"
