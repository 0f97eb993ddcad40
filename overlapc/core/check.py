"""`check` raises unless a plan is legal; it shares no code with the solvers and `simulate`.

A plan is legal for a problem when running its order from first to last computes the trace's own
results:

    trace        it was made for this very trace
    issued       every op once; recomputes ("R:name") on top
    saved        only finished values of the forward are kept for later
    recomputed   only what may run twice, after it ran, and for a value that is not saved
    phases       one after the other
    collectives  wait after start; recomputed together or not at all
    random       random ops draw in the trace's order, so that they draw the same numbers; those of
                 microbatches whose backward comes in a later step draw last
    available    whatever an issue reads is there

The forward (ops of an F piece) hands nothing to later work but saved values: backward and
recomputed ops read a forward value if it is saved, an input, or recomputed before them. That
holds in a problem of one phase too: what the forward made is dropped once the forward is done
with it. Saved values of another microbatch are those of an earlier step: always there.
"""

from __future__ import annotations

from collections.abc import Iterable

from overlapc.core.errors import InvalidPlan
from overlapc.core.ir import Plan, Problem, issue, issues, parse_issue


def check(problem: Problem, plan: Plan) -> None:
    """Raise InvalidPlan unless `plan` is legal for `problem`, whose trace must be valid."""
    _check_trace(problem, plan)
    _check_issued(problem, plan)
    _check_saved(problem, plan)
    _check_recomputed(problem, plan)
    _check_phases(problem, plan)
    _check_collectives(problem, plan)
    _check_random(problem, plan)
    _check_available(problem, plan)


def _check_trace(problem: Problem, plan: Plan) -> None:
    if plan.digest != problem.trace.digest:
        raise InvalidPlan(
            f"the plan was made for trace {plan.digest}, this model traces to "
            f"{problem.trace.digest}; plan again for this model, these input shapes, and what is "
            "to take the plan: TrainStep takes the plan of `step.report`, optimize the plan of "
            "`overlapc.predict` (with dynamic=False if models of its class have met other shapes)"
        )


def _check_issued(problem: Problem, plan: Plan) -> None:
    first: dict[str, int] = {}
    for index, text in enumerate(plan.order):
        if text in first:
            raise InvalidPlan(
                f"{text} is issued twice, as issues {first[text]} and {index}; expected once: "
                "drop one of them"
            )
        first[text] = index
    for name, recomputed in issues(plan.order):
        if name not in problem.trace.op:
            raise InvalidPlan(
                f"{issue(name, recomputed)} is issued, but the trace has no op {name}; "
                "expected only ops of the trace: drop it"
            )
    missing = [op.name for op in problem.trace.ops if op.name not in first]
    if missing:
        others = f" (nor are {len(missing) - 1} other ops)" if missing[1:] else ""
        raise InvalidPlan(
            f"{missing[0]} is never issued{others}; expected every op of the trace once: "
            "put it into the order"
        )


def _check_saved(problem: Problem, plan: Plan) -> None:
    trace = problem.trace
    seen: set[str] = set()
    for name in plan.saved:
        if name in seen:
            raise InvalidPlan(f"{name} is saved twice; expected once: drop one of them")
        seen.add(name)
        if name not in trace.value:
            raise InvalidPlan(
                f"{name} is saved, but the trace has no such value; expected values of the "
                "trace: drop it"
            )
        if not trace.value[name].producer:
            raise InvalidPlan(
                f"{name} is saved, but it is an input of the trace, and inputs are always "
                "kept; expected results of forward ops: drop it"
            )
        producer = trace.op[trace.value[name].producer]
        if not producer.is_forward:
            raise InvalidPlan(
                f"{name} is saved, but {producer.name} of piece {producer.piece} makes it; "
                "expected results of forward ops: drop it"
            )
        if producer.role == "start":
            raise InvalidPlan(
                f"{name} is saved, but the collective {producer.name} that makes it is "
                f"unfinished; expected finished values: save what {trace.wait_of[producer.name]} "
                "returns"
            )


