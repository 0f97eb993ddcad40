"""Random problems, legal plans for them, and illegal ones.

Each comes twice: drawn by a `random.Random` (loops over many seeds) and as a hypothesis strategy
(shrinks: low draws make simple problems).

    random_problem(rng, max_ops)     problems(max_ops)        every feature of ir.py turns up
    random_plan(problem, rng)        legal_plans(problem)     legal, and every legal kind turns up
    BREAKS[rule](problem, plan, rng) break_plan(problem)      one rule of `check` broken

The plans are built from the rules as the design words them, with no code of `check`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from itertools import pairwise
from random import Random

from hypothesis import strategies as st

from overlapc.core.ir import (
    COMPUTE,
    Cost,
    Kind,
    Op,
    Piece,
    Plan,
    Problem,
    Profile,
    Role,
    Slowdown,
    Trace,
    Value,
    issue,
    issues,
    parse_issue,
)
from overlapc.core.merge import ahead

LANES = ("tp", "expert group 0", 'a "odd" name: é>|')
SIGNATURES = ("aten.mm.default f32[8, 8]", "relu", "c10d::all_gather [4, 's0']", "")
_KINDS: dict[str, Kind] = {"p": "parameter", "x": "batch", "t": "gradient"}


# --- problems -----------------------------------------------------------------------------------


@dataclass
class _Builder:
    """A trace in the making."""

    rng: Random
    lanes: tuple[str, ...]
    ops: list[Op] = field(default_factory=list)
    values: dict[str, Value] = field(default_factory=dict)
    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)

    def chance(self, percent: int) -> bool:
        return self.rng.randint(0, 99) >= 100 - percent

    def some(self, names: Iterable[str], most: int = 2) -> tuple[str, ...]:
        """One to `most` of the names; later ones are likelier, so that chains grow."""
        names = list(names)
        found = [names[-1 - min(self.rng.randint(0, 4), len(names) - 1)]]
        while len(found) < most and self.chance(40):
            found.append(self.rng.choice(names))
        return tuple(dict.fromkeys(found))

    def value(self, name: str, producer: str = "", alias: str = "") -> str:
        if alias:
            size, storage = self.values[alias].bytes, self.values[alias].storage
        else:
            size, storage = self.rng.randint(0, 64), name
        self.values[name] = Value(name, size, storage, producer)
        if not producer:
            self.inputs.append(name)
        return name

    def op(
        self,
        name: str,
        role: Role,
        piece: Piece,
        inputs: Iterable[str],
        outputs: int = 1,
        alias: str = "",
        lane: str = COMPUTE,
        random: bool = False,
        recomputable: bool = True,
        seeded: bool = False,
    ) -> tuple[str, ...]:
        """Adds an op; the names of its outputs, the first of which may be a view of `alias`."""
        made = tuple(
            self.value(name if index == 0 else f"{name}_{index}", name, "" if index else alias)
            for index in range(outputs)
        )
        signature = self.rng.choice(SIGNATURES)
        self.ops.append(
            Op(
                name, role, lane, piece, tuple(dict.fromkeys(inputs)), made, signature, random,
                recomputable, seeded,
            )
        )  # fmt: skip
        return made

    def collective(
        self,
        name: str,
        piece: Piece,
        inputs: tuple[str, ...],
        between: Callable[[], object] | None = None,
        recomputable: bool = True,
    ) -> tuple[str, ...]:
        """A start, what `between` adds, and a wait for each of the start's outputs."""
        lane = self.rng.choice(self.lanes)
        raw = self.op(
            name, "start", piece, inputs, 1 + self.chance(15), lane=lane, recomputable=recomputable
        )
        if between:
            between()
        done: list[str] = []
        for index, value in enumerate(raw):
            reads = (value, *inputs) if self.chance(40) else (value,)
            alias = value if self.chance(70) else ""
            done += self.op(f"{name}_wait{index or ''}", "wait", piece, reads, alias=alias)
        return tuple(done)


