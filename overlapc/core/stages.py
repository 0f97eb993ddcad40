"""`stage_cost` says what a pipeline's actions take on a planned stage; `turns` gives each op its
action."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from overlapc.core.ir import COMPUTE, Plan, Problem, Timeline, Trace, issue, parse_issue
from overlapc.core.ledger import Ledger
from overlapc.core.pipeline import StageCost
from overlapc.core.simulate import saved_bytes, simulate

TURNS = "RIW"


def turns(trace: Trace, order: Sequence[str]) -> dict[str, str]:
    """Map each issue of the backward to its action: W if only weight gradients need it, else R for
    recompute and I for the rest. An issue that is no op of the trace adds up a gradient (W)."""
    in_order = set(order)
    found: dict[str, str] = {}
    for text in reversed(order):
        name, again = parse_issue(text)
        if name not in trace.op:
            found[text] = "W"
            continue
        op = trace.op[name]
        if not again:
            if not op.is_forward:
                found[text] = op.piece.letter
            continue
        readers = {
            there
            for made in op.outputs
            for user in trace.users[made]
            for there in (issue(user.name, user.is_forward),)
            if there in in_order
        }
        only_weights = readers and all(found.get(reader, "W") == "W" for reader in readers)
        found[text] = "W" if only_weights else "R"
    return found


def stage_cost(
    problem: Problem, plan: Plan, received: Collection[str] = (), sent_ns: int = 0
) -> StageCost:
    """Compute what one microbatch takes on a stage under this plan. `received` are the inputs that
    another rank sends; they take memory while they are needed."""
    trace = problem.trace
    kept = tuple(n for n in trace.outputs if not _is_forwards(trace, n))
    alone = replace(
        problem,
        trace=replace(trace, outputs=kept),  # results are freed when they are sent
        in_flight=1,
        resident_bytes=0,
        budget_bytes=None,
    )
    action = turns(trace, plan.order)
    apart = in_parts(trace, plan)
    parted, whole = (simulate(alone, one) for one in (apart, plan))
    took = _durations(parted, action)
    held = _held(trace, plan, action, received)
    gradients = set(received).intersection(trace.of_kind("gradient"))
    gradient = sum(trace.value[name].bytes for name in gradients)
    coming = sum(trace.value[name].bytes for name in received) - gradient
    boundary = saved_bytes(alone, plan.saved)

    def most(timeline: Timeline, order: Sequence[str], kinds: str) -> int:
        memory = zip(order, timeline.memory, strict=True)
        return max((size for text, size in memory if action.get(text, "F") in kinds), default=0)

    # `simulate` counts nothing for received inputs; `held` does.
    before = {"F": 0, "R": held["F"], "I": held["R"], "W": held["I"], "B": held["F"]}
    extra = {
        "F": coming,
        "R": held["F"] - boundary,
        "I": held["F"] - boundary + gradient,
        "W": 0,
        "B": held["F"] - boundary + gradient,
    }
    working = {kind: most(parted, apart.order, kind) for kind in "FRIW"}
    working["B"] = most(whole, plan.order, TURNS)
    return StageCost(
        forward_ns=took["F"],
        input_ns=took["I"],
        weight_ns=took["W"],
        recompute_ns=took["R"],
        whole_ns=whole.step_ns - whole.phase_ns[0],
        saved=held["F"],
        remade=max(0, held["R"] - held["F"]),
        for_weights=held["I"],
        sent_ns=sent_ns,
        coming=coming,
        returning=gradient,
        working=tuple((k, max(0, working[k] + extra[k] - before[k])) for k in "FRIWB"),
    )


def in_parts(trace: Trace, plan: Plan) -> Plan:
    """Return the plan with its backward as three actions, one after the other."""
    action = turns(trace, plan.order)
    order = [text for kind in ("", *TURNS) for text in plan.order if action.get(text, "") == kind]
    return replace(plan, order=tuple(order))


def _is_forwards(trace: Trace, name: str) -> bool:
    producer = trace.value[name].producer
    return bool(producer) and trace.op[producer].is_forward


def _durations(timeline: Timeline, action: Mapping[str, str]) -> dict[str, int]:
    """Time of each action, from the begin of its first op to the begin of the next action's
    first."""
    border = timeline.phase_ns[0]
    begins: dict[str, int] = {}
    for span in sorted(timeline.spans, key=lambda span: span.start_ns):
        if span.lane == COMPUTE and span.rank == 0 and span.issue in action:
            begins.setdefault(action[span.issue], max(border, span.start_ns))
    if begins:
        begins[min(begins, key=TURNS.index)] = border
    found = {"F": border}
    end = timeline.step_ns
    for kind in reversed(TURNS):
        begin = min(begins.get(kind, end), end)
        found[kind] = end - begin
        end = begin
    found["I"] += end - border  # only what is waited for takes time
    return found


def _held(
    trace: Trace, plan: Plan, action: Mapping[str, str], received: Collection[str]
) -> dict[str, int]:
    """Bytes that are kept from the end of each action for later ones."""
    saved, again = set(plan.saved), set(plan.recomputed)
    place = {kind: i for i, kind in enumerate("FRIW")}
    ledger = Ledger([0] * len("FRI"))
    known: dict[tuple[str, str], int] = {}  # storage and the action that made it -> its holding
    for text, kind in action.items():
        name, _ = parse_issue(text)
        if name not in trace.op:
            continue
        for read in trace.op[name].inputs:
            value = trace.value[read]
            if not value.producer or value.storage in trace.resident:
                # A gradient arrives when it is first needed.
                made = "I" if trace.kinds.get(read) == "gradient" else "F"
                if read not in received:
                    continue
            elif not trace.op[value.producer].is_forward:
                made = action[value.producer]
            elif read in saved or value.producer not in again:
                made = "F"
            else:
                made = action[issue(value.producer, True)]
            key = value.storage, made
            if key not in known:
                known[key] = ledger.add(value.bytes, place[made], place[made] - 1)
            ledger.last[known[key]] = max(ledger.last[known[key]], place[kind] - 1)
    return dict(zip("FRI", ledger.alive(), strict=True))
