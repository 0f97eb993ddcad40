"""The first solver: keep what is dear to recompute, and fill communication windows jointly with
recompute and weight gradients.

    keep_path   which storages to save, for less and less memory
    Scheduler   for one choice and one memory limit, an issue order by list scheduling
    overlap_plans   a menu of both, the same for every budget

Recompute has a deadline and raises memory until its use; a weight gradient can wait but keeps
its inputs alive until it runs. So a window takes recompute first (it is lost as a filler once
its deadline comes) as far as memory allows, then weight gradients; near the memory limit weight
gradients that free memory run at once.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

from overlapc.ir import Plan, Problem, issue
from overlapc.simulate import memory_curve, saved_bytes
from overlapc.solvers.choice import Choice, Needs, on_demand
from overlapc.solvers.keep import keep_path

_NEVER = 1 << 60


@dataclass(frozen=True)
class Style:
    """How a schedule is built. `overshoot`: a filler may be this many times longer than what is
    left of the window. `by_path`: among ready ops take the one with the longest path to the end,
    else the first in the trace."""

    overshoot: float
    by_path: bool


_STYLES = (Style(1.0, False), Style(4.0, False), Style(2.0, True))
_EVALUATIONS = 90_000  # about how many ops are scheduled in all for one problem


def overlap_plans(problem: Problem) -> Iterator[Plan]:
    """Candidate plans over the whole range of memory, whatever the budget is."""
    needs = Needs(problem.trace)
    path = keep_path(problem, needs)
    effort = max(1, _EVALUATIONS // max(1, len(problem.trace.ops)))
    points = _points(problem, needs, path, at_most=min(48, max(8, effort // 3)))
    forward = _forward_orders(problem)
    ceiling = max(peak for peak, _ in points) * 5 // 4
    floor = min(peak for peak, _ in points)
    rungs = min(14, max(5, effort // 12), 2 + len(problem.trace.ops) // 4)
    levels = sorted(
        {floor + (ceiling - floor) * i // rungs for i in range(rungs + 1)}
        | {peak for peak, _ in points[:1]}
    )
    styles = _STYLES if effort > 60 else _STYLES[:1] if effort < 20 else _STYLES[:2]
    shares = (1000, 940, 860, 740) if effort > 60 else (970, 850)
    tried: set[tuple[int, int, Style]] = set()
    found: set[tuple[int, tuple[str, ...]]] = set()
    for _, choice in points:
        yield _plan(problem, choice, on_demand(problem.trace, choice))
    for level in levels:
        for share in shares:
            fitting = [i for i, (peak, _) in enumerate(points) if peak * 1000 <= level * share]
            if not fitting:
                continue
            chosen = fitting[0]
            for style in styles:
                if (chosen, level, style) in tried:
                    continue
                tried.add((chosen, level, style))
                choice = points[chosen][1]
                backward = Scheduler(problem, choice, level, style).backward()
                if (chosen, backward) in found:
                    continue
                found.add((chosen, backward))
                for first in forward:
                    yield _plan(problem, choice, first + backward)


def _plan(problem: Problem, choice: Choice, order: tuple[str, ...]) -> Plan:
    return Plan(problem.trace.digest, "overlap", choice.saved, order)


def _points(
    problem: Problem, needs: Needs, path: list[frozenset[str]], at_most: int
) -> list[tuple[int, Choice]]:
    """Choices along the path with the peak of their plain order, peaks falling."""
    size = {value.storage: value.bytes for value in problem.trace.values}
    weights = [sum(size[s] for s in kept) for kept in path]
    span = weights[0] - min(weights)
    wanted = [weights[0] - span * i // at_most for i in range(at_most + 1)]
    picked = []
    index = 0
    for weight in wanted:
        while index + 1 < len(path) and weights[index] > weight:
            index += 1
        if not picked or picked[-1] != index:
            picked.append(index)
    found: list[tuple[int, Choice]] = []
    for i in picked:
        choice = needs.complete(path[i])
        plan = _plan(problem, choice, on_demand(problem.trace, choice))
        peak = max(memory_curve(problem, plan), default=0)
        if not found or peak < found[-1][0]:
            found.append((peak, choice))
    return found


def _forward_orders(problem: Problem) -> list[tuple[str, ...]]:
    """The trace's own forward order, and one that starts collectives as early as it can."""
    plain = tuple(op.name for op in problem.trace.ops if op.is_forward)
    early = Scheduler(problem, Choice((), ()), _NEVER, Style(1.0, True)).forward()
    return [plain] if early == plain else [plain, early]