def _forward(b: _Builder, stage: int, microbatch: int, params: list[str], count: int) -> list[str]:
    """Adds the forward of one microbatch; the values it leaves."""
    piece = Piece(stage, "F", microbatch)
    live = [*params, b.value(f"x{microbatch}")]
    if b.chance(20):
        live.append(b.value(f"x{microbatch}_view", alias=live[-1]))  # an input that is a view
    made: list[str] = []

    def compute(name: str) -> None:
        kinds = ("plain", "view", "random", "several", "once", "nothing", "seeded")
        kind = b.rng.choice(kinds)
        inputs = b.some(live)
        made.extend(
            b.op(
                name,
                "forward",
                piece,
                inputs,
                {"nothing": 0, "several": b.rng.randint(2, 3)}.get(kind, 1),
                inputs[0] if kind == "view" else "",
                random=kind == "random" or (kind == "once" and b.chance(10)),
                recomputable=kind not in ("once", "nothing") or b.chance(20),
                seeded=kind == "seeded",
            )
        )
        live.extend(value for value in made if value not in live)

    for index in range(count):
        name = f"f{microbatch}_{index}"
        if b.chance(35):
            between = partial(compute, f"{name}_fill") if b.chance(40) else None
            made += b.collective(name, piece, b.some(live), between, not b.chance(20))
            live.extend(value for value in made if value not in live)
        else:
            compute(name)
    return made


def _backward(b: _Builder, stage: int, microbatch: int, params: list[str]) -> None:
    """Adds input and weight gradients of that microbatch's forward, last op first."""
    forward = [op for op in b.ops if op.piece == Piece(stage, "F", microbatch)]
    raw = {name for op in forward if op.role == "start" for name in op.outputs}
    tangent = b.value(f"t{microbatch}")
    grads: dict[str, str] = {}
    for op in reversed(forward):
        if op.role == "start" or b.chance(10):  # a collective's backward comes with its wait
            continue
        incoming = [grads[name] for name in op.outputs if name in grads] or [tangent]
        readable = [name for name in (*op.inputs, *op.outputs) if name not in raw]
        reads = (*incoming, *(name for name in readable if b.chance(50)))
        into = Piece(stage, "I", microbatch)
        if op.role == "wait":
            (grad, *_) = b.collective(f"{op.name}_i", into, (incoming[0],))
        else:
            (grad, *_) = b.op(
                f"{op.name}_i", "input_grad", into, reads, 1 + b.chance(15), random=b.chance(10)
            )
        for name in op.inputs:
            if name not in params:
                grads[name] = grad
        weights = [name for name in op.inputs if name in params]
        if weights and op.role == "forward":
            piece = Piece(stage, "W", microbatch)
            made = b.op(f"{op.name}_w", "weight_grad", piece, (*incoming, *readable))
            if b.chance(30):  # gradients summed over ranks
                made = b.collective(f"{op.name}_sum", piece, made)
            b.outputs.append(made[0])
    b.outputs.extend(grad for name, grad in grads.items() if name in b.inputs)


