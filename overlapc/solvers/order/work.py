"""`Work` is one phase of a problem under one choice, as a graph of numbered nodes for list
scheduling.

Node n < count is op n of the trace; node n + count is its recompute. A *place* is a storage
together with the node that made it (or the forward), so a recomputed storage differs from a saved
one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from itertools import accumulate, pairwise
from math import ceil

from overlapc.core.ir import Plan, Problem, issue
from overlapc.core.ledger import Balance, Flow
from overlapc.core.simulate import RNG_STATE_BYTES, memory_curve, saved_bytes
from overlapc.solvers.choose.choice import Choice, on_demand

NEVER = 1 << 60
Place = tuple[str, int]
_FORWARD = -1  # in a Place: the forward made it


@dataclass
class Work:
    """The nodes and their dependences. `forward_work`, `backward_work` or `merged_work` builds it;
    schedulers only read it."""

    problem: Problem
    choice: Choice
    nodes: list[int]
    needs: dict[int, int] = field(default_factory=dict)  # how many nodes must come before
    after: dict[int, list[int]] = field(default_factory=dict)
    reads: dict[int, set[Place]] = field(default_factory=dict)
    makes: dict[int, set[Place]] = field(default_factory=dict)
    deadline: dict[int, int] = field(default_factory=dict)  # place in the trace, or NEVER
    tail: dict[int, int] = field(default_factory=dict)  # longest path to the end, ns
    # A weight gradient runs right after the recompute that only it needs:
    age: dict[int, int] = field(default_factory=dict)  # place in the trace of that weight gradient
    asks: dict[int, list[int]] = field(default_factory=dict)  # node -> lazy recompute it needs
    held_bytes: int = 0  # bytes alive when the phase begins

    def __post_init__(self) -> None:
        trace = self.problem.trace
        self.ops = trace.ops
        self.ahead = trace.ahead
        self.count = len(trace.ops)
        self.index = {op.name: i for i, op in enumerate(trace.ops)}
        self.size = {value.storage: value.bytes for value in trace.values}
        self.lasting = {trace.value[name].storage for name in trace.outputs}
        self.saved = frozenset(self.choice.saved)
        self.kept = {trace.value[name].storage for name in self.saved}
        costs = self.problem.costs
        self.compute = [cost.compute_ns for cost in costs]
        self.comm = [cost.comm_ns for cost in costs]
        slow_permille = self.problem.profile.slowdown.comm_permille
        self.comm_beside = [ns * slow_permille // 1000 for ns in self.comm]  # compute runs, too
        self.space = [cost.workspace_bytes for cost in costs]

    def lasts(self, place: Place) -> bool:
        """Does the place stay to the end, whoever reads it?"""
        storage, maker = place
        if maker >= self.count:
            return False
        if maker == _FORWARD:
            return not self.ahead and storage in self.lasting
        passed_on = storage in self.kept and self.ops[maker].piece.microbatch in self.ahead
        return passed_on or storage in self.lasting

    def text(self, nodes: Iterable[int]) -> tuple[str, ...]:
        """Write nodes as the issues of a plan."""
        return tuple(issue(self.ops[n % self.count].name, n >= self.count) for n in nodes)

    def start_of(self, wait: int) -> int:
        """The start node that a wait node waits for: recompute waits for recompute."""
        again = self.count if wait >= self.count else 0
        return self.index[self.problem.trace.start_of[self.ops[wait % self.count].name]] + again

    def is_lazy(self, n: int) -> bool:
        """Is the node recompute that only weight gradients need?"""
        return n >= self.count and self.deadline[n] == NEVER

    @cached_property
    def number(self) -> dict[str, int]:
        """The node of each issue."""
        return dict(zip(self.text(self.nodes), self.nodes, strict=True))

    @cached_property
    def letters(self) -> Sequence[str]:
        """By node: the letter of the op, or "R" for recompute."""
        return [op.piece.letter for op in self.ops] + ["R"] * self.count

    @cached_property
    def roles(self) -> Sequence[str]:
        """By node: the role of its op."""
        return [op.role for op in self.ops] * 2

    @cached_property
    def wary(self) -> frozenset[int]:
        """Lazy nodes and those that ask for them."""
        return frozenset(n for n in self.nodes if self.asks[n] or self.is_lazy(n))

    @cached_property
    def queues(self) -> Sequence[str]:
        """By node: the queue of a `Listing` in which it is while it could run."""
        found = [""] * (2 * self.count)
        for n in self.nodes:
            if self.roles[n] == "wait":
                found[n] = "flying"
            elif not self.makes[n] and (n >= self.count or self.deadline[n] == NEVER):
                found[n] = "views"
            elif self.deadline[n] == NEVER:
                found[n] = "spare"
            else:
                found[n] = "refill" if n >= self.count else "ready"
        return found

    @cached_property
    def chains(self) -> tuple[list[int], list[int]]:
        """The nodes of the forward, and those of the backward in their plain order."""
        forward = [n for n in self.nodes if n < self.count and self.ops[n].is_forward]
        plain = [self.number[text] for text in on_demand(self.problem, self.choice)]
        apart = set(forward)
        return forward, [n for n in plain if n not in apart]

    @cached_property
    def along_chains(self) -> tuple[dict[int, float], dict[int, int]]:
        """`along` of both chains together."""
        (shares, distances), (more, others) = map(self.along, self.chains)
        return shares | more, distances | others

    @cached_property
    def alone(self) -> Alone:
        """What both chains hold."""
        forward, backward = self.chains
        held = Balance(self.flow).along(forward)
        most_to_low = self.flow.during(forward, [0, *held])
        back_held = [0, *Balance(self.flow).along(backward)]
        during = self.flow.during(backward, back_held)
        back_most = [*[*accumulate(reversed(during), max)][::-1], -NEVER]
        last = len(forward) - 1
        lows = [
            i
            for i in range(len(forward))
            if i == last or (held[i] < held[i + 1] and held[i] <= held[i - 1])
        ]
        ends = set(lows)
        for i in range(last - 1, -1, -1):
            if i not in ends:
                most_to_low[i] = max(most_to_low[i], most_to_low[i + 1])
        spare = frozenset(n for n in backward if self.deadline[n] == NEVER)
        return Alone(held, most_to_low, lows, back_held, back_most, spare)

    @cached_property
    def before(self) -> dict[int, list[int]]:
        """Node -> the nodes before it: the reverse of `after`."""
        found: dict[int, list[int]] = {n: [] for n in self.nodes}
        for n in self.nodes:
            for user in self.after[n]:
                found[user].append(n)
        return found

    @cached_property
    def flow(self) -> Flow:
        """The memory flow of the nodes, without random generators' states: `held_bytes` has room
        for the most that they may take."""
        issues = [(n, self.space[n % self.count], self.makes[n], self.reads[n]) for n in self.nodes]
        return Flow.of(2 * self.count, issues, lambda place: self.size[place[0]], self.lasts)

    @cached_property
    def plain(self) -> list[tuple[str, int]]:
        """The plain order of the whole problem, with the bytes alive while each issue runs."""
        order = on_demand(self.problem, self.choice)
        curve = memory_curve(self.problem, Plan("", "", self.choice.saved, order))
        return list(zip(order, curve, strict=True))

    @cached_property
    def needed(self) -> tuple[list[int], list[int]]:
        """The backward's ops in the plain order, and for each the most bytes between the op before
        and it."""
        places: list[int] = []
        needed: list[int] = []
        most = 0
        for text, held in self.plain:
            most = max(most, held)
            n = self.number.get(text)
            if n is not None and not self.ops[n % self.count].is_forward:
                places.append(n)
                needed.append(most)
                most = 0
        return places, needed

    def along(self, chain: Sequence[int]) -> tuple[dict[int, float], dict[int, int]]:
        """For each node of a chain, the share of the chain's compute that comes before it, and the
        compute until the chain's next collective, in ns."""
        share: dict[int, float] = {}
        distance: dict[int, int] = {}
        took = {n: self.compute[n % self.count] for n in chain}
        total, before, left = sum(took.values()) or 1, 0, NEVER
        for n in chain:
            share[n] = before / total
            before += took[n]
        for n in reversed(chain):
            if self.ops[n % self.count].role == "start":
                left = 0
            left = min(NEVER, left + (0 if self.deadline[n] == NEVER else took[n]))
            distance[n] = left
        return share, distance

    @cached_property
    def paces(self) -> tuple[dict[int, float], dict[int, int], dict[int, int]]:
        """The same for all slices, each along its plain order, and how many collectives are to
        come."""
        each: dict[int, list[int]] = {}
        for text, _ in self.plain:
            if (n := self.number.get(text)) is not None:
                each.setdefault(self.ops[n % self.count].piece.microbatch, []).append(n)
        shares: dict[int, float] = {}
        distances: dict[int, int] = {}
        coming: dict[int, int] = {}
        for chain in each.values():
            share, distance = self.along(chain)
            shares |= share
            distances |= distance
            starts = 0
            for n in reversed(chain):
                starts += self.roles[n] == "start"
                coming[n] = starts
        return shares, distances, coming


