"""`carried` applies an agreed plan to a microbatch whose shapes only some ranks have.

Ranks that run one model may be given microbatches of different shapes at the same time. They must
still issue the same collectives, and deliver gradients, in the same order. They cannot plan
together, since ranks with the plan's shapes are running it. So new shapes get no plan of their own:
they take the plan's saved values, recompute and order. The two traces may differ in some ops (a
copy that one shape does not need).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import SequenceMatcher

from overlapc.core.errors import InvalidPlan
from overlapc.core.ir import Cost, Op, Plan, Problem, Profile, Trace, issue, parse_issue
from overlapc.core.merge import added_by, merge
from overlapc.planning.problem import TrainingStep, formulate
from overlapc.planning.report import Report
from overlapc.planning.road import reports
from overlapc.solvers.choose.choice import Choice, Needs

Gradients = Mapping[str, Sequence[str]]  # gradient -> the parameters whose gradient it is


def carried(
    report: Report, gradients: Gradients, trace: Trace, step: TrainingStep, theirs: Gradients
) -> tuple[Report, Mapping[str, str]] | None:
    """Report on the same plan for another trace of the model, whose gradients are `theirs`. Also
    return a map from each op of that trace to its counterpart in the planned trace. None if the new
    trace would issue other collectives, or deliver gradients in another order."""
    planned = report.problem
    profile = _scaled(planned, trace, _pairs(planned.trace, gradients, trace, theirs))
    problem = formulate(trace, profile, None, step)
    problem = replace(problem, budget_bytes=planned.budget_bytes)
    pairs = _pairs(planned.trace, gradients, problem.trace, theirs)
    needs = Needs(problem.trace)
    kept = frozenset(_kept(report.plan.saved, planned.trace, needs.trace, pairs))
    first = needs.complete(kept)
    more = frozenset(_gathered_again(needs.trace, first, report.plan, pairs))
    # What the plan has no value for is made again, or kept if collectives would be, too.
    for choice in (first, needs.complete(kept | more)):
        plans = [_carried(report.plan, planned, problem, choice, pairs)]
        if report.merged is not None:
            both = merge(problem, step.lag)
            plans.append(_carried(report.merged.plan, report.merged.problem, both, choice, pairs))
        found = [plan for plan in plans if plan is not None]
        if len(found) == len(plans):
            try:
                return reports(problem, step, found, given=True)[0], pairs
            except InvalidPlan:
                pass
    return None


def actions_of(
    made: Report, pairs: Mapping[str, str], actions: Mapping[str, str]
) -> Mapping[str, str]:
    """Give each issue of a carried plan's backward the action of its counterpart in the plan."""
    trace, order = made.problem.trace, made.plan.order
    found: dict[str, str] = {}
    for text in order:
        name, again = parse_issue(text)
        like = actions.get(issue(pairs.get(name, ""), again))
        if like is None and (again or not trace.op[name].is_forward):
            late = any(found.get(source) == "W" for source in _sources(trace, name, again))
            like = "W" if late else "I"
        if like is not None:
            found[text] = like
    for text in reversed(order):  # whatever early recompute reads must be early, too
        name, again = parse_issue(text)
        if found.get(text) == "R":
            found |= {source: "R" for source in _sources(trace, name, again) if source in found}
    return found


def _pairs(planned: Trace, gradients: Gradients, trace: Trace, theirs: Gradients) -> dict[str, str]:
    """Map ops of a trace to ops of the planned trace: ops of the same kind and module, in runs of
    the same order, and ops that add up gradients of the same parameters. Where both have the same
    collectives, these are each other's, and between them what is between them."""
    ones, others = _kinds(planned, gradients), _kinds(trace, theirs)
    found: dict[str, str] = {}
    for mine, their in _spans(planned, trace):
        matcher = SequenceMatcher(None, ones[mine], others[their], autojunk=False)
        for at, theirs_at, size in matcher.get_matching_blocks():
            for i in range(size):
                name = trace.ops[their.start + theirs_at + i].name
                found[name] = planned.ops[mine.start + at + i].name
    for one, other in zip(*_starts(planned, trace), strict=True):
        found[trace.ops[other].name] = planned.ops[one].name
    return found


def _starts(planned: Trace, trace: Trace) -> tuple[list[int], list[int]]:
    """Places of the collectives of both traces, if they are the same."""
    ones, others = (
        [i for i, op in enumerate(each.ops) if op.role == "start"] for each in (planned, trace)
    )

    def kinds(each: Trace, places: Sequence[int]) -> list[tuple[str, str]]:
        return [(each.ops[i].piece.letter, each.ops[i].signature.partition(" ")[0]) for i in places]

    return (ones, others) if kinds(planned, ones) == kinds(trace, others) else ([], [])


def _spans(planned: Trace, trace: Trace) -> Iterator[tuple[slice, slice]]:
    """What lies between the collectives of both traces."""
    ones, others = _starts(planned, trace)
    begins = [(-1, -1), *zip(ones, others, strict=True)]
    ends = [*zip(ones, others, strict=True), (len(planned.ops), len(trace.ops))]
    for (one, other), (end, their_end) in zip(begins, ends, strict=True):
        yield slice(one + 1, end), slice(other + 1, their_end)