class Scheduler:
    """List scheduling of one phase for one choice. State is of one call; make a new one each.

    A node is an op of the trace, or a recomputed op (index shifted by the number of ops).
    """

    def __init__(self, problem: Problem, choice: Choice, limit: int, style: Style) -> None:
        self.problem = problem
        self.trace = problem.trace
        self.choice = choice
        self.limit = limit
        self.style = style
        self.ops = problem.trace.ops
        self.count = len(self.ops)

    def forward(self) -> tuple[str, ...]:
        nodes = [i for i, op in enumerate(self.ops) if op.is_forward]
        return self._run(nodes, [])

    def backward(self) -> tuple[str, ...]:
        again = set(self.choice.recomputed)
        nodes = [i for i, op in enumerate(self.ops) if not op.is_forward]
        recomputed = [self.count + i for i, op in enumerate(self.ops) if op.name in again]
        return self._run(nodes, recomputed)

    # ------------------------------------------------------------------ preparation

    def _run(self, nodes: list[int], recomputed: list[int]) -> tuple[str, ...]:
        count, ops, trace, problem = self.count, self.ops, self.trace, self.problem
        index = {op.name: i for i, op in enumerate(ops)}
        saved = set(self.choice.saved)
        mine = set(nodes) | set(recomputed)
        everything = recomputed + nodes
        backward = bool(nodes) and not ops[nodes[0]].is_forward

        # Dependencies, and the storage instances each node reads and makes.
        before: dict[int, set[int]] = {n: set() for n in everything}
        after: dict[int, list[int]] = {n: [] for n in everything}
        reads: dict[int, set[tuple[str, int]]] = {n: set() for n in everything}
        makes: dict[int, set[tuple[str, int]]] = {n: set() for n in everything}
        home: dict[tuple[str, int], tuple[str, int]] = {}  # value instance -> storage instance
        outputs = {trace.value[name].storage for name in trace.outputs}
        for n in everything:
            op = ops[n % count]
            again = n >= count
            for name in op.inputs:
                value = trace.value[name]
                if not value.producer:
                    continue
                maker = index[value.producer]
                if (again or backward) and ops[maker].is_forward:
                    if name in saved:
                        maker = -1
                    else:
                        maker += count
                if maker in mine and maker not in before[n]:
                    before[n].add(maker)
                    after[maker].append(n)
                if value.storage in trace.resident:
                    continue
                where = home.get((name, maker), (value.storage, -1))
                reads[n].add(where)
            for name in op.outputs:
                value = trace.value[name]
                if value.storage in trace.resident:
                    continue
                alias = next((r for r in reads[n] if r[0] == value.storage), None)
                home[name, n] = alias or (value.storage, n)
                if alias is None:
                    makes[n].add((value.storage, n))
        if not backward:
            self._chain_random(nodes, before, after)
        size = {value.storage: value.bytes for value in trace.values}

        compute = {n: problem.cost(ops[n % count].name).compute_ns for n in everything}
        comm = {n: problem.cost(ops[n % count].name).comm_ns for n in everything}
        space = {n: problem.cost(ops[n % count].name).workspace_bytes for n in everything}

        # Recompute inherits the earliest place in the trace that needs it; what only weight
        # gradients need has none. `tail` is the longest path to the end.
        deadline: dict[int, int] = {}
        tail: dict[int, int] = {}
        for n in reversed(everything):
            op = ops[n % count]
            own = n if n < count and op.piece.letter != "W" else _NEVER
            for user in after[n]:
                if n >= count:
                    own = min(own, deadline[user])
            deadline[n] = own
            length = compute[n] + (comm[n] if op.role == "start" else 0)
            tail[n] = length + max((tail[user] for user in after[n]), default=0)
        lazy = {n for n in everything if deadline[n] == _NEVER}
        by_path = self.style.by_path

        def rank(n: int) -> tuple[int, int]:
            if n >= count:
                return (deadline[n], n)
            return (-tail[n], n) if by_path else (n, n)

        # Memory: instances alive, and the plain order's needs ahead.
        readers: dict[tuple[str, int], int] = {}
        for n in everything:
            for where in reads[n]:
                readers[where] = readers.get(where, 0) + 1
        memory = 0
        if backward:
            held = {trace.value[name].storage for name in self.choice.saved}
            for op in ops:
                if op.is_forward:
                    held |= {trace.value[o].storage for o in op.outputs} & outputs
            memory = sum(size[s] for s in held if s not in trace.resident)
        memory += problem.resident_bytes
        memory += (problem.in_flight - 1) * saved_bytes(problem, self.choice.saved)
        ahead = _Ahead(problem, self.choice) if backward and self.limit < _NEVER else None

        # ---------------------------------------------------------------- the loop

        missing = {n: len(before[n]) for n in everything}
        ready: list[tuple[tuple[int, int], int]] = []  # on the way to the result
        refill: list[tuple[tuple[int, int], int]] = []  # recompute with a deadline
        spare: list[tuple[int, int]] = []  # weight gradients and their recompute, oldest first
        flying: list[tuple[int, int]] = []  # (end, wait node) of collectives waited for
        ends: dict[int, int] = {}
        lane_free: dict[str, int] = {}
        order: list[int] = []
        now = 0
        slow = problem.profile.slowdown.compute_permille
        busy_until = 0

        def free_after(n: int) -> int:
            """Bytes alive more (or less) once the node has run."""
            change = sum(size[s] for s, _ in makes[n])
            for where in reads[n]:
                if readers[where] == 1 and where[0] not in outputs:
                    change -= size[where[0]]
            for where in makes[n]:
                if not readers.get(where) and where[0] not in outputs:
                    change -= size[where[0]]
            return change

        def allocates(n: int) -> int:
            return sum(size[s] for s, _ in makes[n]) + space[n]

        def arrive(n: int) -> None:
            """All inputs of the node are there."""
            op = ops[n % count]
            if op.role == "wait":
                start = index[trace.start_of[op.name]] + (count if n >= count else 0)
                heapq.heappush(flying, (ends.get(start, 0), n))
            elif n in lazy:
                heapq.heappush(spare, (n % count, n))
            elif n >= count:
                heapq.heappush(refill, (rank(n), n))
            else:
                heapq.heappush(ready, (rank(n), n))

        def run(n: int) -> None:
            nonlocal now, memory, busy_until
            order.append(n)
            op = ops[n % count]
            took = compute[n]
            if took and now < busy_until:
                took = took * slow // 1000
            now += took
            memory += free_after(n)
            for where in reads[n]:
                readers[where] -= 1
            if op.role == "start":
                begin = max(now, lane_free.get(op.lane, 0))
                ends[n] = lane_free[op.lane] = begin + comm[n]
                busy_until = max(busy_until, ends[n])
            for user in after[n]:
                missing[user] -= 1
                if missing[user] == 0:
                    arrive(user)

        def relieve(need: int) -> None:
            """Run weight gradients that free memory until `need` bytes fit, or none is left."""
            while memory + need > self.limit and spare:
                found = (
                    min((free_after(n), key, n) for key, n in sorted(spare)[:32] if n < count)
                    if any(n < count for _, n in spare[:32])
                    else None
                )
                if found is None or found[0] >= 0:
                    return
                spare.remove((found[1], found[2]))
                heapq.heapify(spare)
                run(found[2])

        def land() -> None:
            """Waits whose collective has ended cost nothing: take them at once."""
            while flying and flying[0][0] <= now:
                _, n = heapq.heappop(flying)
                run(n)

        def filler(gap: int) -> int | None:
            """Something to run while a collective that the result needs is in flight."""
            longest = int(gap * self.style.overshoot)
            if refill:
                key, n = refill[0]
                room = ahead is None or (
                    memory + allocates(n) <= self.limit
                    and ahead.fits(order, memory, key[0], free_after(n), self.limit)
                )
                if room and (compute[n] <= longest or not spare):
                    heapq.heappop(refill)
                    return n
            best = None
            for key, n in spare[:24]:
                if compute[n] > longest or memory + allocates(n) > self.limit:
                    continue
                if best is None or compute[n] > compute[best[1]]:
                    best = (key, n)
                if by_path is False:
                    break
            if best is not None:
                spare.remove(best)
                heapq.heapify(spare)
                return best[1]
            return None

        for n in everything:
            if missing[n] == 0:
                arrive(n)
        while len(order) < len(everything):
            land()
            if ready:
                _, n = heapq.heappop(ready)
                relieve_need = allocates(n)
                if backward and memory + relieve_need > self.limit and spare:
                    relieve(relieve_need)
                if ahead is not None and n < count:
                    ahead.passed = n
                run(n)
                continue
            urgent = [end for end, n in flying if n not in lazy]
            if urgent:
                end = min(urgent)
                found = filler(end - now)
                if found is None:
                    now = end
                else:
                    run(found)
            elif refill:
                _, n = heapq.heappop(refill)
                if memory + allocates(n) > self.limit and spare:
                    relieve(allocates(n))
                run(n)
            elif spare:
                _, n = heapq.heappop(spare)
                run(n)
            elif flying:
                now = flying[0][0]
            else:
                break
        return tuple(issue(ops[n % count].name, n >= count) for n in order)

    def _chain_random(
        self, nodes: list[int], before: dict[int, set[int]], after: dict[int, list[int]]
    ) -> None:
        """Random ops of the forward draw in the trace's order."""
        last = None
        for n in nodes:
            if self.ops[n].random or not self.ops[n].recomputable:
                if last is not None and last not in before[n]:
                    before[n].add(last)
                    after[last].append(n)
                last = n


