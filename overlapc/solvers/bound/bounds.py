"""Lower bounds on the step time of any legal plan within the budget."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from math import ceil, inf

from overlapc.core.errors import Infeasible
from overlapc.core.ir import Problem
from overlapc.core.simulate import saved_bytes
from overlapc.solvers.bound.program import IntegerProgram
from overlapc.solvers.choose.choice import Choice


def bound_ns(problem: Problem, program: IntegerProgram | None = None) -> int:
    """The better of the simple bound and the optimum of the relaxed program, which counts windows
    and the recompute that memory forces. It takes some hundredths of a second. `program` is
    one that was made of the problem with another budget or other microbatches in flight."""
    if problem.trace.ahead:  # the program has windows only where a backward follows its own forward
        return simple_bound_ns(problem)
    try:
        made = IntegerProgram(problem) if program is None else program.of(problem)
        return max(simple_bound_ns(problem), made.relaxed().bound_ns)
    except Infeasible:  # no plan fits, so any bound is right
        return simple_bound_ns(problem)


def simple_bound_ns(problem: Problem) -> int:
    """The sum of the phases' least times."""
    return sum(phase_bounds_ns(problem))


def phase_bounds_ns(problem: Problem, cut: bool = False) -> list[int]:
    """For each phase the largest of: all compute, each lane's communication, the longest path
    of dependent work. No recompute, no slowdown: those only add. If the batch is `cut` into
    slices, which do not depend on one another, the path is a slice's, and bounds nothing."""
    trace = problem.trace
    compute = [0] * len(problem.phases)
    lanes: dict[tuple[int, str], int] = {}
    path = [0] * len(problem.phases)
    finish: dict[str, int] = {}
    for op in trace.ops:
        phase = problem.phase_of(op)
        cost = problem.cost(op.name)
        compute[phase] += cost.compute_ns
        begin = 0
        for name in op.inputs:
            maker = trace.op.get(trace.value[name].producer)
            if maker is None or maker.piece.microbatch != op.piece.microbatch:
                continue  # an earlier step made it
            if problem.phase_of(maker) == phase:
                begin = max(begin, finish[maker.name])
        finish[op.name] = begin + cost.compute_ns
        if op.role == "start":
            finish[op.name] += cost.comm_ns
            key = (phase, op.lane)
            lanes[key] = lanes.get(key, 0) + cost.comm_ns
        path[phase] = max(path[phase], finish[op.name])
    return [
        max(
            [compute[phase], 0 if cut else path[phase]]
            + [ns for (p, _), ns in lanes.items() if p == phase]
        )
        for phase in range(len(problem.phases))
    ]


class Within:
    """`bound_ns` of one problem for budget after budget; its program is built once."""

    def __init__(self, problem: Problem) -> None:
        self.simple_ns = simple_bound_ns(problem)
        self._program = IntegerProgram(replace(problem, budget_bytes=0))
        self._highs = self._program.model.highs(whole=False)

    def ns(self, budget_bytes: int) -> float:
        """The bound for this budget; infinite if no plan can fit."""
        self._program.limit(self._highs, budget_bytes)
        try:
            return max(self.simple_ns, self._program.relaxed(self._highs).bound_ns)
        except Infeasible:
            return inf


class Least:
    """The least time and memory of any plan of a choice: solvers need not order choices that cannot
    be the best."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        bounds_ns = phase_bounds_ns(problem)
        self.simple_ns = sum(bounds_ns)
        self.before_ns = bounds_ns[0] if len(problem.phases) == 2 else 0
        first = problem.phases[0] if len(problem.phases) == 2 else ""
        ops = [op for op in problem.trace.ops if op.piece.letter not in first]
        self.compute_ns, self.comm_ns = self._taken(op.name for op in ops)

    def _taken(self, names: Iterable[str]) -> tuple[int, Counter[str]]:
        """Compute of these ops, and communication by lane."""
        compute, comm = 0, Counter[str]()
        for name in names:
            cost = self.problem.cost(name)
            compute += cost.compute_ns
            comm[self.problem.trace.op[name].lane] += cost.comm_ns
        return compute, comm

    def ns(self, choice: Choice) -> int:
        """The least time. The last phase has its own compute and communication, and that of
        recompute."""
        again, comm = self._taken(choice.recomputed)
        busiest = max((self.comm_ns + comm).values(), default=0)
        return max(self.simple_ns, self.before_ns + max(self.compute_ns + again, busiest))

    def bytes(self, choice: Choice) -> int:
        """The least memory: the saved values, once for each microbatch in flight."""
        copies = 1 + self.problem.copies
        saved = saved_bytes(self.problem, choice.saved)
        return self.problem.resident_bytes + ceil(copies * saved)