def _kinds(trace: Trace, gradients: Gradients) -> list[tuple[str, ...]]:
    """The kind of each op, without its shapes."""
    found = []
    for op in trace.ops:
        of = gradients.get(added_by(op) or op.name, ()) if not op.outputs else ()
        kind = "" if of else re.sub(r"(_\d+)+$", "", op.name)
        place = trace.modules.get(op.name, ""), kind, op.group, op.piece.letter
        found.append((*place, *of))
    return found


def _scaled(planned: Problem, trace: Trace, pairs: Mapping[str, str]) -> Profile:
    """Costs of the new trace: the plan's costs, scaled by the bytes that each op reads and
    writes."""

    def cost(op: Op) -> Cost:
        if op.name not in pairs:
            return Cost(source="estimated")
        like = planned.trace.op[pairs[op.name]]
        before = planned.cost(like.name)
        times = _touched(trace, op) / max(1, _touched(planned.trace, like))
        return Cost(
            int(before.compute_ns * times),
            int(before.comm_ns * times),
            int(before.workspace_bytes * times),
            "estimated",
        )

    return replace(planned.profile, costs={op.name: cost(op) for op in trace.ops})


def _touched(trace: Trace, op: Op) -> int:
    return sum(trace.value[name].bytes for name in (*op.inputs, *op.outputs))


def _kept(
    saved: Iterable[str], planned: Trace, trace: Trace, pairs: Mapping[str, str]
) -> Iterator[str]:
    """Storages to keep. For a saved value that this trace lacks, keep what it was made from."""
    here = {like: name for name, like in pairs.items()}
    for name in saved:
        maker = planned.op[planned.value[name].producer]
        while maker.name not in here and maker.inputs and planned.value[maker.inputs[0]].producer:
            name = maker.inputs[0]
            maker = planned.op[planned.value[name].producer]
        if maker.name in here:
            made = trace.op[here[maker.name]].outputs
            place = maker.outputs.index(name)
            yield from (trace.value[other].storage for other in made[place : place + 1])


def _gathered_again(
    trace: Trace, choice: Choice, plan: Plan, pairs: Mapping[str, str]
) -> Iterator[str]:
    """Storages that a choice makes again from collectives which the plan does not issue again."""
    again, planned = set(choice.recomputed), set(plan.recomputed)
    made: set[str] = set()  # ops that run again only with such a collective
    for op in trace.ops:
        if op.name in again:
            new = op.role == "start" and pairs.get(op.name) not in planned
            if new or any(trace.value[name].producer in made for name in op.inputs):
                made.add(op.name)
    for op in trace.ops:
        if not op.is_forward or op.name in again - made:
            for name in op.inputs:
                if trace.value[name].producer in made:
                    yield trace.value[name].storage


def _carried(
    plan: Plan, planned: Problem, problem: Problem, choice: Choice, pairs: Mapping[str, str]
) -> Plan | None:
    """The plan for a problem; None if collectives or gradients would come in another order."""
    here = {like: name for name, like in pairs.items()}
    texts = []
    for text in plan.order:
        name, again = parse_issue(text)
        if name in here:
            texts.append(issue(here[name], again))
    order = _order(texts, problem, choice)

    def alike(order: Iterable[str], trace: Trace, names: Mapping[str, str]) -> list[str]:
        issued = [(trace.op[name], again) for name, again in map(parse_issue, order)]
        shown = [(op, a) for op, a in issued if op.role == "start" or added_by(op)]
        return [issue(names.get(op.name, ""), again) for op, again in shown]

    same = {name: name for name in planned.trace.op}
    if alike(order, problem.trace, pairs) != alike(plan.order, planned.trace, same):
        return None
    found_by = f"{plan.found_by or plan.solver}, for another shape"
    return Plan(problem.trace.digest, plan.solver, choice.saved, order, found_by=found_by)


def _order(texts: Sequence[str], problem: Problem, choice: Choice) -> tuple[str, ...]:
    """The order of `texts`, where each issue comes after those that it needs, and missing issues
    come at the end of their phase."""
    trace, saved = problem.trace, set(choice.saved)
    allowed = {op.name for op in trace.ops} | {issue(name, True) for name in choice.recomputed}
    found: dict[str, None] = {}

    def phase(text: str) -> int:
        name, again = parse_issue(text)
        return problem.phase_of(trace.op[name], again)

    rest = [op.name for op in trace.ops]
    for text in sorted([*texts, *rest], key=phase):  # sorted keeps the order within a phase
        stack = [text] if text in allowed else []
        while stack:
            name, again = parse_issue(stack[-1])
            missing = [
                source
                for source in _sources(trace, name, again, saved)
                if source not in found and source in allowed
            ]
            if missing and stack[-1] not in found:
                stack += missing[:1]
            else:
                found[stack.pop()] = None
    return tuple(found)


def _sources(trace: Trace, name: str, again: bool, saved: Iterable[str] = ()) -> Iterator[str]:
    """The issues that make the values that an issue reads, without saved values."""
    op = trace.op[name]
    for value in op.inputs:
        if producer := trace.value[value].producer:
            later = trace.op[producer].is_forward and (again or not op.is_forward)
            if not (later and value in saved):
                yield issue(producer, later)