class _Ahead:
    """What the plain order would need from here to a deadline, as a guide for prefetching."""

    def __init__(self, problem: Problem, choice: Choice) -> None:
        order = on_demand(problem.trace, choice)
        plan = Plan("", "", choice.saved, order)
        curve = memory_curve(problem, plan)
        index = {op.name: i for i, op in enumerate(problem.trace.ops)}
        self.at: list[int] = []  # position in the trace of each backward op
        self.need: list[int] = []  # most bytes from the op before to this one
        most = 0
        for text, bytes_ in zip(order, curve, strict=True):
            most = max(most, bytes_)
            op = index.get(text)
            if op is not None and not problem.trace.ops[op].is_forward:
                self.at.append(op)
                self.need.append(most)
                most = 0
        self.passed = self.at[0] if self.at else 0
        self.base = {op: bytes_ for op, bytes_ in zip(self.at, self.need, strict=True)}

    def fits(self, order: list[int], memory: int, deadline: int, more: int, limit: int) -> bool:
        """Would `more` bytes from now to the deadline stay under the limit?"""
        first = bisect_right(self.at, self.passed)
        last = bisect_left(self.at, min(deadline, _NEVER))
        here = self.base.get(self.passed, memory)
        extra = max(0, memory - here)
        most = max(self.need[first:last], default=0)
        return most + extra + more <= limit