@dataclass(frozen=True)
class Alone:
    """What a forward, and the backward beside it, hold beyond the start, each by itself and in its
    plain order."""

    held: list[int]  # after each node of the forward
    most_to_low: list[int]  # the most from each of these to the next low
    lows: list[int]  # places in the forward that hold less than those around them
    back_held: list[int]  # before each node of the backward, and at its end
    back_most: list[int]  # the most from each of these to the end
    spare: frozenset[int]  # of the backward: what nothing waits for


def forward_work(problem: Problem) -> Work:
    """The forward of a problem."""
    nodes = [i for i, op in enumerate(problem.trace.ops) if op.is_forward]
    work = Work(problem, Choice((), ()), nodes)
    return _measure(work, _link(work))


def backward_work(problem: Problem, choice: Choice, defer: bool = True) -> Work:
    """The backward with the recompute of the choice. Without `defer`, weight gradients keep their
    place among the input gradients."""
    ops = problem.trace.ops
    again = set(choice.recomputed)
    nodes = [len(ops) + i for i, op in enumerate(ops) if op.name in again]
    nodes += [i for i, op in enumerate(ops) if not op.is_forward]
    work = Work(problem, choice, nodes)
    before = _link(work)
    trace = problem.trace
    held = {trace.value[name].storage for name in choice.saved}
    held |= {
        trace.value[name].storage for op in ops if op.is_forward for name in op.outputs
    } & work.lasting
    work.held_bytes = sum(work.size[s] for s in held - trace.resident) + problem.resident_bytes
    work.held_bytes += ceil(problem.copies * saved_bytes(problem, choice.saved))
    work.held_bytes += _states(problem, choice, 1 + problem.copies)
    return _measure(work, before, defer)