def _check_recomputed(problem: Problem, plan: Plan) -> None:
    trace, saved = problem.trace, set(plan.saved)
    done: set[str] = set()
    for name, recomputed in issues(plan.order):
        op = trace.op[name]
        if not recomputed:
            done.add(name)
        elif not op.is_forward:
            raise InvalidPlan(
                f"R:{name} recomputes an op of piece {op.piece}; expected forward ops only: drop it"
            )
        elif not op.recomputable:
            raise InvalidPlan(
                f"R:{name} recomputes an op that may run only once; expected its results "
                "to be saved: save them and drop the recompute"
            )
        elif saved.issuperset(op.outputs):
            raise InvalidPlan(
                f"R:{name} is issued, but all that {name} makes is saved already; expected "
                "either to save or to recompute: drop one of the two"
            )
        elif name not in done and trace.microbatch(op, True) == trace.microbatch(op):
            raise InvalidPlan(
                f"R:{name} is issued before {name}; expected to recompute what has run: "
                f"move it behind {name}"
            )


def _check_phases(problem: Problem, plan: Plan) -> None:
    reached, by = 0, ""
    for name, recomputed in issues(plan.order):
        phase = problem.phase_of(problem.trace.op[name], recomputed)
        if phase < reached:
            raise InvalidPlan(
                f"{issue(name, recomputed)} of phase {problem.phases[phase]} is issued after "
                f"{by} of phase {problem.phases[reached]}; expected the phases "
                f"{', '.join(problem.phases)} one after the other: move it before {by}"
            )
        if phase > reached:
            reached, by = phase, issue(name, recomputed)


def _check_collectives(problem: Problem, plan: Plan) -> None:
    start_of = problem.trace.start_of
    started: set[str] = set()
    waited: set[str] = set()
    for name, recomputed in issues(plan.order):
        text = issue(name, recomputed)
        role = problem.trace.op[name].role
        if role == "start":
            started.add(text)
        elif role == "wait":
            start = issue(start_of[name], recomputed)
            if start not in started:
                raise InvalidPlan(
                    f"{text} waits for {start}, which is not issued before it; expected a "
                    f"start, then its wait: move {start} before {text}"
                )
            waited.add(start)
    for start in plan.order:
        if start in started and start not in waited:
            name, recomputed = parse_issue(start)
            wait = issue(problem.trace.wait_of[name], recomputed)
            raise InvalidPlan(
                f"{start} is started and never waited for; expected a wait after each start: "
                f"issue {wait}"
            )


def _check_random(problem: Problem, plan: Plan) -> None:
    def draws(names: Iterable[str]) -> dict[int, list[str]]:
        """The random ops of each phase, in the order of `names`."""
        found: dict[int, list[str]] = {}
        for name in names:
            op = problem.trace.op[name]
            if op.random:
                found.setdefault(problem.phase_of(op), []).append(name)
        return found

    ahead = problem.trace.ahead
    in_turn = sorted(problem.trace.ops, key=lambda op: op.piece.microbatch in ahead)
    expected = draws(op.name for op in in_turn)
    found = draws(name for name, recomputed in issues(plan.order) if not recomputed)
    for phase, names in found.items():
        for one, other in zip(names, expected[phase], strict=True):
            if one != other:
                raise InvalidPlan(
                    f"the random op {one} is issued before {other}; expected the trace's order "
                    f"of the random ops of phase {problem.phases[phase]}, or they draw other "
                    f"numbers: move {one} behind {other}"
                )


def _check_available(problem: Problem, plan: Plan) -> None:
    trace = problem.trace
    saved = set(plan.saved)
    inputs = set(trace.inputs)
    issued: set[str] = set()
    for reader, recomputed in issues(plan.order):
        text = issue(reader, recomputed)
        op = trace.op[reader]
        for name in op.inputs:
            if name in inputs:
                continue
            producer = trace.op[trace.value[name].producer]
            later = producer.is_forward and (recomputed or not op.is_forward)
            again = later and name not in saved
            source = issue(producer.name, again)
            others = trace.microbatch(producer, again) != trace.microbatch(op, recomputed)
            passed_on = later and others
            if passed_on and name in saved:
                continue
            if passed_on or source not in issued:
                if passed_on or (again and source not in plan.order):
                    raise InvalidPlan(
                        f"{text} reads {name}, which is neither saved nor recomputed; expected "
                        f"one of the two: save {name} or issue {source} before {text}"
                    )
                raise InvalidPlan(
                    f"{text} reads {name} of {source}, which is not issued before it; expected "
                    f"values to be made before they are read: move {source} before {text}"
                )
            here = problem.phase_of(op, recomputed)
            if not later and problem.phase_of(producer) != here:
                raise InvalidPlan(
                    f"{text} of phase {problem.phases[here]} reads {name}, which "
                    f"{producer.name} of another phase makes; expected only saved values of the "
                    "forward to cross a phase border: put both into one phase"
                )
        issued.add(text)