def random_problem(rng: Random, max_ops: int = 6, lags: bool = False) -> Problem:
    """A small valid problem: one or two microbatches, at most `max_ops` forward steps each; with
    `lags`, now and then one whose backward lags behind."""
    b = _Builder(rng, LANES[: rng.randint(1, len(LANES))])
    params = [b.value("p0")]
    for index in range(1, rng.randint(1, 3)):
        params.append(b.value(f"p{index}", alias="p0" if b.chance(30) else ""))  # tied weights
    one_phase = b.chance(50)
    stage = rng.randint(0, 1)
    microbatches = range(2 if b.chance(30) else 1)
    counts = [rng.randint(1, max_ops) for _ in microbatches]
    # Pieces one microbatch after the other, as merging leaves them, or all forwards first.
    interleaved = one_phase and b.chance(50)
    for microbatch in microbatches:
        b.outputs += _forward(b, stage, microbatch, params, counts[microbatch])[-1:]
        if interleaved:
            _backward(b, stage, microbatch, params)
    if not interleaved:
        for microbatch in reversed(microbatches):
            _backward(b, stage, microbatch, params)
    if b.chance(20):
        b.outputs.append(b.inputs[0])
    trace = Trace(
        tuple(b.ops),
        tuple(b.values.values()),
        tuple(b.inputs),
        tuple(dict.fromkeys(b.outputs)),
        {name: _KINDS[name[0]] for name in b.inputs},
    )
    costs = {
        op.name: Cost(
            compute_ns=rng.randint(0, 3 if op.role in ("start", "wait") else 20),
            comm_ns=rng.randint(0, 60) if op.role == "start" else 0,
            workspace_bytes=rng.randint(1, 40) if b.chance(20) else 0,
            source=rng.choice(("measured", "estimated", "default")),
        )
        for op in trace.ops
    }
    slowdown = Slowdown()
    if b.chance(50):
        slowdown = Slowdown(rng.randint(1000, 2000), rng.randint(1000, 2000))
    made_bytes = sum(value.bytes for value in trace.values)
    lag = rng.randint(1, 2) if lags and one_phase and b.chance(40) else 0
    return Problem(
        ahead(trace, lag),
        Profile(costs, slowdown, {"device": "none", "found by": "tests/plain"}),
        budget_bytes=rng.randint(made_bytes // 4, made_bytes + 80) if b.chance(70) else None,
        resident_bytes=rng.randint(0, 50) if b.chance(50) else 0,
        in_flight=rng.choice((1, 2, 3, Fraction(5, 3))),
        phases=("FIW",) if one_phase else ("F", "IW"),
    )


def problems(max_ops: int = 6, lags: bool = False) -> st.SearchStrategy[Problem]:
    return st.randoms(use_true_random=False).map(lambda rng: random_problem(rng, max_ops, lags))


# --- legal plans --------------------------------------------------------------------------------


def _recomputable(trace: Trace, op: Op) -> bool:
    """Also of a wait: it is recomputed together with its start."""
    return (
        op.is_forward
        and op.recomputable
        and (op.role != "wait" or trace.op[trace.start_of[op.name]].recomputable)
    )


def _choose(problem: Problem, rng: Random) -> tuple[set[str], set[str]]:
    """Values to save and ops to recompute, so that all later work can be done."""
    trace = problem.trace
    candidates = [
        name
        for op in trace.ops
        if op.is_forward and op.role != "start"
        for name in op.outputs
    ]  # fmt: skip
    percent = rng.choice((0, 30, 70, 100))
    saved = {name for name in candidates if rng.randint(0, 99) < percent}
    recomputed: set[str] = set()
    todo = [name for op in trace.ops if not op.is_forward for name in op.inputs]
    for op in trace.ops:  # recompute that nobody asks for is legal
        if (
            op.role == "forward"
            and _recomputable(trace, op)
            and not saved.issuperset(op.outputs)
            and rng.randint(0, 9) == 9
        ):
            recomputed.add(op.name)
            todo += op.inputs
    while todo:
        name = todo.pop()
        producer = trace.value[name].producer
        if not producer or name in saved or not trace.op[producer].is_forward:
            continue
        if not _recomputable(trace, trace.op[producer]):
            saved.add(name)
        elif producer not in recomputed:
            recomputed.add(producer)
            todo += trace.op[producer].inputs
    return saved, recomputed


def _needs(problem: Problem, saved: set[str], recomputed: set[str]) -> dict[str, set[str]]:
    """Issue -> the issues that come before it in any legal order of these choices."""
    trace = problem.trace
    needs: dict[str, set[str]] = {}
    for op in trace.ops:
        for again in (False, True) if op.name in recomputed else (False,):
            before = needs.setdefault(issue(op.name, again), set())
            if again and not problem.trace.lag:
                before.add(op.name)
            for name in op.inputs:
                if producer := trace.value[name].producer:
                    later = trace.op[producer].is_forward and (again or not op.is_forward)
                    if not (problem.trace.lag and later and name in saved):
                        before.add(issue(producer, later and name not in saved))
    last: dict[int, str] = {}
    for op in sorted(trace.ops, key=lambda op: problem.trace.lag and op.is_forward):
        if op.random:
            phase = problem.phase_of(op)
            if phase in last:
                needs[op.name].add(last[phase])
            last[phase] = op.name
    return needs


def random_plan(problem: Problem, rng: Random) -> Plan:
    """Any legal plan: any saved set, what must be recomputed (and now and then more), any order."""
    trace = problem.trace
    saved, recomputed = _choose(problem, rng)
    needs = _needs(problem, saved, recomputed)
    phase = {text: _phase(problem, text) for text in needs}
    order: list[str] = []
    done: set[str] = set()
    while len(order) < len(needs):
        now = min(phase[text] for text in needs if text not in done)
        ready = [
            text
            for text, before in needs.items()
            if text not in done and phase[text] == now and before <= done
        ]
        order.append(rng.choice(ready))
        done.add(order[-1])
    return Plan(
        digest=trace.digest,
        solver=rng.choice(("random", "a solver")),
        saved=tuple(rng.sample(sorted(saved), len(saved))),
        order=tuple(order),
        status=rng.choice(("feasible", "optimal", "baseline")),
        bound_ns=rng.randint(0, 1000),
    )


def legal_plans(problem: Problem) -> st.SearchStrategy[Plan]:
    return st.randoms(use_true_random=False).map(lambda rng: random_plan(problem, rng))


# --- illegal plans ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Broken:
    """A plan that breaks `rule`; `message` is part of what `check` must say."""

    rule: str
    plan: Plan
    message: str


Break = Callable[[Problem, Plan, Random], Broken | None]
BREAKS: dict[str, Break] = {}


def _breaks(function: Callable[[Problem, Plan, Random], tuple[Plan, str] | None]) -> Break:
    """Registers a way to break a plan: the broken plan and the message, or None if it cannot."""
    rule = function.__name__.strip("_")

    def apply(problem: Problem, plan: Plan, rng: Random) -> Broken | None:
        found = function(problem, plan, rng)
        return found and Broken(rule, *found)

    BREAKS[rule] = apply
    return apply


def break_plan(problem: Problem) -> st.SearchStrategy[Broken]:
    """A legal plan with one rule broken."""

    def broken(rng: Random) -> Broken:
        plan = random_plan(problem, rng)
        rules = rng.sample(sorted(BREAKS), len(BREAKS))  # some always apply
        return next(found for rule in rules if (found := BREAKS[rule](problem, plan, rng)))

    return st.randoms(use_true_random=False).map(broken)


def _phase(problem: Problem, text: str) -> int:
    name, recomputed = parse_issue(text)
    return problem.phase_of(problem.trace.op[name], recomputed)


def _without(plan: Plan, *texts: str) -> list[str]:
    return [text for text in plan.order if text not in texts]


def _moved(plan: Plan, text: str, before: str) -> Plan:
    order = _without(plan, text)
    order.insert(order.index(before), text)
    return replace(plan, order=tuple(order))


def _can_move(plan: Plan, text: str, before: str) -> bool:
    """Not a recompute before the op it repeats: that breaks another rule."""
    order = plan.order
    name, recomputed = parse_issue(text)
    return not recomputed or order.index(name) < order.index(before)


def _pick(rng: Random, names: Iterable[str]) -> str | None:
    names = list(names)
    return rng.choice(names) if names else None


def _also_saved(plan: Plan, name: str | None, why: str) -> tuple[Plan, str] | None:
    if name is None:
        return None
    return replace(plan, saved=(name, *plan.saved)), f"{name} is saved, but{why}"


def _also_recomputed(plan: Plan, name: str | None, why: str) -> tuple[Plan, str] | None:
    if name is None:
        return None
    return replace(plan, order=(*plan.order, f"R:{name}")), f"R:{name} {why}"


@_breaks
def _other_trace(problem: Problem, plan: Plan, rng: Random) -> tuple[Plan, str] | None:
    return replace(plan, digest="0123456789abcdef"), "was made for trace 0123456789abcdef"


@_breaks
def _unknown_op(problem: Problem, plan: Plan, rng: Random) -> tuple[Plan, str] | None:
    text = rng.choice(("nobody", "R:nobody", "", "R:"))
    order = list(plan.order)
    order.insert(rng.randint(0, len(order)), text)
    return replace(plan, order=tuple(order)), f"{text} is issued, but the trace has no op"


@_breaks
def _op_missing(problem: Problem, plan: Plan, rng: Random) -> tuple[Plan, str] | None:
    name = rng.choice(problem.trace.ops).name
    return replace(plan, order=tuple(_without(plan, name))), f"{name} is never issued"


@_breaks
def _op_twice(problem: Problem, plan: Plan, rng: Random) -> tuple[Plan, str] | None:
    text = rng.choice(plan.order)  # a recompute too
    order = list(plan.order)
    order.insert(rng.randint(0, len(order)), text)
    return replace(plan, order=tuple(order)), f"{text} is issued twice"


@_breaks
def _saved_twice(problem: Problem, plan: Plan, rng: Random) -> tuple[Plan, str] | None:
    name = _pick(rng, plan.saved)
    return (
        None
        if name is None
        else (replace(plan, saved=(*plan.saved, name)), f"{name} is saved twice")
    )


@_breaks
def _saved_unknown(problem: Problem, plan: Plan, rng: Random) -> tuple[Plan, str] | None:
    return replace(plan, saved=(*plan.saved, "nothing")), "nothing is saved, but the trace has no"


@_breaks
def _saved_input(problem: Problem, plan: Plan, rng: Random) -> tuple[Plan, str] | None:
    name = rng.choice(problem.trace.inputs)
    return replace(plan, saved=(name, *plan.saved)), f"{name} is saved, but it is an input"


@_breaks
def _saved_backward(problem: Problem, plan: Plan, rng: Random) -> tuple[Plan, str] | None:
    ops = [op for op in problem.trace.ops if not op.is_forward]
    name = _pick(rng, (name for op in ops for name in op.outputs))
    return _also_saved(plan, name, "")


@_breaks
def _saved_start(problem: Problem, plan: Plan, rng: Random) -> tuple[Plan, str] | None:
    ops = [op for op in problem.trace.ops if op.is_forward and op.role == "start"]
    name = _pick(rng, (name for op in ops for name in op.outputs))
    return _also_saved(plan, name, " the coll")


@_breaks
def _recompute_backward(problem: Problem, plan: Plan, rng: Random) -> tuple[Plan, str] | None:
    name = _pick(rng, (op.name for op in problem.trace.ops if not op.is_forward))
    return _also_recomputed(plan, name, "recomputes an op")


@_breaks
def _recompute_once(problem: Problem, plan: Plan, rng: Random) -> tuple[Plan, str] | None:
    ops = problem.trace.ops
    name = _pick(rng, (op.name for op in ops if op.is_forward and not op.recomputable))
    return _also_recomputed(plan, name, "recomputes an op that may run only once")


@_breaks
def _recompute_saved(problem: Problem, plan: Plan, rng: Random) -> tuple[Plan, str] | None:
    name = _pick(
        rng,
        (
            op.name
            for op in problem.trace.ops
            if op.is_forward and op.recomputable and set(op.outputs) <= set(plan.saved)
        ),
    )
    return _also_recomputed(plan, name, f"is issued, but all that {name} makes is saved")


@_breaks
def _recompute_early(problem: Problem, plan: Plan, rng: Random) -> tuple[Plan, str] | None:
    name = None if problem.trace.lag else _pick(rng, plan.recomputed)
    return (
        None
        if name is None
        else (_moved(plan, f"R:{name}", name), f"R:{name} is issued before {name}")
    )


@_breaks
def _phase_order(problem: Problem, plan: Plan, rng: Random) -> tuple[Plan, str] | None:
    if len(problem.phases) == 1:
        return None
    first = [text for text in plan.order if _phase(problem, text) == 0]
    second = [text for text in plan.order if _phase(problem, text) == 1]
    movable = [text for text in first if f"R:{text}" not in second]
    text = _pick(rng, movable)
    if not text or not second:
        return None
    return (
        replace(plan, order=(*_without(plan, text), text)),
        f"{text} of phase F is issued after {second[0]} of phase IW",
    )


@_breaks
def _wait_first(problem: Problem, plan: Plan, rng: Random) -> tuple[Plan, str] | None:
    start_of = problem.trace.start_of
    pairs = [
        (issue(name, again), issue(start_of[name], again))
        for name, again in issues(plan.order)
        if name in start_of and (again or f"R:{name}" not in plan.order)
    ]
    pairs = [pair for pair in pairs if _can_move(plan, *pair)]
    if not pairs:
        return None
    wait, start = rng.choice(pairs)
    return _moved(plan, wait, start), f"{wait} waits for {start}, which is not issued before it"


@_breaks
def _wait_missing(problem: Problem, plan: Plan, rng: Random) -> tuple[Plan, str] | None:
    """All recomputed waits of one recomputed start dropped."""
    start = _pick(rng, (n for n in plan.recomputed if problem.trace.op[n].role == "start"))
    waits = [f"R:{wait}" for wait, of in problem.trace.start_of.items() if of == start]
    return (
        None
        if start is None
        else (
            replace(plan, order=tuple(_without(plan, *waits))),
            f"R:{start} is started and never waited for",
        )
    )


@_breaks
def _start_missing(problem: Problem, plan: Plan, rng: Random) -> tuple[Plan, str] | None:
    start = _pick(rng, (n for n in plan.recomputed if problem.trace.op[n].role == "start"))
    return (
        None
        if start is None
        else (
            replace(plan, order=tuple(_without(plan, f"R:{start}"))),
            f"waits for R:{start}, which is not issued",
        )
    )


@_breaks
def _random_order(problem: Problem, plan: Plan, rng: Random) -> tuple[Plan, str] | None:
    random = [name for name in plan.order if name in problem.trace.op]
    random = [name for name in random if problem.trace.op[name].random]
    pairs = [
        (one, other)
        for one, other in pairwise(random)
        if _phase(problem, one) == _phase(problem, other)
        and not {f"R:{one}", f"R:{other}"} & set(plan.order)
    ]
    if not pairs:
        return None
    one, other = rng.choice(pairs)
    swap = {one: other, other: one}
    order = tuple(swap.get(text, text) for text in plan.order)
    return replace(plan, order=order), f"the random op {other} is issued before {one}"


def _reads(problem: Problem, plan: Plan) -> list[tuple[str, str, str]]:
    """(reader, value, the issue it reads the value from) of every read but of inputs."""
    trace, found = problem.trace, []
    for name, again in issues(plan.order):
        for value in trace.op[name].inputs:
            if producer := trace.value[value].producer:
                later = trace.op[producer].is_forward and (again or not trace.op[name].is_forward)
                source = issue(producer, later and value not in plan.saved)
                found.append((issue(name, again), value, source))
    return found


def _is_late(problem: Problem, text: str) -> bool:
    name, again = parse_issue(text)
    return again or not problem.trace.op[name].is_forward


@_breaks
def _read_early(problem: Problem, plan: Plan, rng: Random) -> tuple[Plan, str] | None:
    pairs = [
        (reader, source)
        for reader, value, source in _reads(problem, plan)
        if _phase(problem, reader) == _phase(problem, source)
        and not (problem.trace.lag and value in plan.saved and _is_late(problem, reader))
        and problem.trace.op[parse_issue(reader)[0]].role not in ("start", "wait")
        and not problem.trace.op[parse_issue(reader)[0]].random
        and f"R:{reader}" not in plan.order
        and _can_move(plan, reader, source)
    ]
    if not pairs:
        return None
    reader, source = rng.choice(pairs)
    return _moved(plan, reader, source), f"{reader} reads "


@_breaks
def _not_saved(problem: Problem, plan: Plan, rng: Random) -> tuple[Plan, str] | None:
    crossing = {value for _, value, _ in _reads(problem, plan) if value in plan.saved}
    lost = [
        value
        for value in sorted(crossing)
        if f"R:{problem.trace.value[value].producer}" not in plan.order
        and any(
            reader.startswith("R:") or not problem.trace.op[reader].is_forward
            for reader, read, _ in _reads(problem, plan)
            if read == value
        )
    ]
    name = _pick(rng, lost)
    saved = tuple(value for value in plan.saved if value != name)
    return (
        None
        if name is None
        else (
            replace(plan, saved=saved),
            f" reads {name}, which is neither saved nor recomputed",
        )
    )


@_breaks
def _not_recomputed(problem: Problem, plan: Plan, rng: Random) -> tuple[Plan, str] | None:
    lost = {
        source: value
        for _, value, source in _reads(problem, plan)
        if source.startswith("R:")
        and problem.trace.op[parse_issue(source)[0]].role not in ("start", "wait")
    }
    source = _pick(rng, sorted(lost))
    return (
        None
        if source is None
        else (
            replace(plan, order=tuple(_without(plan, source))),
            "which is neither saved nor recomputed",
        )
    )