def merged_work(problem: Problem, choice: Choice) -> Work:
    """A forward, and the backward of an earlier microbatch with the recompute of the choice."""
    ops = problem.trace.ops
    again = set(choice.recomputed)
    nodes = [len(ops) + i for i, op in enumerate(ops) if op.name in again]
    nodes += [i for i, op in enumerate(ops) if not op.is_forward]
    nodes += [i for i, op in enumerate(ops) if op.is_forward]
    work = Work(problem, choice, nodes)
    copies = problem.copies + 1
    work.held_bytes = problem.resident_bytes + ceil(copies * saved_bytes(problem, choice.saved))
    work.held_bytes += _states(problem, choice, 1 + copies)
    return _measure(work, _link(work))


def _states(problem: Problem, choice: Choice, copies: int | Fraction) -> int:
    """The most bytes that the random generator's states take: a copy for each recomputed random op
    of every microbatch, and one put aside."""
    count = sum(problem.trace.op[name].has_state for name in choice.recomputed)
    return ceil(RNG_STATE_BYTES * (count * copies + (count > 0)))


def _link(work: Work) -> dict[int, set[int]]:
    """Fill in `after`, `reads` and `makes`; return the nodes before each node."""
    trace, count = work.problem.trace, work.count
    values, resident, index = trace.value, trace.resident, work.index
    forward = trace.numbered.forward
    saved = work.saved
    before: dict[int, set[int]] = {n: set() for n in work.nodes}
    after = work.after = {n: [] for n in work.nodes}
    home: dict[tuple[str, int], Place] = {}  # (value, node that made it) -> its place
    for n in work.nodes:
        op = work.ops[n % count]
        by_backward = n >= count or not forward[n]
        makers = before[n]
        reads: set[Place] = set()
        makes: set[Place] = set()
        of: dict[str, Place] = {}  # storage that is read -> its place
        for name in op.inputs:
            value = values[name]
            if not value.producer:
                continue
            maker = index[value.producer]
            if by_backward and forward[maker]:
                maker = _FORWARD if name in saved else maker + count
            if maker not in makers and maker in before:
                makers.add(maker)
                after[maker].append(n)
            if value.storage not in resident:
                place = home.get((name, maker), (value.storage, _FORWARD))
                reads.add(place)
                of.setdefault(value.storage, place)
        for name in op.outputs:
            storage = values[name].storage
            if storage in resident:
                continue
            home[name, n] = of.get(storage, (storage, n))
            if storage not in of:
                makes.add((storage, n))
        work.reads[n], work.makes[n] = reads, makes
    # Random ops keep their order, and so do ops of a microbatch that may run only once.
    single: dict[tuple[bool, int], list[int]] = {}
    for n in work.nodes:
        op = work.ops[n % count]
        if n < count and (op.random or not op.recomputable):
            single.setdefault((op.is_forward, op.piece.microbatch), []).append(n)
    pairs = [pair for nodes in single.values() for pair in pairwise(nodes)]
    pairs += pairwise([n for n in work.nodes if n < count and work.ops[n].random])
    for first, then in pairs:
        if first not in before[then]:
            before[then].add(first)
            work.after[first].append(then)
    return before


def _measure(work: Work, before: dict[int, set[int]], defer: bool = True) -> Work:
    """Compute deadlines and tails. The deadline of recompute is the earliest place in the trace
    that needs it; weight gradients, and recompute that only they need, have none."""
    count, after, deadline, tail = work.count, work.after, work.deadline, work.tail
    letters, roles = work.letters, work.roles
    for n in reversed(work.nodes):
        users = after[n]
        if n >= count:
            deadline[n] = min([deadline[user] for user in users], default=NEVER)
        else:
            deadline[n] = NEVER if defer and letters[n] == "W" else n
        length = work.compute[n % count] + (work.comm[n % count] if roles[n] == "start" else 0)
        tail[n] = length + max([tail[user] for user in users], default=0)
        work.needs[n] = len(before[n])
        work.age[n] = min([work.age[u] for u in users], default=n) if work.is_lazy(n) else n
    lazy = {n for n in work.nodes if work.is_lazy(n)}
    for n in work.nodes:
        work.asks[n] = [other for other in before[n] if other in lazy] if lazy else []
    return work
