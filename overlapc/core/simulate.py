"""`simulate` predicts the time and memory of a plan; nothing else in overlapc defines them.

`simulate(problem, plan)` issues the plan's order on one compute lane and one in-order lane per
process group and returns the Timeline. With `ranks`, the profiles of all ranks, every rank runs
the same plan at its own speed and a collective starts when the last of them has launched it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, compress, pairwise
from math import ceil

from overlapc.core import machine
from overlapc.core.errors import InvalidPlan
from overlapc.core.ir import (
    COMPUTE,
    RECOMPUTE,
    Exposure,
    Plan,
    Problem,
    Profile,
    Span,
    Timeline,
    issue,
)
from overlapc.core.ledger import Flow, Ledger
from overlapc.core.machine import Tasks

# The state of a CPU generator, which PyTorch keeps to draw the same numbers again. (A CUDA
# generator's is 16 bytes.)
RNG_STATE_BYTES = 5056


def simulate(problem: Problem, plan: Plan, ranks: Sequence[Profile] | None = None) -> Timeline:
    """Compute time, exposure and memory of a legal plan. The Timeline's exposures are rank 0's."""
    trace, order = problem.trace, plan.order
    profiles = [problem.profile] if ranks is None else ranks
    ops = [trace.ops[trace.numbered.op[text][0]] for text in order]
    costs = [profile.costs[op.name].compute_ns for profile in profiles for op in ops]
    tasks, launches = _tasks(problem, plan, costs, profiles)
    begin_ns, end_ns, ended = machine.timed(tasks)
    issues, computes = len(order), len(costs)
    spans: list[Span] = []
    for task in ended:
        begin, end = begin_ns[task], end_ns[task]
        if task >= computes:
            at = launches[task - computes]
            spans.append(Span(ops[at].lane, order[at], begin, end))
        elif costs[task]:
            rank, at = divmod(task, issues)
            spans.append(Span(COMPUTE, order[at], begin, end, rank))
    phase_end = [0] * len(problem.phases)
    for op, text, end in zip(ops, order, end_ns, strict=False):  # of rank 0
        phase_end[problem.phase_of(op, text.startswith(RECOMPUTE))] = end
    blocked: dict[str, int] = {}  # collective -> how long rank 0 waited for it
    for task, (need, *_) in tasks.after.items():
        if task < issues and begin_ns[task] > end_ns[task - 1]:
            name = order[launches[need - computes]]
            blocked[name] = blocked.get(name, 0) + begin_ns[task] - end_ns[task - 1]
    memory = memory_curve(problem, plan)
    borders = [
        0,
        *accumulate(phase_end, max),
    ]  # a phase without issues ends when the one before ends
    return Timeline(
        spans=tuple(spans),
        step_ns=max((span.end_ns for span in spans), default=0),
        phase_ns=tuple(b - a for a, b in pairwise(borders)),
        exposures=_exposures(spans, blocked),
        memory=tuple(memory),
        peak_bytes=max(memory, default=0),
        recompute_ns=sum(problem.cost(name).compute_ns for name in plan.recomputed),
    )


def peak_bytes(problem: Problem, plan: Plan) -> int:
    """Compute only the peak of `simulate`."""
    return max(memory_curve(problem, plan), default=0)


def step_ns(problem: Problem, plan: Plan, ranks: Sequence[Problem] = ()) -> int:
    """Compute only the step time of `simulate`: for solvers, which ask it often. `ranks` have the
    same problem with their own costs; without them one rank has those of the problem."""
    each = ranks or (problem,)
    costs = [one.compute_ns[text] for one in each for text in plan.order]
    end_ns, _ = machine.run(_tasks(problem, plan, costs, [one.profile for one in each])[0])
    return max(end_ns, default=0)


# --------------------------------------------------------------------------- time


def _tasks(
    problem: Problem, plan: Plan, compute_ns: list[int], profiles: Sequence[Profile]
) -> tuple[Tasks, list[int]]:
    """Make the tasks of a plan: a compute lane for each rank, with all issues, and a lane for each
    process group. Also return the collectives in the order of their tasks, as places in the plan's
    order. `compute_ns` is by rank and issue."""
    order, sync = plan.order, problem.trace.numbered.sync
    starts: dict[str, list[int]] = {lane: [] for lane in problem.trace.lanes}
    launched: dict[str, int] = {}
    waits: list[tuple[int, int]] = []  # places of a wait and of its start
    for at in compress(range(len(order)), map(sync.__contains__, order)):
        _, lane, start = sync[order[at]]
        if lane != COMPUTE:
            starts[lane].append(at)
            launched[start] = at
        elif start in launched:
            waits.append((at, launched[start]))
        else:
            raise InvalidPlan(f"{order[at]} waits for {start}, not yet issued")
    computes, issues = len(compute_ns), len(order)
    launches = [at for lane in starts.values() for at in lane]
    task_of = {at: task for task, at in enumerate(launches, computes)}
    after = {task: tuple(range(at, computes, issues)) for at, task in task_of.items()}
    for at, start_at in waits:
        awaited = (task_of[start_at],)
        for task in range(at, computes, issues):
            after[task] = awaited
    names = [sync[order[at]][0] for at in launches]
    comm_ns = [max([profile.costs[name].comm_ns for profile in profiles]) for name in names]
    sizes = [*([issues] * len(profiles)), *map(len, starts.values())]
    first, work_ns = list(accumulate(sizes, initial=0)), [*compute_ns, *comm_ns]
    return Tasks(work_ns, first, after, len(profiles), profiles[0].slowdown), launches


def _exposures(spans: Sequence[Span], blocked: dict[str, int]) -> tuple[Exposure, ...]:
    compute = [span for span in spans if span.lane == "compute" and span.rank == 0]
    ends = [span.end_ns for span in compute]
    found = []
    for span in spans:
        if span.lane == "compute":
            continue
        hidden = []
        for other in compute[bisect_left(ends, span.start_ns + 1) :]:
            if other.start_ns >= span.end_ns:
                break
            hidden.append(other.issue)
        found.append(
            Exposure(
                span.issue,
                span.lane,
                span.end_ns - span.start_ns,
                blocked.get(span.issue, 0),
                tuple(hidden),
            )
        )
    return tuple(found)


# --------------------------------------------------------------------------- memory


def memory_curve(problem: Problem, plan: Plan) -> list[int]:
    """Return the bytes alive while each issue of the plan runs."""
    return _written(problem, plan)[0].alive()


def flow_of(problem: Problem, plan: Plan) -> tuple[Flow, int, int]:
    """Return what the plan's issues, numbered by their place in it, do to memory in any legal
    order; the bytes held before the first issue; and the bytes that nobody reads, which are freed
    when the first issue ends."""
    names, end = problem.trace.numbered, len(plan.order)
    ledger, once, by_backward = _written(problem, plan)
    makes = [set[int]() for _ in plan.order]
    reads = [set[int]() for _ in plan.order]
    held = idle = 0
    for i, size in enumerate(ledger.size):
        first, last = ledger.first[i], ledger.last[i]
        if first >= 0:
            makes[first].add(i)
        elif last >= 0:
            held += size
        else:
            idle += size
        if first < last < end:
            reads[last].add(i)
    for at, text in enumerate(plan.order):
        op, repeated = names.op[text]
        backward = repeated or not names.forward[op]
        found = {(by_backward[v] if backward else once)[v] for v in names.reads[op]}
        reads[at] |= found - makes[at] - {-1}
    works = [ledger.works[0] - idle, *ledger.works[1:]] if ledger.works else []
    issues = zip(range(end), works, makes, reads, strict=True)
    flow = Flow.of(end, issues, ledger.size.__getitem__, lambda i: ledger.last[i] == end)
    return flow, held, idle


def _written(problem: Problem, plan: Plan) -> tuple[Ledger, list[int], list[list[int]]]:
    """The plan's storages as a ledger, whose moments are the issues. Also where each value's
    storage is in it: by value as its op made it, and for readers in the backward one such list for
    each value.

    A storage instance lives from the issue that allocates it to the last issue that reads a value
    on it, or to the end if the trace hands it out. Other microbatches in flight hold `copies` more
    of what is saved. For a microbatch whose backward comes in a later step, its saved values stay
    to the end, and the values that an earlier step saved in the same places are there from the
    start.
    """
    trace, names, costs = problem.trace, problem.trace.numbered, problem.costs
    end = len(plan.order)
    saved = {names.value[name] for name in plan.saved if name in names.value}
    lasting = {names.value[name] for name in trace.outputs if name in names.value}
    rerun = {names.op[name][0] for name in plan.recomputed}
    order = [names.op[text] for text in plan.order]
    ledger = Ledger([costs[op].workspace_bytes for op, _ in order])
    size, first, last = ledger.size, ledger.first, ledger.last
    _add_states(ledger, problem, plan)
    # Storage of each value as its op made it, as recompute made it, as an earlier step left it.
    once = [-1] * len(names.producer)
    again, left = list(once), list(once)
    storages: dict[int, int] = {}
    for v in saved:
        if names.ahead[names.producer[v]]:
            lasting.add(v)
            left[v] = storages.setdefault(names.storage[v], len(size))
            if left[v] == len(size):
                ledger.add(names.bytes[v], -1, -1)
    by_backward = [
        again if p in rerun and v not in saved else left if names.ahead[p] else once
        for v, p in enumerate(names.producer)
    ]
    stay: set[int] = set()
    forward, storage, reads, makes = names.forward, names.storage, names.reads, names.makes
    for i, (op, repeated) in enumerate(order):
        where = by_backward if repeated or not forward[op] else None
        here: dict[int, int] = {}  # storage -> its instance
        for v in reads[op]:
            found = once[v] if where is None else where[v][v]
            if found >= 0:
                last[found] = i
                here[storage[v]] = found
        made = again if repeated else once
        for v in makes[op]:
            found = here.get(storage[v], -1)
            if found < 0:
                found = here[storage[v]] = len(size)
                size.append(names.bytes[v])
                first.append(i)
                last.append(i)
            made[v] = found
            if v in lasting and not repeated:
                stay.add(found)
    for found in stay:
        last[found] = end
    if order:  # the first issue frees what nobody reads
        ledger.works[0] += sum(size[found] for found in storages.values() if last[found] < 0)
    return ledger, once, by_backward


def _add_states(ledger: Ledger, problem: Problem, plan: Plan) -> None:
    """Add the bytes that are there throughout, and random generators' states. A random op that runs
    again keeps its state until then; while it runs again, the current state is put aside, too."""
    end = len(plan.order)
    random = [name for name in plan.recomputed if problem.trace.op[name].has_state]
    ledger.add(problem.resident_bytes + copies_bytes(problem, plan), -1, end)
    at = {text: i for i, text in enumerate(plan.order)} if random else {}
    for name in random:
        again_at = at[issue(name, True)]
        ahead = problem.trace.op[name].piece.microbatch in problem.trace.ahead
        kept = [(-1, again_at), (at[name], end)] if ahead else [(at[name], again_at)]
        for first, last in (*kept, (again_at, again_at)):
            ledger.add(RNG_STATE_BYTES, first, last)


def copies_bytes(problem: Problem, plan: Plan) -> int:
    """Count what microbatches in flight beyond the traced one hold, at every moment."""
    random = sum(problem.trace.op[name].has_state for name in plan.recomputed)
    copy = saved_bytes(problem, plan.saved) + RNG_STATE_BYTES * random
    return ceil(problem.copies * copy)


def saved_bytes(problem: Problem, saved: Sequence[str]) -> int:
    """Count the bytes of the saved values' storages, each once, without resident ones."""
    trace = problem.trace
    storages = {trace.value[name].storage: trace.value[name].bytes for name in saved}
    return sum(b for storage, b in storages.items() if storage not in trace.resident)
